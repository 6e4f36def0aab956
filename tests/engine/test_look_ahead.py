"""Look-ahead changes when bytes are read, never what is computed nor who is resident."""

import numpy as np
import pytest
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import ALL, BATCH, CONTEXT, QUARTER, TOP_K, TinyModel, make_engine, random_prompts, same_bits
from watched_store import RecordingStore, RowWatch, assert_slots_hold_their_experts

import flashmoe_jax
from flashmoe_jax.config import PrefetchMode
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.engine.prefetch import Prediction, Prefetcher, of_prompt, of_tokens
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.experts.rows import RowTable
from flashmoe_jax.telemetry.counters import StageCounters

LENGTHS = {1: [11], BATCH: [5, 16, 1, 9]}
NUM_TOKENS = 8


def run(engine: Engine, model: TinyModel, batch: int, seed: int) -> list[list[set[int]]]:
    """Generates, compares every bit, and returns who is resident after every step."""
    prompts = random_prompts(model.config, seed, LENGTHS[batch])
    expected_tokens, expected = greedy_tokens(ResidentSession(model.reference, batch, CONTEXT), prompts, NUM_TOKENS)
    session, residents = engine.session(batch), []
    logits = [np.asarray(session.prefill(prompts))]
    for step in range(NUM_TOKENS - 1):
        logits.append(np.asarray(session.decode(np.array([tokens[step] for tokens in expected_tokens]))))
        residents.append(engine.memory.resident_experts())
    same_bits(np.stack(logits), np.stack(expected))
    assert_slots_hold_their_experts(engine, model)
    return residents


@pytest.mark.parametrize("inserted", [False, True], ids=["aliased", "inserted"])
@pytest.mark.parametrize(("batch", "slots"), [(1, TOP_K), (1, QUARTER), (BATCH, QUARTER)])
@pytest.mark.parametrize("mode", ["on", "auto"])
def test_same_bits_and_same_residents(mode: str, batch: int, slots: int, inserted: bool, mixed: TinyModel):
    with (
        make_engine(mixed, slots=slots, inserted=inserted, prefetch=mode) as engine,
        make_engine(mixed, slots=slots) as plain,
    ):
        for seed in range(3):
            assert run(engine, mixed, batch, seed) == run(plain, mixed, batch, seed)
        memory, off = engine.memory, plain.memory.decode_counters
        counters = memory.decode_counters
        prompts, prompts_off = memory.prefill_counters, plain.memory.prefill_counters
        assert (prompts.accesses, prompts.evictions) == (prompts_off.accesses, prompts_off.evictions)
        assert prompts.demand_reads + prompts.prefetch_late + prompts.prefetch_useful == prompts_off.misses
        assert prompts.hits - prompts.prefetch_useful == prompts_off.hits
        assert (counters.accesses, counters.evictions) == (off.accesses, off.evictions)
        assert counters.demand_reads + counters.prefetch_late + counters.prefetch_useful == off.misses
        assert counters.hits - counters.prefetch_useful == off.hits
        assert memory.fetcher.read_bytes == counters.read_bytes + memory.prefill_counters.read_bytes
        assert (off.prefetch_useful, off.prefetch_late, off.prefetch_wasted, off.prefetch_cancelled) == (0, 0, 0, 0)
        if mode == "on":
            for stage in (counters, prompts):
                assert stage.prefetch_useful + stage.prefetch_late + stage.prefetch_wasted > 0
        # Every spare row comes back.
        assert memory.prefetcher is not None and memory.prompt_prefetcher is not None
        memory.prefetcher.settle(must=True)
        memory.prompt_prefetcher.settle(must=True)
        with memory.whole_step():
            assert memory.rows.num_free == memory.rows.num_spare


def test_no_row_is_written_while_a_computation_reads_it(mixed: TinyModel):
    store = RecordingStore(mixed)
    with make_engine(mixed, slots=TOP_K, num_staging=2, store=store, prefetch="on") as engine:
        watch = RowWatch(engine, store)
        for seed in range(3):
            run(engine, mixed, BATCH, seed)
            run(engine, mixed, 1, seed)
        assert watch.num_rewritten > 50


@pytest.mark.parametrize("reader", ["array", "range", "direct", "auto"])
def test_every_reader(reader: str, mixed: TinyModel):
    with make_engine(mixed, slots=TOP_K, reader=reader, prefetch="on") as engine:
        run(engine, mixed, 1, 0)
        shown = engine.stats()
        assert shown["reader"] in (("array", "range", "direct") if reader == "auto" else (reader,))
        assert shown["prefetch"] == "on"
        assert 0 <= shown["shares"]["stall"] + shown["shares"]["compute"] <= 1


