"""The guard's bound on random and on hostile traces, step by step, and what an engine under guard does and says."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import BATCH as ENGINE_BATCH
from tiny_engines import CONTEXT, HALF, TinyModel, make_engine, random_prompts, same_bits

import flashmoe_jax
from flashmoe_jax.engine.guard import (
    OUTSIDE,
    WINDOW_STEPS,
    GuardState,
    guard_step,
    guarded_keep,
    guarded_prompt_keep,
    init_guard,
    see_token,
    start_shadow,
)
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.experts.residency import Residency, init_residency, plan_step
from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.heuristics import HALF_LIFE_STEPS, heuristic, score_decayed
from flashmoe_jax.telemetry.guard_watch import GuardWatch

LAYER, LAYERS = 1, 2  # the layer that is used, of so many
EXPERTS, BATCH, TOP_K = 8, 2, 2


@functools.lru_cache
def jitted(window: int) -> Any:
    """`(guard, residency, ids [B, X], keep [E]) -> (guard, residency, reads, shadow reads)`, one decode step."""

    def step(guard: GuardState, residency: Residency, ids: jax.Array, keep: jax.Array) -> Any:
        layer = jnp.int32(LAYER)
        before = guard.shadow
        guard = guard_step(guard, residency, layer, ids, window)
        residency, plan = plan_step(residency, layer, ids, lambda: guarded_keep(guard, layer, lambda: keep))
        asked = jnp.zeros(keep.shape, bool).at[jnp.where(ids < 0, keep.size, ids).reshape(-1)].set(True, mode="drop")
        shadow_reads = jnp.sum(asked & (before.slot_of_expert[layer] < 0))
        return guard, residency, jnp.sum(plan.miss_expert >= 0), shadow_reads

    return jax.jit(step)


class Layer:
    """One layer under guard, watched by plain bookkeeping."""

    def __init__(self, num_slots: int, window: int):
        self.num_slots, self.window = num_slots, window
        self.guard = init_guard(PolicyShape(LAYERS, EXPERTS, TOP_K), num_slots)
        self.residency = init_residency(LAYERS, EXPERTS, num_slots)
        self.reads = self.shadow_reads = 0
        self.modes: list[bool] = []

    def holds(self, of: Residency) -> set[int]:
        return {int(e) for e in np.asarray(of.expert_of_slot)[LAYER] if e >= 0}

    def decode(self, ids_BX: np.ndarray, keep_E: np.ndarray) -> None:
        self.guard, self.residency, reads, shadow_reads = jitted(self.window)(
            self.guard, self.residency, ids_BX.astype(np.int32), keep_E.astype(np.float32)
        )
        self.reads += int(reads)
        self.shadow_reads += int(shadow_reads)
        self.modes.append(bool(self.guard.ledger[LAYER, 1]))
        assert 100 * self.reads <= 101 * self.shadow_reads + 100 * (self.num_slots + self.window * TOP_K)

    def prompt(self, residents: list[int]) -> None:
        """A prompt leaves these residents, whatever decode would have done."""
        slots = np.full(self.num_slots, -1, np.int32)
        slots[: len(residents)] = residents
        slot_of = np.full(EXPERTS, -1, np.int32)
        slot_of[residents] = np.arange(len(residents))
        self.residency = Residency(
            self.residency.slot_of_expert.at[LAYER].set(slot_of), self.residency.expert_of_slot.at[LAYER].set(slots)
        )
        self.guard = start_shadow(self.guard, self.residency)


def hostile_ids(layer: Layer, random: np.random.Generator, batch: int) -> np.ndarray:
    """Experts that the shadow holds and the engine does not; where there are none, such as nobody holds."""
    ours, shadow = layer.holds(layer.residency), layer.holds(layer.guard.shadow)
    rank = {True: [shadow - ours, ours & shadow], False: [set(range(EXPERTS)) - ours]}[bool(shadow - ours)]
    order = [e for experts in rank for e in random.permutation(sorted(experts))]
    order += [e for e in random.permutation(EXPERTS) if e not in order]
    return np.array(order[: batch * TOP_K]).reshape(batch, TOP_K)


def hostile_keep(layer: Layer, random: np.random.Generator) -> np.ndarray:
    """Keeps whom the shadow does not hold."""
    shadow = layer.holds(layer.guard.shadow)
    return np.array([random.random() - (e in shadow) for e in range(EXPERTS)])


@pytest.mark.parametrize("num_slots", [1, 5])
@given(
    seed=st.integers(0, 2**32 - 1),
    window=st.just(2),
    batch=st.sampled_from([1, BATCH]),
    hostility=st.sampled_from([0.3, 0.9, 1.0]),
    prompt_share=st.sampled_from([0.0, 0.03]),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_the_bound_holds_at_every_step(
    num_slots: int, seed: int, window: int, batch: int, hostility: float, prompt_share: float
):
    random = np.random.default_rng(seed)
    layer = Layer(num_slots, window)
    favourites = random.permutation(EXPERTS)[: num_slots + 1]
    for _ in range(60):
        if random.random() < prompt_share:
            layer.prompt(random.permutation(EXPERTS)[: random.integers(0, num_slots + 1)].tolist())
        if random.random() < hostility:
            ids = hostile_ids(layer, random, batch)
        else:
            ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(batch)])
            ids[0, 0] = random.choice(favourites)
        ids[random.random(batch) < 0.1] = -1
        layer.decode(ids, hostile_keep(layer, random))


def test_a_bad_policy_falls_and_a_good_one_returns():
    """In fallback a layer reads what the shadow reads, and pays 1 % of that back."""
    random = np.random.default_rng(0)
    layer = Layer(num_slots=5, window=2)
    for _ in range(30):
        layer.decode(hostile_ids(layer, random, 1), hostile_keep(layer, random))
    assert not layer.modes[0] and layer.modes[-1]
    lost = layer.reads - layer.shadow_reads
    for _ in range(600):
        if not layer.modes[-1]:
            break
        layer.decode(random.permutation(EXPERTS)[None, :TOP_K], hostile_keep(layer, random))
    assert not layer.modes[-1]
    assert layer.reads - layer.shadow_reads <= lost + 5
    assert layer.guard.ledger[LAYER, 0] <= 100 * 2 * TOP_K // 2


def test_credit_is_limited():
    """However much better a policy was, it cannot read more than slots and two windows beyond the shadow's."""
    random = np.random.default_rng(1)
    layer = Layer(num_slots=5, window=4)
    for _ in range(200):
        # `decayed` loses on a cycle of as many experts as it has no room for; keeping those just seen does not.
        ours = layer.holds(layer.residency)
        ids = random.permutation(sorted(ours))[:TOP_K] if len(ours) >= 5 else random.permutation(EXPERTS)[:TOP_K]
        layer.decode(ids[None], random.random(EXPERTS))
    assert layer.guard.ledger[LAYER, 0] >= -100 * 4 * TOP_K
    reads, shadow_reads = layer.reads, layer.shadow_reads
    for _ in range(60):
        layer.decode(hostile_ids(layer, random, 1), hostile_keep(layer, random))
        assert 100 * (layer.reads - reads) <= 101 * (layer.shadow_reads - shadow_reads) + 100 * (5 + 2 * 4 * TOP_K)


