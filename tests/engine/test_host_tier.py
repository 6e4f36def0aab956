"""The host tier, forced on with slots that are not host memory: fewer reads, the same bits."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import BATCH, CONTEXT, HALF, QUARTER, TOP_K, TinyModel, make_engine, random_prompts, same_bits

import flashmoe_jax
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.errors import BudgetError
from flashmoe_jax.experts.host_tier import HostTier
from flashmoe_jax.experts.slots import InsertedSlots

LENGTHS = {1: [11], BATCH: [5, 16, 1, 9]}
NUM_TOKENS = 8


def run(engine: Engine, model: TinyModel, batch: int, seed: int) -> None:
    prompts = random_prompts(model.config, seed, LENGTHS[batch])
    plain = ResidentSession(model.reference, batch, CONTEXT)
    expected_tokens, expected = greedy_tokens(plain, prompts, NUM_TOKENS)
    tokens, logits = greedy_tokens(engine.session(batch), prompts, NUM_TOKENS)
    assert tokens == expected_tokens
    same_bits(np.stack(logits), np.stack(expected))


def held(engine: Engine) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(layer, expert) of what is in slots, and of what is in the arena; its bytes are compared with the model's."""
    memory = engine.memory
    tier = memory.tier
    assert tier is not None
    tier.settle(must=True)
    slots = {(layer, e) for layer, experts in enumerate(memory.resident_experts()) for e in experts}
    return slots, set(tier._place)


@pytest.mark.parametrize("prefetch", ["off", "on"])
@pytest.mark.parametrize(("batch", "slots", "records"), [(1, TOP_K, 5), (1, QUARTER, 40), (BATCH, QUARTER, 9)])
def test_same_bits_and_right_counts(batch: int, slots: int, records: int, prefetch: str, mixed: TinyModel):
    with (
        make_engine(mixed, slots=slots, inserted=True, host_records=records, prefetch=prefetch) as engine,
        make_engine(mixed, slots=slots) as plain,
    ):
        for seed in range(4):
            run(engine, mixed, batch, seed)
            run(plain, mixed, batch, seed)
        memory, counters = engine.memory, engine.memory.decode_counters
        prefill, tier = memory.prefill_counters, memory.tier
        assert tier is not None
        assert counters.host_hits + prefill.host_hits == tier.num_hits > 0
        assert memory.fetcher.read_bytes == counters.read_bytes + prefill.read_bytes
        reads = memory.fetcher.num_reads - counters.prefetch_wasted
        assert reads < plain.memory.fetcher.num_reads
        in_slots, in_arena = held(engine)
        assert 0 < len(in_arena) <= records
        # Together they hold different experts; in slots are those of an engine without the tier.
        assert not in_slots & in_arena
        plain_slots = {(i, e) for i, experts in enumerate(plain.memory.resident_experts()) for e in experts}
        assert in_slots == plain_slots
        for (layer, expert), place in tier._place.items():
            np.testing.assert_array_equal(tier._arena[place], np.asarray(mixed.reference.expert_rows[layer][expert]))


def test_with_room_for_all_nothing_is_read_twice(mixed: TinyModel):
    config = mixed.config
    num_experts = config.num_moe_layers * config.num_experts
    with make_engine(mixed, slots=HALF, inserted=True, host_records=num_experts) as engine:
        for seed in range(8):
            run(engine, mixed, 1, seed)
        in_slots, in_arena = held(engine)
        assert engine.memory.fetcher.num_reads == len(in_slots) + len(in_arena)
        assert engine.stats()["host_hits"] > 0


def test_slots_in_host_memory_need_no_tier(mixed: TinyModel):
    with pytest.raises(
        BudgetError, match="--host-budget has no effect on the CPU backend, where slots are host memory"
    ):
        flashmoe_jax.load(mixed.path, host_budget="1GiB")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["insert", "take_back", "settle"]), st.integers(0, 7)), max_size=40))
def test_records_are_whole_and_the_least_recently_fed_leaves(actions: list[tuple[str, int]]):
    device, words, rows = jax.devices()[0], 2048, 3
    slots = InsertedSlots(rows, words, np.dtype(np.uint16), device)
    tier = HostTier(3, slots, np.dtype(np.uint16), device)
    expected: list[int] = []  # least recently fed first
    for action, expert in actions:
        if action == "take_back":
            slots.insert(1, np.full(words, expert + 1, np.uint16)).block_until_ready()
            tier.take_back(0, expert, 1)
            slots.insert(1, np.zeros(words, np.uint16)).block_until_ready()  # whatever comes next may overwrite the row
            tier.settle(must=True)
            if expert not in expected:
                expected = [*expected, expert][-3:]
        elif action == "insert":
            assert tier.insert(0, expert, 2) == (expert in expected)
            if expert in expected:
                expected.remove(expert)
                assert np.asarray(slots.array)[2].tolist() == [expert + 1] * words
        else:
            tier.settle()
        assert [e for _, e in tier._place] == expected
    tier.close()
    slots.close()
