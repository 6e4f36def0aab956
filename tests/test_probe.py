"""The probe: options, stack distances, the arithmetic of predictions, and the command from end to end."""

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.policy import save_popularity
from flashmoe_jax.probe import block, drive, measure
from flashmoe_jax.probe.__main__ import main
from flashmoe_jax.probe.arguments import parse_rates
from flashmoe_jax.probe.hit_rates import PopularRouting, TracedRouting, UniformRouting, hit_rate, stack_distances
from flashmoe_jax.probe.model import token_work
from flashmoe_jax.probe.predict import Drive, Prediction, TokenWork, predict
from flashmoe_jax.probe.rounds import in_turn
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, Trace, save_trace

EXPERTS, TOP_K, LAYERS = 5, 3, 3  # of the tiny model
RATES = ("drive_read_bytes_per_s", "memory_read_bytes_per_s", "kernel_bytes_per_s", "device_copy_bytes_per_s")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    return convert(write_hf_checkpoint(folder / "hf", tiny_hf_config("olmoe")), folder / "model")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and blocks that take no time."""
    monkeypatch.setattr(measure, "TEMPORARY_BYTES", 64 << 20)
    monkeypatch.setattr(block, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(block, "_last_cache_bytes", lambda: 0)


def random_trace(seed: int, tokens: int, experts: int = EXPERTS, layers: int = LAYERS, top_k: int = TOP_K) -> Trace:
    random = np.random.default_rng(seed)
    ids = np.array([[random.permutation(experts)[:top_k] for _ in range(layers)] for _ in range(tokens)], np.int32)
    rows = np.arange(tokens, dtype=np.int32)
    phase = np.where(rows < tokens // 4, PREFILL, DECODE).astype(np.uint8)
    return Trace(ids=ids, seq_id=rows * 0, phase=phase, step=rows, token=rows, meta={"experts": experts})


# Options.


def test_rates_are_read() -> None:
    assert parse_rates("2GB/s, 3.5GB/s,800MiB/s") == {"2GB/s": 2 * 10**9, "3.5GB/s": 35 * 10**8, "800MiB/s": 800 << 20}


@pytest.mark.parametrize("text", ["", "2", "2GB", "2GB/s,", "2GB/h", "fast", "-1GB/s", "2XB/s", "2/s"])
def test_a_rate_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood; write for example 2GB/s") as error:
        parse_rates(text)
    assert "\n" not in str(error.value)


def test_a_drive_that_stands_still_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 0B/s"):
        parse_rates("0GB/s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{empty}", "--drive", "2GB/s"], "--drive is for predictions, which need a model directory"),
        (["{empty}", "--max-context", "64"], "--max-context is for predictions"),
        (["{empty}/none"], "none is no directory"),
        (["{model}", "--drive", "2GB"], "drive rate '2GB'"),
        (["{model}", "--seconds", "0"], "--seconds 0 is out of range"),
        (["{model}", "--trace", "none.npz"], "--trace none.npz does not exist"),
        (["{model}", "--budget", "1slots"], "a token needs 3 of 5 experts"),
        (["{model}", "--budget", "1MiB"], "is too small"),
        (["{model}", "--max-context", "100000"], "--max-context 100000 is out of range; this model takes 1 to 256"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([option.format(empty=tmp_path, model=model) for option in options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and message in shown.err
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Hit rates.


class PlainLru:
    """One layer of slots, full from the start: higher ids leave first, as they come last in the stack."""

    def __init__(self, slots: int, num_experts: int):
        self._slots, self._stack = slots, OrderedDict.fromkeys(range(num_experts - 1, -1, -1))

    def step(self, experts: list[int]) -> list[bool]:
        resident = list(self._stack)[-self._slots :]
        hits = [expert in resident for expert in experts]
        for expert in sorted(experts, reverse=True):
            self._stack.move_to_end(expert)
        return hits


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 8), st.data())
def test_stack_distances_give_the_hits_of_lru(seed: int, tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    ids = random_trace(seed, tokens, experts, 2, top_k).ids
    distances = stack_distances(ids, experts)
    for slots in range(1, experts + 1):
        for layer in range(2):
            lru = PlainLru(slots, experts)
            for token in range(tokens):
                hits = lru.step(ids[token, layer].tolist())
                assert (distances[token, layer] < slots).tolist() == hits


def test_missing_ids_use_nothing() -> None:
    distances = stack_distances(np.array([[[3]], [[-1]], [[2]], [[3]]]), 4)
    assert distances[:, 0, 0].tolist() == [3, -1, 3, 1]


def routings(seed: int) -> list[Any]:
    popularity = np.random.default_rng(seed).integers(0, 9, (LAYERS, EXPERTS)).astype(np.float32)
    popularity[0] = 0
    return [
        UniformRouting(EXPERTS, TOP_K),
        PopularRouting(popularity, TOP_K, "popular"),
        TracedRouting(random_trace(seed, 24), LAYERS, EXPERTS, TOP_K, "traced"),
    ]


@given(st.integers(0, 2**32 - 1))
def test_more_slots_never_miss_more(seed: int) -> None:
    for routing in routings(seed):
        shares = np.stack([routing.miss_shares(slots) for slots in range(TOP_K, EXPERTS + 1)])
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        at_most = np.cumsum(shares, axis=1)  # share of (token, layer) pairs with at most m misses
        assert np.all(np.diff(at_most, axis=0) >= -1e-12)
        assert hit_rate(routing, EXPERTS) == pytest.approx(1)


def test_uniform_routing_hits_as_many_as_there_are_slots() -> None:
    routing = UniformRouting(64, 8)
    assert [hit_rate(routing, slots) for slots in (8, 16, 64)] == pytest.approx([1 / 8, 1 / 4, 1])


def test_popular_experts_are_hit() -> None:
    routing = PopularRouting(np.array([[6.0, 1, 2, 1], [1, 1, 1, 1]]), 2, "")
    assert hit_rate(routing, 2) == pytest.approx((8 / 10 + 2 / 4) / 2)


def test_prompts_fill_the_slots_and_do_not_count() -> None:
    trace = random_trace(0, 2, experts=4, layers=1, top_k=1)
    trace = trace._replace(ids=np.array([[[3]], [[3]]], np.int32))
    decoded = trace._replace(phase=np.array([PREFILL, DECODE], np.uint8))
    assert hit_rate(TracedRouting(decoded, 1, 4, 1, ""), 1) == 1
    unmarked = trace._replace(phase=np.array([PREFILL, PREFILL], np.uint8))
    assert hit_rate(TracedRouting(unmarked, 1, 4, 1, ""), 1) == 0.5


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a trace of this model"):
        TracedRouting(random_trace(0, 4), LAYERS, EXPERTS - 1, TOP_K, "")
    with pytest.raises(ConfigError, match="use a trace of this model"):
        TracedRouting(random_trace(0, 4), LAYERS, EXPERTS, TOP_K - 1, "")


# Predictions.

WORK = TokenWork(
    num_layers=16, experts_per_token=8, record_bytes=12 << 20, expert_bytes=12 << 20, dense_bytes=700 << 20
)
rates = st.floats(1e6, 1e12)


def predicted(shares: np.ndarray, rate: float, compute: float, **options: float) -> Prediction:
    return predict(WORK, shares, Drive.of_rate("given", rate), compute_bytes_per_s=compute, **options)


def all_missed(count: int) -> np.ndarray:
    return np.eye(9)[count]


@given(st.integers(8, 63), rates, rates, st.floats(1, 10), st.floats(0, 1))
def test_predictions_are_monotone(slots: int, rate: float, compute: float, factor: float, prefetch: float) -> None:
    routing = UniformRouting(64, 8)
    shares = routing.miss_shares(slots)
    base = predicted(shares, rate, compute, prefetch_share=prefetch).tokens_per_s
    slack = base * (1 - 1e-9)
    assert predicted(shares, rate * factor, compute, prefetch_share=prefetch).tokens_per_s >= slack
    assert predicted(shares, rate, compute * factor, prefetch_share=prefetch).tokens_per_s >= slack
    assert predicted(routing.miss_shares(slots + 1), rate, compute, prefetch_share=prefetch).tokens_per_s >= slack
    assert predicted(shares, rate, compute, prefetch_share=1).tokens_per_s >= slack
    assert predicted(shares, rate, compute, copy_bytes_per_s=rate, prefetch_share=prefetch).tokens_per_s <= base


@given(st.integers(0, 8), rates, rates)
def test_nothing_is_faster_than_what_it_must_read_and_compute(missed: int, rate: float, compute: float) -> None:
    result = predicted(all_missed(missed), rate, compute)
    limit = 1 / max(16 * missed * WORK.record_bytes / rate, WORK.touched_bytes / compute)
    assert result.limit_tokens_per_s == pytest.approx(limit)
    assert result.tokens_per_s <= limit * (1 + 1e-9)
    # At worst one after the other.
    in_turn_s = 16 * missed * WORK.record_bytes / rate + WORK.touched_bytes / compute
    assert result.tokens_per_s >= (1 - 1e-9) / in_turn_s


def test_without_misses_only_memory_counts() -> None:
    result = predicted(all_missed(0), 1e9, 25e9)
    assert result.tokens_per_s == pytest.approx(25e9 / WORK.touched_bytes)
    assert (result.bound, result.read_bytes_per_s) == ("memory", 1e9)


def test_by_hand() -> None:
    work = TokenWork(num_layers=2, experts_per_token=2, record_bytes=100, expert_bytes=50, dense_bytes=20)
    # A layer computes 10 dense and 50 per expert at 10 a second, and reads one record in 10 s.
    drive_of_10 = Drive.of_rate("given", 10)
    shares = np.array([0.0, 1.0, 0.0])
    in_turn_s, at_least_s = 2 * (1 + max(5, 10) + 5), max(2 * 10, 2 * (1 + 5 + 5))
    result = predict(work, shares, drive_of_10, compute_bytes_per_s=10, prefetch_share=0.25)
    assert result.tokens_per_s == pytest.approx(1 / (at_least_s + 0.75 * (in_turn_s - at_least_s)))
    assert result.bound == "memory"
    copied = predict(work, shares, drive_of_10, compute_bytes_per_s=10, copy_bytes_per_s=5, prefetch_share=0)
    assert copied.tokens_per_s == pytest.approx(1 / (2 * (1 + 20 + 5)))
    assert copied.bound == "copy"


def test_more_reads_in_flight_use_what_they_measured() -> None:
    measured = Drive("measured", {1: 10.0, 2: 15.0, 4: 40.0, 8: 80.0})
    assert [measured.read_seconds(n, 10) for n in range(6)] == pytest.approx([0, 1, 20 / 15, 2, 2, 2])


def test_of_an_untied_embedding_one_row_is_touched(model: Path, tmp_path: Path) -> None:
    directory = ModelDirectory.open(model)
    config = directory.config
    embedding = config.vocab_size * config.hidden_size * 4
    assert token_work(directory).dense_bytes == directory.manifest.dense_bytes - embedding
    tied = convert(
        write_hf_checkpoint(tmp_path / "hf", tiny_hf_config("olmoe", tie_word_embeddings=True)), tmp_path / "m"
    )
    assert token_work(ModelDirectory.open(tied)).dense_bytes == ModelDirectory.open(tied).manifest.dense_bytes


# Measurements.


def test_rounds_take_turns_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def call(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    results = in_turn({"a": lambda: call("a"), "b": lambda: call("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert results == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


@pytest.mark.usefixtures("small")
def test_a_temporary_file_leaves_nothing(tmp_path: Path) -> None:
    with drive.of_temporary_file(tmp_path, 1 << 20, 8 << 20) as reader:
        assert not list(tmp_path.iterdir())
        assert reader.num_places == 8
        assert reader.rate(2, 0.0) > 0
    assert not list(tmp_path.iterdir())


def test_no_room_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MiB free"), drive.of_temporary_file(tmp_path, 1 << 20, 1 << 60):
        pass


def test_without_direct_reads_it_reads_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_DIRECT", 0)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * 4096))
    with drive.of_files([path, path], 4096) as reader:
        assert not reader.is_direct
        assert reader.num_places == 6
        assert reader.rate(4, 0.0) > 0


@pytest.mark.usefixtures("small")
def test_a_directory_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(tmp_path), "--seconds", "0.01", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert set(result) == {*RATES, "machine", "notes"}
    assert list(result["drive_read_bytes_per_s"]) == ["1", "2", "4", "8", "16"]
    assert all(rate > 0 for rate in result["drive_read_bytes_per_s"].values())
    assert all(result[name] > 0 for name in RATES[1:])
    assert set(result["machine"]) == {
        *("cores", "memory_total_bytes", "memory_available_bytes", "cgroup_limit_bytes", "device")
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_a_model_is_predicted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    # A limit is given in hundredths of MiB or GiB; beside 1 GiB of other tests' memory a slot of this model is less.
    monkeypatch.setattr("flashmoe_jax.probe.budgets.rss_bytes", lambda: 300 << 20)
    trace = tmp_path / "routes.npz"
    save_trace(random_trace(0, 50), trace)
    options = ["--seconds", "0.01", "--json", "--drive", "1GB/s,2GB/s", "--trace", str(trace), "--max-context", "64"]
    assert main([str(model), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {*RATES, "machine", "notes", "predictions", "recommended"}
    rows = result["predictions"]
    assert [row["drive"] for row in rows[:3]] == ["measured", "1GB/s", "2GB/s"]
    assert rows[1]["drive_read_bytes_per_s"] == 10**9
    assert sorted({row["slots_per_layer"] for row in rows}) == [3, 4, 5]
    for name in ("1GB/s", "2GB/s"):
        speeds = [row["tokens_per_s"] for row in rows if row["drive"] == name]
        assert speeds == sorted(speeds)
    assert {row["bound"] for row in rows} <= {"drive", "memory"}
    assert rows[-1]["hit_rate"] == 1
    assert set(result["recommended"]) == {"memory_limit", "slots", "why"}
    assert any("LRU" in note for note in result["notes"])


@pytest.mark.usefixtures("small")
def test_a_person_gets_tables(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(model), "--seconds", "0.01", "--budget", "100%,4slots"]) == 0
    shown = capsys.readouterr()
    assert "expert kernel, one token" in shown.out
    assert "recommended: --memory-limit" in shown.out
    assert "lower bound" in shown.out
    assert shown.out.index("4slots") < shown.out.index("100%")
    assert "reading" in shown.err


@pytest.mark.usefixtures("small")
def test_a_model_that_does_not_fit_is_measured_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("flashmoe_jax.probe.budgets.available_bytes", lambda: -(1 << 40))
    assert main([str(model), "--seconds", "0.01", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["predictions"] == [] and result["recommended"] is None
    assert any("no budget can be recommended" in note for note in result["notes"])


@pytest.mark.usefixtures("small")
def test_what_the_directory_knows_of_its_routing_is_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    popular = tmp_path / "model"
    popular.mkdir()
    for entry in model.iterdir():
        (popular / entry.name).symlink_to(entry)
    (popular / "policy").mkdir()
    counts = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    save_popularity(popular / "policy" / "static.npz", counts, {})
    assert main([str(popular), "--seconds", "0.01", "--json", "--budget", "4slots"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["predictions"][0]["hit_rate"] == pytest.approx(1.0)
    assert any("most popular" in note for note in result["notes"])


def test_memory_is_too_small_for_two_records(model: Path) -> None:
    layout = ModelDirectory.open(model).layout
    assert block.num_rows(layout, 2, 1 << 40)[1] == ""
    rows, note = block.num_rows(layout, 2, 8 * layout.record_bytes)
    assert rows == 4 and "caches" in note
    with pytest.raises(ValueError, match="free some"):
        block.num_rows(layout, 2, layout.record_bytes)
