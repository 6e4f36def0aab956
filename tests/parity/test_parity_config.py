"""What `ModelConfig` derives from a config.json equals what transformers builds from the same file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from awkward_models import AWKWARD
from tiny_models import FAMILIES, tiny_hf_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding, apply_rotary_pos_emb

from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.models.attention import rotary_embedding, rotary_frequencies
from flashmoe_jax.models.families import DenseTarget, hf_name_map
from flashmoe_jax.models.weights import dense_weight_specs

pytestmark = pytest.mark.parity

# Fields whose absence both sides must fill in alike.
OPTIONAL = [
    "rope_theta",
    "head_dim",
    "tie_word_embeddings",
    "norm_topk_prob",
    "hidden_act",
]
VARIANTS = {
    **AWKWARD,
    **{f"{family}-without-{name}": tiny_hf_config(family, **{name: None}) for family in FAMILIES for name in OPTIONAL},
    "olmoe-no-kv-heads": tiny_hf_config(Family.OLMOE, num_key_value_heads=None),
    "qwen2_moe-no-qkv_bias": tiny_hf_config(Family.QWEN2_MOE, qkv_bias=None),
    "qwen2_moe-window-off": tiny_hf_config(Family.QWEN2_MOE, sliding_window=5),
    "qwen2_moe-window-default-max": tiny_hf_config(Family.QWEN2_MOE, sliding_window=5, use_sliding_window=True),
    "qwen3_moe-window-off": tiny_hf_config(Family.QWEN3_MOE, sliding_window=5),
    "qwen3_moe-window-max-layers": tiny_hf_config(
        Family.QWEN3_MOE, sliding_window=5, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3_moe-sparse": tiny_hf_config(
        Family.QWEN3_MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "olmoe-rope-parameters": tiny_hf_config(
        Family.OLMOE, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    ),
    "olmoe-rope-scaling-null": tiny_hf_config(Family.OLMOE, rope_theta=5e5) | {"rope_scaling": None},
    "olmoe-rope-scaling-default": tiny_hf_config(Family.OLMOE, rope_theta=5e5, rope_scaling={"type": "default"}),
}
REAL = ("olmoe-1b-7b-0924", "mixtral-8x7b-v0.1", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "qwen3-235b-a22b")


@pytest.mark.parametrize("name", VARIANTS)
def test_derived_values(name: str, tmp_path: Path):
    check_against_transformers(VARIANTS[name], tmp_path)


@pytest.mark.parametrize("name", REAL)
def test_derived_values_of_real_models(name: str, shared_data: Path, tmp_path: Path):
    check_against_transformers(json.loads((shared_data / "configs" / f"{name}.json").read_text()), tmp_path)


@pytest.mark.parametrize("name", AWKWARD)
def test_config_saved_by_transformers_reads_the_same(name: str):
    saved = json.loads(AutoConfig.for_model(**AWKWARD[name]).to_json_string(use_diff=True))
    assert ModelConfig.from_hf(saved) == ModelConfig.from_hf(AWKWARD[name])


def check_against_transformers(hf_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = ModelConfig.from_hf(hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    layers = model.model.layers
    assert len(layers) == config.num_layers
    assert {layer.self_attn.head_dim for layer in layers} == {config.head_dim}
    assert {layer.self_attn.num_key_value_groups for layer in layers} == {config.num_heads // config.num_kv_heads}
    assert {layer.input_layernorm.variance_epsilon for layer in layers} == {config.rms_norm_eps}
    assert model.config.rope_parameters["rope_theta"] == config.rope_theta
    assert model.config.rope_parameters["rope_type"] == "default"
    assert model.config.tie_word_embeddings == config.tie_embeddings
    assert model.config.max_position_embeddings == config.max_position
    assert getattr(model.config, "clip_qkv", None) == config.clip_qkv
    assert reference_windows(model) == config.layer_windows
    moe_layers = tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    assert moe_layers == config.moe_layers
    routers = [layers[i].mlp.gate for i in moe_layers]
    assert {router.top_k for router in routers} == {config.experts_per_token}
    assert {getattr(router, "norm_topk_prob", True) for router in routers} == {config.norm_topk_prob}
    names = hf_name_map(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for path, spec in dense_weight_specs(config).items():
        key = names.hf_key(DenseTarget(path)).replace(".block_sparse_moe.", ".mlp.")
        assert shapes.pop(key) == spec.shape, path
    E, D, F = config.num_experts, config.hidden_size, config.expert_hidden
    for i in moe_layers:
        assert shapes.pop(f"model.layers.{i}.mlp.experts.gate_up_proj") == (E, 2 * F, D)
        assert shapes.pop(f"model.layers.{i}.mlp.experts.down_proj") == (E, D, F)
    assert not shapes, "weights of transformers that the tables do not know"


def reference_windows(model: Any) -> tuple[int | None, ...]:
    """Window of each layer by the masks that the module's `forward` chooses."""
    config = model.config
    if config.model_type == "olmoe":
        return (None,) * config.num_hidden_layers
    if config.model_type == "qwen2_moe":
        return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
    return (config.sliding_window,) * config.num_hidden_layers


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotary_embedding(theta: float):
    hf_config = tiny_hf_config(Family.MIXTRAL, rope_theta=theta, head_dim=14)
    x_BTNH = np.random.RandomState(3).standard_normal((2, 5, 4, 14)).astype(np.float32)
    position_BT = np.array([[0, 1, 2, 3, 4], [100, 255, 4000, 7, 7]])
    rotary = MixtralRotaryEmbedding(AutoConfig.for_model(**hf_config))
    # torch's float32 power is off by a unit on some processors, which is 1e-5 of an angle at position 4000.
    np.testing.assert_array_max_ulp(rotary_frequencies(14, theta), rotary.inv_freq.numpy(), maxulp=1)
    rotary.inv_freq = torch.from_numpy(rotary_frequencies(14, theta))
    x_BNTH = torch.from_numpy(x_BTNH).transpose(1, 2)
    cos, sin = rotary(x_BNTH, torch.from_numpy(position_BT))
    expected, _ = apply_rotary_pos_emb(x_BNTH, x_BNTH, cos, sin)
    ours = rotary_embedding(x_BTNH, position_BT, theta)
    # An angle of 4000 has float32 steps of 2.4e-4 between neighbours; both sides round it alike.
    np.testing.assert_allclose(ours, expected.transpose(1, 2).numpy(), atol=1e-5, rtol=0)
