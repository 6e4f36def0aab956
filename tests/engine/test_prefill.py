"""Prefill's rules: one read per missing expert, nothing evicted to admit, staged records exchanged by copy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import BATCH, CONTEXT, HALF, TOP_K, TinyModel, make_engine, random_prompts, same_bits
from tiny_models import tiny_hf_config
from watched_store import RecordingStore, RowWatch, assert_slots_hold_their_experts

from flashmoe_jax.engine.engine import Engine

LENGTHS = [5, 16, 1, 9]


def keep_values(engine: Engine) -> np.ndarray:
    """What the policy thinks of every expert now, `[L, E]`."""
    memory = engine.memory
    layers = range(memory.config.num_moe_layers)
    return np.stack(
        [memory.policy.score(memory.policy_params[layer], memory.state.policy, np.int32(layer)) for layer in layers]
    )


def expected_slots(
    before: np.ndarray, needed: list[int], keep: np.ndarray, num_staging: int
) -> tuple[list[int], list[int]]:
    """Experts by slot of one layer after a prefill, and who left: the rules in plain Python."""
    slots = before.tolist()
    missing = [e for e in needed if e not in slots]
    best_first = sorted(missing, key=lambda e: (-keep[e], e))
    for expert in best_first:
        if -1 in slots:
            slots[slots.index(-1)] = expert
    in_ring = [e for e in missing if e not in slots][-num_staging:]
    worst_first = sorted((s for s in range(len(slots)) if slots[s] >= 0), key=lambda s: (keep[slots[s]], s))
    left = []
    for expert, slot in zip(sorted(in_ring, key=lambda e: (-keep[e], e)), worst_first, strict=False):
        if keep[expert] > keep[slots[slot]]:
            left.append(slots[slot])
            slots[slot] = expert
    return slots, left


@pytest.mark.parametrize(("policy", "slots", "num_staging"), [("lru", TOP_K, 2), ("static", HALF, None)])
def test_reads_and_residents_follow_the_rules(policy: str, slots: int, num_staging: int | None, mixed: TinyModel):
    store = RecordingStore(mixed)
    with make_engine(mixed, slots=slots, policy=policy, num_staging=num_staging, store=store) as engine:
        counters = engine.memory.prefill_counters
        for seed in range(4):
            before = np.asarray(engine.memory.state.residency.expert_of_slot)
            evictions = counters.evictions
            prompts = random_prompts(mixed.config, seed, LENGTHS)
            plain = ResidentSession(mixed.reference, BATCH, CONTEXT)
            expected = plain.prefill(prompts)
            same_bits(np.asarray(engine.session(BATCH).prefill(prompts)), expected)

            reads, keep, num_left = store.take_reads(), keep_values(engine), 0
            assert len(reads) == len(set(reads)), "an expert is read twice"
            after = np.asarray(engine.memory.state.residency.expert_of_slot)
            for layer in range(mixed.config.num_moe_layers):
                needed = [int(e) for e in np.unique(plain.expert_ids[0][:, layer]) if e >= 0]
                missing = [e for e in needed if e not in before[layer]]
                assert [e for moe_layer, e in reads if moe_layer == layer] == missing
                ring = engine.memory.rows.num_spare
                slots_after, left = expected_slots(before[layer], needed, keep[layer], ring)
                assert after[layer].tolist() == slots_after
                num_left += len(left)
            assert counters.evictions - evictions == num_left
            assert_slots_hold_their_experts(engine, mixed)
        assert counters.evictions > 0
        assert counters.hits > 0


def test_reads_go_ahead_as_far_as_the_ring_has_rows(mixed: TinyModel):
    """The second prompt needs more experts than slots and ring hold: the ring turns over while experts compute."""
    store = RecordingStore(mixed)
    with make_engine(mixed, slots=TOP_K, num_staging=2, store=store) as engine:
        watch = RowWatch(engine, store)
        for seed in range(3):
            prompts = random_prompts(mixed.config, seed, LENGTHS)
            expected = ResidentSession(mixed.reference, BATCH, CONTEXT).prefill(prompts)
            same_bits(np.asarray(engine.session(BATCH).prefill(prompts)), expected)
            assert_slots_hold_their_experts(engine, mixed)
        assert watch.num_rewritten > 20


@pytest.fixture(scope="module")
def long_model(model_of: Callable[[dict[str, Any]], TinyModel]) -> TinyModel:
    """One layer of few experts, so that a long prompt gives one of them more tokens than a group holds."""
    return model_of(
        tiny_hf_config("olmoe", num_experts=4, num_hidden_layers=1, max_position_embeddings=1024, hidden_size=16)
    )


def test_an_expert_with_several_groups_beside_a_prompt_of_one_token(long_model: TinyModel):
    lengths = [750, 1]
    prompts = random_prompts(long_model.config, 3, lengths)
    plain = ResidentSession(long_model.reference, 2, 800)
    expected_tokens, expected = greedy_tokens(plain, prompts, 3)
    counts = np.bincount(plain.expert_ids[0][plain.expert_ids[0] >= 0])
    assert counts.max() > 512 and counts.sum() == 3 * sum(lengths)
    store = RecordingStore(long_model)
    with make_engine(long_model, slots=3, batch_size=2, context=800, store=store) as engine:
        tokens, logits = greedy_tokens(engine.session(2, 800), prompts, 3)
        assert tokens == expected_tokens
        same_bits(np.stack(logits), np.stack(expected))
        assert sorted(store.reads[:4]) == [(0, e) for e in range(4)]
        assert engine.memory.prefill_counters.demand_reads == 4
