"""Counters, traces and policies of a running engine, against what the reference routes and plain bookkeeping."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import BATCH, CONTEXT, HALF, QUARTER, TinyModel, make_engine, random_prompts

import flashmoe_jax
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import POLICIES
from flashmoe_jax.telemetry.counters import REFETCH_TOKENS, StageCounters
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, load_trace, popularity

LENGTHS = [5, 16, 1, 9]


class Bookkeeper:
    """Counts by watching who is resident before and after every step."""

    def __init__(self, engine: Engine):
        self._memory = engine.memory
        self.counts = {
            stage: dict.fromkeys(("accesses", "hits", "misses", "evictions", "refetches"), 0)
            for stage in ("prefill", "decode")
        }
        self._left: dict[tuple[int, int], tuple[int, str]] = {}  # (layer, expert) -> (token it left at, stage)
        self._token = 0
        self.begin_step()

    def begin_step(self) -> None:
        self._before = self._memory.resident_experts()

    def end_step(self, stage: str, ids_BLTX: np.ndarray) -> None:
        """The step asked for `ids_BLTX`, -1 where nobody asks."""
        num_positions = int((ids_BLTX >= 0).any(axis=(0, 1, 3)).sum())
        after, counts = self._memory.resident_experts(), self.counts[stage]
        for layer, (before, now) in enumerate(zip(self._before, after, strict=True)):
            asked = {int(e) for e in np.unique(ids_BLTX[:, layer]) if e >= 0}
            counts["accesses"] += len(asked)
            counts["hits"] += len(asked & before)
            counts["misses"] += len(asked - before)
            for expert in asked - before:
                first = int(np.argmax((ids_BLTX[:, layer] == expert).any(axis=(0, 2))))
                left_at, evictor = self._left.pop((layer, expert), (-1000, stage))
                self.counts[evictor]["refetches"] += self._token + first - left_at <= REFETCH_TOKENS
            for expert in before - now:
                counts["evictions"] += 1
                self._left[layer, expert] = (self._token + num_positions - 1, stage)
        self._token += num_positions
        self._before = after

    def check(self) -> None:
        for stage, counters in self._stages():
            counters.check_identities()
            assert {name: getattr(counters, name) for name in self.counts[stage]} == self.counts[stage], stage
            assert counters.demand_reads == counters.misses
            assert counters.read_bytes == counters.demand_reads * self._memory.store.layout.record_bytes
        fetcher = self._memory.fetcher
        assert fetcher.num_reads == sum(counters.demand_reads for _, counters in self._stages())
        assert fetcher.read_bytes == sum(counters.read_bytes for _, counters in self._stages())

    def _stages(self) -> list[tuple[str, StageCounters]]:
        return [("prefill", self._memory.prefill_counters), ("decode", self._memory.decode_counters)]


@settings(derandomize=True, deadline=None, max_examples=6)
@given(
    seed=st.integers(0, 99),
    lengths=st.tuples(*[st.integers(1, 16)] * BATCH),
    activity=st.lists(st.tuples(*[st.booleans()] * BATCH).filter(any), min_size=12, max_size=12),
)
def test_counters_are_what_a_bookkeeper_counts(seed: int, lengths, activity, mixed: TinyModel):
    with make_engine(mixed, slots=HALF) as engine:
        books = Bookkeeper(engine)
        random = np.random.RandomState(seed)
        for turn in range(2):
            session, plain = engine.session(BATCH), ResidentSession(mixed.reference, BATCH, CONTEXT)
            prompts = random_prompts(mixed.config, seed + turn, list(lengths))
            session.prefill(prompts)
            plain.prefill(prompts)
            books.end_step("prefill", plain.expert_ids[-1])
            books.check()
            for active_B in np.array(activity[turn::2]):
                token_B = random.randint(3, 60, size=BATCH)
                session.decode(token_B, active_B)
                plain.decode(token_B, active_B)
                books.end_step("decode", plain.expert_ids[-1])
                books.check()
        stats = engine.stats()
        for stage, shown in (("decode", stats), ("prefill", stats["prefill"])):
            refetches, evictions = books.counts[stage]["refetches"], books.counts[stage]["evictions"]
            assert shown["refetch_5"] == (refetches / evictions if evictions else None)
        assert stats["prefill"]["misses"] == books.counts["prefill"]["misses"]
        assert stats["read_bytes"] == stats["demand_reads"] * 4096


def test_stats_have_the_public_names(mixed: TinyModel):
    with make_engine(mixed, slots=HALF) as engine:
        assert engine.stats()["ttft_ms"] is None
        pieces = list(engine.generate(random_prompts(mixed.config, 0, LENGTHS), max_new_tokens=3, ignore_eos=True))
        assert len(pieces) == 3 * BATCH
        stats = engine.stats()
        assert stats["ttft_ms"] > 0 and stats["tpot_ms"]["p95"] >= stats["tpot_ms"]["p50"] > 0
        for name in "policy policy_is_learned reader slots_per_layer load_ms device_bytes host_bytes".split():
            assert stats[name] is not None
        for name in ("accesses", "hits", "misses", "demand_reads", "prefetch_reads", "read_bytes", "stall_ms"):
            assert name in stats and name in stats["prefill"]
        assert stats["hits"] + stats["misses"] == stats["accesses"] > 0
        line = engine.summary_line()
        assert re.fullmatch(r"TTFT [\d.]+ s, [\d.]+ tokens/s, hit rate [\d.]+%, \S+ read \(\S+ in prefill\)", line)


@pytest.fixture(scope="module")
def recorded(mixed: TinyModel) -> tuple[Any, ResidentSession, list[list[int]], list[list[int]]]:
    """A trace of a batch whose sequences end at different times, then of a second prompt for one sequence."""
    stop_ids = tuple(range(0, 67, 3))
    prompts = random_prompts(mixed.config, 4, LENGTHS)
    plain = ResidentSession(mixed.reference, BATCH, CONTEXT)
    tokens, _ = greedy_tokens(plain, prompts, 6, stop_ids)
    with make_engine(mixed, slots=HALF, record_trace=True) as engine:
        with pytest.raises(ConfigError, match="the trace is empty"):
            engine.trace()
        got = greedy_tokens(engine.session(BATCH), prompts, 6, stop_ids)[0]
        assert got == tokens
        engine.session(1).prefill([[7, 8]])
        return engine.trace(), plain, prompts, tokens


def test_a_trace_holds_what_was_routed(recorded, mixed: TinyModel):
    trace, plain, prompts, tokens = recorded
    assert trace.meta == {"model": "model", "family": "qwen2_moe", "experts": 16, "top_k": 3}
    assert sorted(set(map(len, tokens)))[0] < 6, "no sequence ends early"
    num_prompt_tokens = sum(LENGTHS)
    in_prompt = trace.step == 0
    assert in_prompt.sum() == num_prompt_tokens
    assert (trace.phase[in_prompt] == PREFILL).all()
    # Within the prompt's step: sequence by sequence, position by position.
    assert trace.seq_id[in_prompt].tolist() == [b for b, prompt in enumerate(prompts) for _ in prompt]
    assert trace.token[in_prompt].tolist() == [token for prompt in prompts for token in prompt]
    ids_BLTX = plain.expert_ids[0]
    expected = np.concatenate([ids_BLTX[b, :, : len(p)].swapaxes(0, 1) for b, p in enumerate(prompts)])
    np.testing.assert_array_equal(trace.ids[in_prompt], expected)
    for step, step_ids in enumerate(plain.expert_ids[1:]):
        rows = trace.step == step + 1
        assert (trace.phase[rows] == DECODE).all()
        active = [b for b in range(BATCH) if len(tokens[b]) > step + 1]
        assert trace.seq_id[rows].tolist() == active
        assert trace.token[rows].tolist() == [tokens[b][step] for b in active]
        np.testing.assert_array_equal(trace.ids[rows], step_ids[active, :, 0])
    last = trace.step == trace.step.max()
    assert trace.seq_id[last].tolist() == [BATCH, BATCH]
    assert trace.token[last].tolist() == [7, 8]


def test_a_trace_feeds_a_static_policy(recorded, mixed: TinyModel, tmp_path: Path):
    trace, *_ = recorded
    flashmoe_jax.telemetry.trace.save_trace(trace, tmp_path / "trace.npz")
    counts = popularity(load_trace(tmp_path / "trace.npz"), mixed.config.num_moe_layers, mixed.config.num_experts)
    assert counts.sum() == trace.ids.size
    with flashmoe_jax.load(
        mixed.path, device_budget="25%", policy="static", policy_trace=tmp_path / "trace.npz", max_context=CONTEXT
    ) as engine:
        np.testing.assert_array_equal(engine.memory.policy_params, counts)
        assert engine.plan.slots_per_layer == QUARTER
        with pytest.raises(ConfigError, match="no trace was recorded"):
            engine.save_trace(tmp_path / "other.npz")


def test_policies_choose_different_victims(mixed: TinyModel):
    """At 25 %, on one and the same run; the tokens are the reference's, see test_exact."""
    prompts = random_prompts(mixed.config, 1, LENGTHS)
    tokens = np.random.RandomState(2).randint(3, 60, size=(24, BATCH))
    only_one = np.arange(BATCH) == 1  # few experts are needed in a step, so that there is a choice
    residents = {}
    for policy in POLICIES:
        with make_engine(mixed, slots=QUARTER, policy=policy) as engine:
            session = engine.session(BATCH)
            session.prefill(prompts)
            seen = []
            for token_B in tokens:
                session.decode(token_B, only_one)
                seen.append([sorted(layer) for layer in engine.memory.resident_experts()])
            residents[policy] = seen
            assert engine.memory.decode_counters.evictions > 20
    for first in POLICIES:
        for second in POLICIES:
            assert first == second or residents[first] != residents[second], (first, second)


def test_prefill_teaches_a_policy_what_decode_would_have(mixed: TinyModel):
    """Token by token: a prompt leaves the state that decoding its tokens leaves."""
    prompts = random_prompts(mixed.config, 8, [9, 4, 1, 7])
    states = []
    for first_length in (1, 9):
        with make_engine(mixed, slots=HALF) as engine:
            session = engine.session(BATCH)
            session.prefill([prompt[:first_length] for prompt in prompts])
            for position in range(first_length, 9):
                active_B = np.array([len(prompt) > position for prompt in prompts])
                token_B = np.array([prompt[position] if len(prompt) > position else 0 for prompt in prompts])
                session.decode(token_B, active_B)
            assert session.lengths.tolist() == [9, 4, 1, 7]
            states.append(engine.memory.state.policy)
    for name, decoded, prefilled in zip(states[0]._fields, *states, strict=True):
        np.testing.assert_array_equal(decoded, prefilled, err_msg=name)
