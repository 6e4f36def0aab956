"""The promise that matters: logits and tokens are those of a model that has every expert in memory, bit by bit.

Whatever the policy, the number of slots, the kind of slot buffer, the batch, and whatever was generated before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import (
    ALL,
    BATCH,
    CONTEXT,
    HALF,
    MIXED,
    QUARTER,
    TOP_K,
    TinyModel,
    make_engine,
    random_prompts,
    same_bits,
)
from tiny_models import tiny_hf_config

from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.policy import POLICIES

NUM_TOKENS = 6


def reference_run(
    model: TinyModel, seed: int, lengths: tuple[int, ...], stop_ids: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]:
    """Tokens, logits and expert ids of a greedy run of random prompts."""
    session = ResidentSession(model.reference, len(lengths), CONTEXT)
    tokens, logits = greedy_tokens(session, random_prompts(model.config, seed, list(lengths)), NUM_TOKENS, stop_ids)
    return tokens, logits, session.expert_ids


def assert_exact(
    engine: Engine, model: TinyModel, seed: int, lengths: tuple[int, ...], stop_ids: tuple[int, ...] = ()
) -> list[list[int]]:
    """Runs the prompts through the engine and compares every logit of sequences that take part."""
    expected_tokens, expected_logits, _ = reference_run(model, seed, lengths, stop_ids)
    session = engine.session(len(lengths), CONTEXT)
    tokens, logits = greedy_tokens(session, random_prompts(model.config, seed, list(lengths)), NUM_TOKENS, stop_ids)
    assert tokens == expected_tokens
    same_bits(np.stack(logits), np.stack(expected_logits))
    assert np.isfinite(np.stack(logits)).all()
    return tokens


LENGTHS = {1: (11,), BATCH: (5, 16, 1, 9)}
FAMILY_CONFIGS = {
    "olmoe": tiny_hf_config("olmoe", num_experts=8, clip_qkv=1.0),
    "qwen3_moe": tiny_hf_config("qwen3_moe", num_experts=8),
    "mixtral": tiny_hf_config("mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=5),
}


@pytest.mark.parametrize(
    ("family", "dtype", "batch"),
    [
        ("olmoe", "float32", BATCH),
        ("olmoe", "bfloat16", 1),
        ("qwen3_moe", "bfloat16", 1),
        ("mixtral", "float32", BATCH),
    ],
)
def test_every_family(family: str, dtype: str, batch: int, model_of: Callable[[dict[str, Any]], TinyModel]):
    model = model_of(FAMILY_CONFIGS[family] | {"torch_dtype": dtype})
    with make_engine(model, slots=model.config.experts_per_token) as engine:
        for seed in range(2):
            assert_exact(engine, model, seed, LENGTHS[batch])
        assert engine.memory.decode_counters.evictions > 0


def test_bfloat16_with_a_shared_expert_and_a_dense_layer(model_of: Callable[[dict[str, Any]], TinyModel]):
    model = model_of(MIXED | {"torch_dtype": "bfloat16"})
    with make_engine(model, slots=QUARTER) as engine:
        for seed in range(3):
            assert_exact(engine, model, seed, LENGTHS[BATCH])
        assert engine.memory.decode_counters.evictions > 0


@pytest.fixture(scope="module")
def warm_engine(mixed: TinyModel):
    """Engines that live as long as this file: what they ran before must not matter."""
    engines: dict[tuple, Engine] = {}

    def get(policy: str, slots: int, inserted: bool = False) -> Engine:
        key = (policy, slots, inserted)
        if key not in engines:
            engines[key] = make_engine(mixed, slots=slots, policy=policy, inserted=inserted)
        return engines[key]

    yield get
    for engine in engines.values():
        engine.close()


ENGINES = [
    *[("lru", slots) for slots in (TOP_K, HALF, ALL)],
    *[(policy, QUARTER) for policy in POLICIES if policy != "lru"],
]


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    which=st.sampled_from(ENGINES),
    seed=st.integers(0, 99),
    lengths=st.tuples(*[st.integers(1, 16)] * BATCH),
    stop_ids=st.sampled_from([(), tuple(range(0, 67, 5))]),
)
def test_any_prompts_policy_and_budget(which: tuple[str, int], seed: int, lengths, stop_ids, mixed, warm_engine):
    """With stop ids, sequences of a batch end at different times."""
    assert_exact(warm_engine(*which), mixed, seed, lengths, stop_ids)


@pytest.mark.parametrize(("policy", "slots"), ENGINES)
def test_every_policy_and_budget(policy: str, slots: int, mixed: TinyModel, warm_engine):
    for seed in range(3):
        assert_exact(warm_engine(policy, slots), mixed, seed, LENGTHS[BATCH])
    if slots < mixed.config.num_experts:
        assert warm_engine(policy, slots).memory.decode_counters.evictions > 0


def test_one_sequence(mixed: TinyModel, warm_engine):
    engine = warm_engine("lru", TOP_K)
    for seed, length in enumerate((11, 1, 16)):
        assert_exact(engine, mixed, seed, (length,))


def test_inserted_slots(mixed: TinyModel, warm_engine):
    engine = warm_engine("lru", TOP_K, inserted=True)
    for seed in range(3):
        assert_exact(engine, mixed, seed, LENGTHS[BATCH])
    assert engine.memory.decode_counters.evictions > 0
    assert engine.memory.prefill_counters.evictions > 0


def test_a_conversation(mixed: TinyModel, warm_engine):
    """Turns on a cache that is not empty, with rewinding, while another session uses the same slots."""
    engine = warm_engine("lru", TOP_K)
    plain, session = ResidentSession(mixed.reference, 1, CONTEXT), engine.session(1, CONTEXT)
    for turn, (length, keep) in enumerate([(7, None), (3, None), (12, 9), (1, 0), (16, 3)]):
        prompts = random_prompts(mixed.config, 50 + turn, [length])
        if keep is not None:
            for side in (plain, session):
                side.rewind(0, keep)
        expected_tokens, expected_logits = greedy_tokens(plain, prompts, 4)
        tokens, logits = greedy_tokens(session, prompts, 4)
        assert tokens == expected_tokens
        same_bits(np.stack(logits), np.stack(expected_logits))
        assert session.lengths.tolist() == plain.lengths.tolist()
        assert_exact(engine, mixed, turn, (5,))


def test_a_batch_conversation(mixed: TinyModel, warm_engine):
    engine = warm_engine("lru", HALF)
    plain, session = ResidentSession(mixed.reference, BATCH, CONTEXT), engine.session(BATCH, CONTEXT)
    for turn, lengths in enumerate([[2, 9, 4, 1], [1, 1, 12, 3]]):
        prompts = random_prompts(mixed.config, 70 + turn, lengths)
        expected_tokens, expected_logits = greedy_tokens(plain, prompts, 4, stop_ids=range(0, 67, 4))
        tokens, logits = greedy_tokens(session, prompts, 4, stop_ids=range(0, 67, 4))
        assert tokens == expected_tokens
        same_bits(np.stack(logits), np.stack(expected_logits))
        for side in (plain, session):
            side.rewind(turn, 1)


def test_the_batch_is_not_routed_alike(mixed: TinyModel):
    """A guard of these tests: tokens are routed apart, or they would prove little."""
    _, _, expert_ids = reference_run(mixed, 0, LENGTHS[BATCH])
    for layer in range(mixed.config.num_moe_layers):
        assert len(np.unique(expert_ids[0][:, layer])) > 12
        steps = np.concatenate([ids[:, layer] for ids in expert_ids[1:]], axis=1)
        assert len(np.unique(steps.reshape(-1, steps.shape[-1]), axis=0)) > 10
