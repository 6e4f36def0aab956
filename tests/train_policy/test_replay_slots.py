"""The compiled slots decide as the engine's residency does, ties included."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import EXPERTS, trace_of

from flashmoe_jax.engine.prefill import _replace_lower_scored
from flashmoe_jax.engine.steps import PrefillPlan, StepState
from flashmoe_jax.experts.residency import Residency, fill_free_slots, init_residency, plan_step
from flashmoe_jax.telemetry.trace import DECODE, PREFILL
from train_policy.replay_slots import replay_slots
from train_policy.replay_steps import Mode, make_steps

BATCH, TOP_K = 2, 2
_plan = jax.jit(lambda residency, ids, keep: plan_step(residency, np.int32(0), ids, lambda: keep))
_fill = jax.jit(lambda residency, needed, keep: fill_free_slots(residency, np.int32(0), needed, keep))


class EngineRules:
    """One layer moved from step to step by the engine's own functions."""

    def __init__(self, num_slots: int, num_staging: int):
        self.residency = init_residency(1, EXPERTS, num_slots)
        self.num_staging = num_staging
        self.hits = self.misses = 0
        self.victims: list[tuple[int, int]] = []

    def decode(self, step: int, ids_BX: np.ndarray, keep: np.ndarray) -> None:
        self.residency, plan = _plan(self.residency, ids_BX, keep)
        missed = np.asarray(plan.miss_expert)
        self.misses += int((missed >= 0).sum())
        self.hits += len(np.unique(ids_BX[np.asarray(plan.is_hit)]))
        self.victims += [(step, int(e)) for e in np.asarray(plan.evicted) if e >= 0]

    def prefill(self, step: int, needed: set[int], keep: np.ndarray) -> None:
        before = np.asarray(self.residency.slot_of_expert[0]).copy()
        needed_E = np.isin(np.arange(EXPERTS), sorted(needed))
        self.residency = _fill(self.residency, needed_E, keep)
        after = np.asarray(self.residency.slot_of_expert[0]).copy()
        missing = [e for e in sorted(needed) if before[e] < 0]
        staged = [e for e in missing if after[e] < 0]
        self.hits += len(needed) - len(missing)
        self.misses += len(missing)
        memory = SimpleNamespace(
            state=StepState(self.residency, None),
            rows=SimpleNamespace(exchange=lambda layer, slot, row: None, give_back=lambda row: None),
            num_tokens=0,
            prefill_counters=None,
            tier=None,
            refetch=SimpleNamespace(evicted=lambda layer, gone, *_: self.victims.extend((step, int(e)) for e in gone)),
        )
        plan = PrefillPlan(np.zeros((1, 1, 1)), before, after, keep, np.zeros(EXPERTS, np.int32))
        held = dict.fromkeys(staged[-self.num_staging :], 0)
        _replace_lower_scored(memory, 0, plan, held)  # type: ignore[arg-type]
        self.residency = memory.state.residency


@pytest.mark.parametrize("num_slots", [1, 3, 5])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 25),
    num_staging=st.integers(1, 3),
    num_values=st.sampled_from([2, 4, 1000]),
    prompt_share=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=25, deadline=None)
def test_equals_the_engines_residency(
    num_slots: int, seed: int, num_steps: int, num_staging: int, num_values: int, prompt_share: float
):
    random = np.random.default_rng(seed)
    is_prompt = random.random(num_steps) < prompt_share
    ids = np.stack([random.permuted(np.tile(np.arange(EXPERTS), (BATCH, 1)), axis=1)[:, :TOP_K] for _ in is_prompt])
    ids[random.random((num_steps, BATCH)) < 0.1] = -1
    # Few different values make many ties.
    keep = random.integers(0, num_values, (num_steps, EXPERTS)).astype(np.float32) - 1
    engine = EngineRules(num_slots, num_staging)
    for step in range(num_steps):
        if is_prompt[step]:
            engine.prefill(step, {int(e) for e in ids[step].reshape(-1) if e >= 0}, keep[step])
        else:
            engine.decode(step, ids[step].astype(np.int32), keep[step])
    rows = ids.reshape(num_steps * BATCH, 1, TOP_K)
    trace = trace_of(
        rows,
        seq_id=np.tile(np.arange(BATCH), num_steps),
        phase=np.repeat(np.where(is_prompt, PREFILL, DECODE), BATCH),
        step=np.repeat(np.arange(num_steps), BATCH),
    )
    steps = make_steps(trace, Mode.ENGINE)
    (run,) = replay_slots(steps, [keep[:, None]], [num_slots], num_staging=num_staging, log_victims=True)
    assert run.victims is not None and run.expert_of_slot is not None
    assert run.decode.hits[0] + run.prefill.hits[0] == engine.hits
    assert run.decode.misses[0] + run.prefill.misses[0] == engine.misses
    assert [tuple(v) for v in run.victims[0].tolist()] == engine.victims
    assert run.expert_of_slot[0].tolist() == np.asarray(engine.residency.expert_of_slot)[0].tolist()


def test_the_engines_tables_stay_inverse():
    """The comparison above reads `expert_of_slot` alone."""
    engine = EngineRules(3, 1)
    engine.prefill(0, {0, 1, 2, 4}, np.arange(EXPERTS, dtype=np.float32))
    engine.decode(1, np.array([[3, 5], [1, -1]], np.int32), np.arange(EXPERTS, dtype=np.float32))
    residency: Residency = engine.residency
    for slot, expert in enumerate(np.asarray(residency.expert_of_slot)[0]):
        assert expert < 0 or int(residency.slot_of_expert[0, expert]) == slot


def test_chunks_of_any_length_give_the_same():
    random = np.random.default_rng(1)
    ids = random.integers(0, EXPERTS, (30, 2, 2)).astype(np.int32)
    keep = random.random((30, 2, EXPERTS)).astype(np.float32)
    steps = make_steps(trace_of(ids))
    whole = replay_slots(steps, [keep], [2, 4], num_staging=1)
    parts = replay_slots(steps, np.split(keep, [1, 1, 17]), [2, 4], num_staging=1)
    for one, other in zip(whole, parts, strict=True):
        assert [c.tolist() for c in one.decode] == [c.tolist() for c in other.decode]
        assert np.array_equal(one.expert_of_slot, other.expert_of_slot)


def test_counts_what_comes_back_within_five_tokens():
    # One slot. 0 leaves at token 1 and comes back at token 6, five tokens later; 1 leaves at 2 and comes back at 8.
    ids = np.array([[[e]] for e in (0, 1, 2, 2, 2, 2, 0, 0, 1)])
    steps = make_steps(trace_of(ids))
    (run,) = replay_slots(steps, [np.zeros((9, 1, EXPERTS), np.float32)], [1], num_staging=1)
    assert run.decode.evictions.tolist() == [4]
    assert run.decode.refetches.tolist() == [1]
