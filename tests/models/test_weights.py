"""The tables of weights describe exactly what the NNX modules hold."""

import jax.numpy as jnp
import numpy as np
import pytest
from awkward_models import AWKWARD
from flax import nnx
from tiny_models import FAMILIES, random_weights, tiny_hf_config

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.models.decoder import Decoder
from flashmoe_jax.models.reference import decoder_from_weights
from flashmoe_jax.models.weights import WeightSpec, dense_weight_specs


def state_specs(decoder: Decoder) -> dict[str, WeightSpec]:
    return {
        ".".join(map(str, path)): WeightSpec(leaf.shape, str(leaf.dtype))
        for path, leaf in nnx.to_flat_state(nnx.state(decoder))
    }


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_specs_are_the_state_of_the_decoder(name: str, dtype: str):
    config = ModelConfig.from_hf(AWKWARD[name] | {"torch_dtype": dtype})
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    assert state_specs(decoder) == dense_weight_specs(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_decoder_has_every_weight(family: str):
    config = ModelConfig.from_hf(tiny_hf_config(family, num_hidden_layers=1))
    decoder = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert state_specs(decoder) == dense_weight_specs(config)


def test_decoder_from_weights_holds_them():
    config = ModelConfig.from_hf(tiny_hf_config("qwen2_moe"))
    weights = random_weights(config, seed=0)
    decoder = decoder_from_weights(config, weights.dense)
    for path, leaf in nnx.to_flat_state(nnx.state(decoder)):
        np.testing.assert_array_equal(leaf[...], weights.dense[".".join(map(str, path))])


def test_decoder_from_weights_refuses_another_set():
    config = ModelConfig.from_hf(tiny_hf_config("olmoe"))
    dense = random_weights(config, seed=0).dense
    with pytest.raises(CheckpointError, match=r"missing or unknown: lm_head\.kernel"):
        decoder_from_weights(config, {path: array for path, array in dense.items() if path != "lm_head.kernel"})
    with pytest.raises(CheckpointError, match=r"missing or unknown: novelty"):
        decoder_from_weights(config, {**dense, "novelty": dense["lm_head.kernel"]})
    with pytest.raises(CheckpointError, match=r"final_norm\.scale has shape \(23,\); the config needs \(24,\)"):
        decoder_from_weights(config, {**dense, "final_norm.scale": np.ones(23, np.float32)})