def test_layers_do_not_touch_each_other():
    random = np.random.default_rng(2)
    layer = Layer(num_slots=3, window=1)
    for _ in range(20):
        layer.decode(hostile_ids(layer, random, 1), hostile_keep(layer, random))
    assert layer.modes[-1]
    fresh = init_guard(PolicyShape(LAYERS, EXPERTS, TOP_K), 3)
    for now, start in zip(jax.tree.leaves(layer.guard), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(now[0], start[0])


def test_a_prompt_in_fallback_keeps_what_decayed_keeps():
    guard = init_guard(PolicyShape(LAYERS, EXPERTS, TOP_K), 3)
    for ids in ([[3, 4]], [[4, -1]]):
        guard = see_token(guard, jnp.int32(LAYER), jnp.array(ids))
    learned = np.arange(EXPERTS, dtype=np.float32)
    np.testing.assert_array_equal(guarded_prompt_keep(guard, jnp.int32(LAYER), lambda: learned), learned)
    fallen = guard._replace(ledger=guard.ledger.at[LAYER, 1].set(1))
    keep = np.asarray(guarded_prompt_keep(fallen, jnp.int32(LAYER), lambda: learned))
    assert np.argsort(-keep, kind="stable")[:3].tolist() == [4, 3, 0]


def test_who_the_shadow_lacks_is_worth_less_than_anybody():
    assert OUTSIDE > 1 / (1 - 0.5 ** (1 / HALF_LIFE_STEPS))
    assert WINDOW_STEPS == 64


def test_the_shadow_is_a_copy():
    """Both are donated to the next step: they must not share memory, or one would overwrite the other."""
    residency = init_residency(LAYERS, EXPERTS, 3)
    guard = init_guard(PolicyShape(LAYERS, EXPERTS, TOP_K), 3)
    decayed = guard.decayed
    guard = start_shadow(guard, residency)
    assert decayed.is_deleted()
    for copy, original in zip(guard.shadow, residency, strict=True):
        assert copy.unsafe_buffer_pointer() != original.unsafe_buffer_pointer()


def wrong_score(params: Any, state: Any, layer: jax.Array) -> jax.Array:
    """Keeps what is used least."""
    return -score_decayed((), state, layer)


WRONG = dataclasses.replace(heuristic("decayed"), name="wrong", score=wrong_score, is_learned=True)


def test_an_engine_under_guard_stays_exact_and_says_what_happened(mixed: TinyModel):
    with make_engine(mixed, slots=HALF, policy=WRONG, guard_window=1) as engine:
        assert engine.stats()["fallback_share"] is None
        on_device = jax.tree.leaves((engine.memory.state, engine.memory.policy_params))
        assert sum(leaf.nbytes for leaf in on_device) <= engine.plan.policy_bytes
        for seed in range(3):
            prompts = random_prompts(mixed.config, seed, [5, 16, 1, 9])
            session, plain = engine.session(ENGINE_BATCH), ResidentSession(mixed.reference, ENGINE_BATCH, CONTEXT)
            tokens, logits = greedy_tokens(session, prompts, 12)
            expected_tokens, expected = greedy_tokens(plain, prompts, 12)
            assert tokens == expected_tokens
            same_bits(np.stack(logits), np.stack(expected))
        stats = engine.stats()
        assert 0 < stats["fallback_share"] < 1 and stats["falls"] >= stats["returns"]
        notes = engine.take_notes()
        assert len(notes) == 1 + (stats["returns"] > 0)
        assert "falls back to decayed" in notes[0] and "wrong" in notes[0]
        assert engine.take_notes() == []
        engine.memory.reset()
        assert not np.asarray(engine.memory.state.guard.ledger).any()
        assert engine.stats()["fallback_share"] == stats["fallback_share"]


def test_a_heuristic_has_no_guard(mixed: TinyModel):
    for guard in (True, False):
        with pytest.raises(ConfigError, match="guard has an effect on learned policies only, and lru is none"):
            flashmoe_jax.load(mixed.path, device_budget="50%", policy="lru", guard=guard)
    with make_engine(mixed, slots=HALF) as engine:
        assert engine.memory.state.guard is None
        stats = engine.stats()
        assert [stats[name] for name in ("fallback_share", "falls", "returns")] == [None] * 3
        assert engine.take_notes() == []


def test_the_first_fall_and_the_first_return_are_said():
    watch = GuardWatch("context", 3)
    for is_fallback in ([0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]):
        watch.add_step([bool(layer) for layer in is_fallback])
    assert (watch.num_falls, watch.num_returns) == (3, 2)
    assert watch.fallback_share == 5 / 15
    fall, back = watch.take_notes()
    assert fall.startswith("layer 1 falls back to decayed") and back.startswith("layer 1 returns to context")
    watch.forget()
    watch.add_step([True, True, False])
    assert (watch.num_falls, watch.num_returns) == (5, 2)
    assert watch.take_notes() == []