def test_a_failed_step_forgets_what_was_read_ahead(mixed: TinyModel, monkeypatch: pytest.MonkeyPatch):
    with make_engine(mixed, slots=TOP_K, prefetch="on") as engine:
        session = engine.session(1)
        session.prefill([[3, 4, 5]])
        session.decode(np.array([6]))

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.memory.fetcher, "wait_for_some", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.decode(np.array([7]))
        assert engine.memory.rows.num_free == engine.memory.rows.num_spare
        for seed in range(2):
            run(engine, mixed, 1, seed)


def test_auto_looks_ahead_in_prompts_alone_where_everything_fits(mixed: TinyModel):
    with make_engine(mixed, slots=ALL, prefetch="auto") as engine:
        assert engine.memory.prefetcher is None and engine.memory.prompt_prefetcher is not None
        run(engine, mixed, 1, 0)


@pytest.mark.parametrize(("name", "value"), [("reader", "mmap"), ("prefetch", "yes")])
def test_unknown_choices_are_refused(name: str, value: str, mixed: TinyModel):
    with pytest.raises(ConfigError, match=f"{name} '{value}' is none of auto, "):
        flashmoe_jax.load(mixed.path, **{name: value})


class IdleFetcher:
    """Reads nothing; tells how long reads took."""

    def __init__(self) -> None:
        self.num_reads, self.busy_s = 0, 0.0
        self.ahead: list[tuple[int, int]] = []

    def read_ahead(self, layer, placements):
        self.ahead = list(placements)
        return []

    def drop(self, reads):
        return []

    def demand(self, reads):
        pass


def number_read(precision: float, idle_s: float, read_s: float, mode: str = "auto") -> int:
    """Reads ahead of eight predictions after long measurements of these."""
    fetcher, rows = IdleFetcher(), RowTable(2, 4, 8)
    prefetcher = Prefetcher(PrefetchMode(mode), fetcher, rows, StageCounters(4096), 8)  # type: ignore[arg-type]
    prefetcher._precision = [precision] * 8
    prefetcher._idle_s, prefetcher._read_s = idle_s, read_s
    prefetcher.look_ahead(1, of_tokens(np.arange(8)[None]))
    return len(fetcher.ahead)


def test_auto_reads_what_is_expected_to_pay():
    assert number_read(1.0, 0.0, 7e-3) == 0  # the drive is never idle
    assert number_read(1.0, 1e-3, 7e-3) == 1  # a sure guess loses nothing
    assert number_read(0.9, 2e-3, 7e-3) == 1  # 1.8 ms gained against 0.5 ms lost
    assert number_read(0.5, 2e-3, 7e-3) == 0  # 1.0 against 2.5
    assert number_read(0.5, 8e-3, 7e-3) == 1  # fits into the idle time
    assert number_read(0.9, 30e-3, 7e-3) == 5
    assert number_read(0.0, 1.0, 7e-3) == 0
    assert number_read(0.0, 0.0, 7e-3, mode="on") == 8


def test_precision_idle_time_and_read_time_are_measured():
    fetcher, rows = IdleFetcher(), RowTable(2, 4, 8)
    prefetcher = Prefetcher(PrefetchMode.AUTO, fetcher, rows, StageCounters(4096), 2)  # type: ignore[arg-type]
    for _ in range(200):
        prefetcher.look_ahead(1, of_tokens(np.array([[5, 6]])))
        prefetcher.demand_is_served()
        fetcher.num_reads, fetcher.busy_s = fetcher.num_reads + 2, fetcher.busy_s + 0.02
        assert prefetcher.adopt([6, 9]) == {}
    assert prefetcher._precision[0] < 0.01 and prefetcher._precision[1] > 0.99
    assert prefetcher._read_s == pytest.approx(0.01)
    assert 0 < prefetcher._idle_s < 0.01


def test_predictions_are_graded():
    both = of_tokens(np.array([[4, -1, 7], [5, 4, -1]]))
    assert both == [Prediction(4, 0), Prediction(5, 1), Prediction(7, 2)]
    assert of_prompt(np.array([0, 9, 1, 0, 2]), 4) == [Prediction(1, 3), Prediction(2, 0), Prediction(4, 1)]


def test_a_row_stays_spare_for_what_was_not_predicted():
    fetcher, rows = IdleFetcher(), RowTable(2, 4, 3)
    prefetcher = Prefetcher(PrefetchMode.ON, fetcher, rows, StageCounters(4096), 4)  # type: ignore[arg-type]
    prefetcher.look_ahead(1, of_prompt(np.arange(8), 4), num_left=1)
    assert [expert for expert, _ in fetcher.ahead] == [1, 2] and rows.num_free == 1
