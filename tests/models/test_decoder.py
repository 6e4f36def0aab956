"""Blocks of the decoder by their definitions, and the cached path against the whole forward."""

import jax.numpy as jnp
import numpy as np
import pytest
from awkward_models import AWKWARD
from cached_model import CachedModel, compiled_reference
from flax import nnx
from tiny_models import random_weights, tiny_hf_config

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.models.decoder import RMSNorm, Router, matmul
from flashmoe_jax.models.reference import routed_output

TOLERANCE = 1e-5


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def test_matmul_rounds_inputs_to_the_kernel_and_adds_in_float32():
    x, kernel = draw(3, 64), jnp.asarray(draw(5, 64, seed=1), jnp.bfloat16)
    expected = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) @ np.asarray(kernel, np.float64).T
    y = matmul(x, kernel)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=TOLERANCE, rtol=0)


def test_rms_norm():
    norm = RMSNorm(6, eps=0.1, dtype=jnp.float32)
    norm.scale = nnx.Param(jnp.asarray(draw(6)))
    x = draw(2, 3, 6, seed=1)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 0.1) * draw(6)
    np.testing.assert_allclose(norm(x), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("normalise", [False, True])
def test_router(normalise: bool):
    config = ModelConfig.from_hf(tiny_hf_config("olmoe", norm_topk_prob=normalise))
    router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    router.kernel = nnx.Param(jnp.asarray(draw(5, 24)))
    h_BTD = draw(2, 4, 24, seed=1)
    choice = router(h_BTD)
    logits = h_BTD.astype(np.float64) @ draw(5, 24).T
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected_id = np.argsort(-probability, axis=-1)[..., :3]
    expected_weight = np.take_along_axis(probability, expected_id, -1)
    if normalise:
        expected_weight /= expected_weight.sum(-1, keepdims=True)
    np.testing.assert_array_equal(choice.expert_id, expected_id)
    np.testing.assert_allclose(choice.weight, expected_weight, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(choice.logits, logits, atol=TOLERANCE, rtol=0)


def test_router_breaks_ties_by_the_lowest_id():
    config = ModelConfig.from_hf(tiny_hf_config("mixtral"))
    router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    router.kernel = nnx.Param(jnp.zeros((5, 24)))
    choice = router(draw(1, 1, 24))
    assert choice.expert_id.ravel().tolist() == [0, 1, 2]
    np.testing.assert_allclose(choice.weight, 1 / 3, rtol=1e-6)


def test_routed_output_is_the_weighted_sum_in_rank_order():
    config = ModelConfig.from_hf(tiny_hf_config("mixtral"))
    experts = random_weights(config, seed=3).experts[0]
    h_BTD = draw(2, 3, 24)
    choice = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))(h_BTD)
    routed_BTD = routed_output(h_BTD, choice, experts)
    # The same experts under other names, visited in another order: the same bits.
    renamed = choice._replace(expert_id=4 - choice.expert_id)
    np.testing.assert_array_equal(routed_output(h_BTD, renamed, experts[::-1]), routed_BTD)
    weight_BTX, expert_id_BTX = np.asarray(choice.weight), np.asarray(choice.expert_id)
    for b, t in np.ndindex(2, 3):
        expected = sum(
            weight * feed_forward_by_definition(h_BTD[b, t], experts[expert_id])
            for weight, expert_id in zip(weight_BTX[b, t], expert_id_BTX[b, t], strict=True)
        )
        np.testing.assert_allclose(routed_BTD[b, t], expected, atol=TOLERANCE, rtol=0)


def feed_forward_by_definition(h_D: np.ndarray, expert: dict[str, np.ndarray]) -> np.ndarray:
    gate_F = expert["gate_proj"].astype(np.float64) @ h_D
    return expert["down_proj"].astype(np.float64) @ (gate_F / (1 + np.exp(-gate_F)) * (expert["up_proj"] @ h_D))


@pytest.mark.parametrize(
    "name",
    [
        "olmoe-1layer-1kv-clip-bias",
        "qwen3_moe-dense-first",
        "mixtral-window",
        "qwen2_moe-layer-types-dense-middle",
    ],
)
def test_cached_steps_equal_the_whole_forward(name: str):
    config = ModelConfig.from_hf(AWKWARD[name])
    weights = random_weights(config, seed=5)
    lengths, num_steps = (4, 11, 1), 3
    random = np.random.RandomState(6)
    tokens = [random.randint(config.vocab_size, size=length + num_steps) for length in lengths]
    padded_BT = np.stack([np.pad(row, (0, max(lengths) + num_steps - len(row))) for row in tokens])
    whole = compiled_reference(config, weights, padded_BT)
    whole_ids_LBTX = np.stack([choice.expert_id for choice in whole.routing])

    model = CachedModel(config, weights, capacity=max(lengths) + num_steps + 2)
    logits_BTV, ids_LBTX = model.prefill([row[:length] for row, length in zip(tokens, lengths, strict=True)])
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits_BTV[row, :length], whole.logits_BTV[row, :length], atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(ids_LBTX[:, row, :length], whole_ids_LBTX[:, row, :length])
    for step in range(num_steps):
        positions = [length + step for length in lengths]
        logits_BV, ids_LBX = model.step(np.array([row[p] for row, p in zip(tokens, positions, strict=True)]))
        for row, position in enumerate(positions):
            np.testing.assert_allclose(logits_BV[row], whole.logits_BTV[row, position], atol=TOLERANCE, rtol=0)
            np.testing.assert_array_equal(ids_LBX[:, row], whole_ids_LBTX[:, row, position])
