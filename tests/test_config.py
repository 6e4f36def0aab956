"""`ModelConfig.from_hf`: what is accepted, what is refused and in which words."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES, tiny_hf_config

from flashmoe_jax.config import Family, ModelConfig, QKNorm
from flashmoe_jax.errors import ConfigError

QWEN = (Family.QWEN2_MOE, Family.QWEN3_MOE)


def read(family: Family, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(tiny_hf_config(family, **changes))


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: Family):
    config = read(family)
    assert config.family is family
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (67, 24, 3)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert config.head_dim == (8 if family is Family.QWEN3_MOE else 6)
    assert (config.num_experts, config.experts_per_token, config.expert_hidden) == (5, 3, 14)
    assert config.dense_hidden == (20 if family in QWEN else 14)
    assert config.shared_expert_hidden == (18 if family is Family.QWEN2_MOE else 0)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position) == (1e-5, 1e4, 256)
    assert config.moe_layers == (0, 1, 2)
    assert config.layer_windows == (None, None, None)
    assert config.weight_dtype == "float32"
    assert config.clip_qkv is None
    assert not config.tie_embeddings


def test_maths_of_the_families():
    norms = {family: read(family).qk_norm for family in FAMILIES}
    assert norms == {
        Family.OLMOE: QKNorm.FULL,
        Family.QWEN3_MOE: QKNorm.HEAD,
        Family.MIXTRAL: QKNorm.NONE,
        Family.QWEN2_MOE: QKNorm.NONE,
    }
    assert read(Family.MIXTRAL).norm_topk_prob
    assert not read(Family.OLMOE).norm_topk_prob
    assert read(Family.OLMOE, norm_topk_prob=True).norm_topk_prob
    assert read(Family.OLMOE, clip_qkv=8).clip_qkv == 8.0


@pytest.mark.parametrize(
    ("family", "changes", "qkv_bias", "out_bias"),
    [
        (Family.OLMOE, {}, False, False),
        (Family.OLMOE, {"attention_bias": True}, True, True),
        (Family.QWEN3_MOE, {"attention_bias": True}, True, True),
        (Family.MIXTRAL, {}, False, False),
        (Family.QWEN2_MOE, {}, True, False),
        (Family.QWEN2_MOE, {"qkv_bias": False}, False, False),
    ],
)
def test_biases(family: Family, changes: dict[str, Any], qkv_bias: bool, out_bias: bool):
    config = read(family, **changes)
    assert (config.qkv_bias, config.out_bias) == (qkv_bias, out_bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_survives_the_manifest(family: Family):
    config = read(family)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_manifest_of_another_version_is_refused():
    values = read(Family.OLMOE).to_dict()
    with pytest.raises(ConfigError, match=r"rope_theta.*convert the model again"):
        ModelConfig.from_dict({name: value for name, value in values.items() if name != "rope_theta"})
    with pytest.raises(ConfigError, match="novelty"):
        ModelConfig.from_dict({**values, "novelty": 1})


# --- spellings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000, "partial_rotary_factor": 1.0}},
    ],
)
def test_rope_spellings(family: Family, changes: dict[str, Any]):
    assert read(family, **changes).rope_theta == 5e5


def test_null_fields_are_absent_fields():
    nulls = dict.fromkeys(["rope_scaling", "rope_parameters", "sliding_window", "quantization_config", "dtype"])
    hf = tiny_hf_config(Family.QWEN3_MOE) | nulls
    assert ModelConfig.from_hf(hf) == read(Family.QWEN3_MOE)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": "bfloat16", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
    ],
)
def test_dtype_spellings(changes: dict[str, Any], dtype: str):
    assert read(Family.OLMOE, **changes).weight_dtype == dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_experts_spellings(family: Family):
    old = {"num_experts": 5, "num_local_experts": None}
    new = {"num_experts": None, "num_local_experts": 5}
    both = {"num_experts": 5, "num_local_experts": 5}
    assert read(family, **old) == read(family, **new) == read(family, **both)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "contradicts itself.*bfloat16.*float32"),
        ({"num_experts": 5, "num_local_experts": 6}, "contradicts itself"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "contradicts itself.*10000.0, 1000000.0"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1.0}, "rope_scaling": {"rope_theta": 2.0}}, "itself"),
    ],
)
def test_spellings_that_disagree_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(Family.OLMOE, **changes)


# --- defaults for absent fields -------------------------------------------------------------------------------------


def test_head_dim():
    assert read(Family.QWEN3_MOE, head_dim=None).head_dim == 6
    assert read(Family.MIXTRAL, head_dim=10).head_dim == 10
    assert ModelConfig.from_hf(tiny_hf_config(Family.MIXTRAL) | {"head_dim": None}).head_dim == 6


def test_rope_theta_default():
    assert read(Family.MIXTRAL, rope_theta=None).rope_theta == 1e6
    assert read(Family.QWEN3_MOE, rope_theta=None).rope_theta == 1e4


def test_key_value_heads_are_never_guessed():
    assert read(Family.OLMOE, num_key_value_heads=None).num_kv_heads == 4
    for family in (Family.MIXTRAL, *QWEN):
        with pytest.raises(ConfigError, match="lacks num_key_value_heads"):
            read(family, num_key_value_heads=None)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (Family.OLMOE, "num_hidden_layers"),
        (Family.OLMOE, "intermediate_size"),
        (Family.OLMOE, "num_experts"),
        (Family.MIXTRAL, "num_experts_per_tok"),
        (Family.QWEN3_MOE, "moe_intermediate_size"),
        (Family.QWEN3_MOE, "rms_norm_eps"),
        (Family.QWEN2_MOE, "shared_expert_intermediate_size"),
        (Family.QWEN2_MOE, "max_position_embeddings"),
        (Family.QWEN2_MOE, "vocab_size"),
    ],
)
def test_needed_field_is_named(family: Family, name: str):
    with pytest.raises(ConfigError, match=f"lacks .*{name}"):
        read(family, **{name: None})


# --- sliding windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        (Family.MIXTRAL, {"sliding_window": 5}, (5, 5, 5)),
        (Family.QWEN3_MOE, {"sliding_window": 5}, (None, None, None)),
        (Family.QWEN3_MOE, {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, (5, 5, 5)),
        (Family.QWEN2_MOE, {"sliding_window": 5, "use_sliding_window": False}, (None, None, None)),
        (Family.QWEN2_MOE, {"sliding_window": 5, "use_sliding_window": True}, (5, None, 5)),
        (Family.QWEN2_MOE, {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}, (5, None, None)),
        (
            Family.QWEN2_MOE,
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 5, None),
        ),
        (
            Family.QWEN2_MOE,
            {"sliding_window": 0, "use_sliding_window": False, "layer_types": ["full_attention"] * 3},
            (None, None, None),
        ),
    ],
)
def test_windows(family: Family, changes: dict[str, Any], windows: tuple[int | None, ...]):
    assert read(family, **changes).layer_windows == windows


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (Family.OLMOE, {"sliding_window": 5}, "sliding_window is set; model_type olmoe has none"),
        (Family.MIXTRAL, {"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        (Family.QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window is set and sliding_window is None"),
        (
            Family.QWEN3_MOE,
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 3},
            "applies its window to every layer",
        ),
        (
            Family.QWEN2_MOE,
            {"use_sliding_window": False, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3},
            "sliding_attention layers but use_sliding_window is false",
        ),
        (
            Family.QWEN2_MOE,
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["chunked_attention"] * 3},
            "chunked_attention.*known: sliding_attention, full_attention",
        ),
        (
            Family.QWEN2_MOE,
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"]},
            "1 layer types are given for 3 layers",
        ),
    ],
)
def test_windows_refused(family: Family, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(family, **changes)


# --- dense layers among MoE layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({"mlp_only_layers": []}, (0, 1, 2)),
        ({"mlp_only_layers": [0]}, (1, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}, (1, 5)),
    ],
)
def test_dense_layers(family: Family, changes: dict[str, Any], moe_layers: tuple[int, ...]):
    config = read(family, **changes)
    assert config.moe_layers == moe_layers
    assert config.num_moe_layers == len(moe_layers)
    assert config.moe_layer_id == {layer: i for i, layer in enumerate(moe_layers)}


def test_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match="no layer is a mixture of experts"):
        read(Family.QWEN3_MOE, mlp_only_layers=[0, 1, 2])
    with pytest.raises(ConfigError, match="decoder_sparse_step is 0"):
        read(Family.QWEN3_MOE, decoder_sparse_step=0)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [None, "llama", "deepseek_v3", "gpt_oss"])
def test_other_families_are_refused(model_type: str | None):
    with pytest.raises(ConfigError, match=r"model_type .* is not supported; .*olmoe, qwen3_moe, mixtral, qwen2_moe"):
        ModelConfig.from_hf({"model_type": model_type, "hidden_size": 8})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["n_group", "attn_logit_softcapping", "embedding_multiplier", "num_nextn_predict_layers"]
)
def test_unknown_field_is_named(family: Family, name: str):
    with pytest.raises(ConfigError, match=f"config.json sets {name}, which model_type {family} is not known to have"):
        read(family, **{name: 1})


def test_field_of_another_family_is_named():
    with pytest.raises(ConfigError, match="clip_qkv"):
        read(Family.QWEN3_MOE, clip_qkv=8.0)
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size"):
        read(Family.OLMOE, shared_expert_intermediate_size=16)
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        read(Family.MIXTRAL, mlp_only_layers=[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act to 'gelu'.*allowed: 'silu', 'swish'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor to 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling to rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'; only 'default' is handled"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn is not supported; use one of bfloat16, float16, float32"),
        ({"num_attention_heads": 5}, "hidden_size 24 is not a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 8}, "head_dim 3 is odd"),
        ({"head_dim": 8}, "num_attention_heads x head_dim is 32; OLMoE needs hidden_size 24"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 exceeds num_experts 5"),
        ({"num_experts": 0}, "num_experts is 0; it must be an integer of at least 1"),
        ({"vocab_size": "67"}, "vocab_size is '67'; it must be an integer"),
        ({"hidden_size": "24"}, "hidden_size is '24'; it must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_values_that_change_the_maths_or_do_not_fit(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        read(Family.OLMOE, **changes)
    assert "\n" not in str(caught.value)


def test_bias_where_the_family_has_none():
    with pytest.raises(ConfigError, match="mixtral has no attention bias"):
        read(Family.MIXTRAL, attention_bias=True)
    with pytest.raises(ConfigError, match="qwen2_moe has qkv_bias instead"):
        read(Family.QWEN2_MOE, attention_bias=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "swish"},
        {"pretraining_tp": 1},
        {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.02, "output_router_logits": True},
        {"_name_or_path": "somewhere", "transformers_version": "4.43.0", "use_cache": False, "architectures": ["X"]},
        {"_attn_implementation_autoset": True, "id2label": {"0": "A"}, "torchscript": False},
    ],
)
def test_harmless_fields_are_ignored(changes: dict[str, Any]):
    assert read(Family.OLMOE, **changes) == read(Family.OLMOE)


# --- real models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("olmoe-1b-7b-0924", {"num_layers": 16, "num_experts": 64, "experts_per_token": 8, "expert_hidden": 1024}),
        ("mixtral-8x7b-v0.1", {"num_layers": 32, "num_experts": 8, "head_dim": 128, "rope_theta": 1e6}),
        ("qwen1.5-moe-a2.7b", {"num_layers": 24, "num_experts": 60, "shared_expert_hidden": 5632, "qkv_bias": True}),
        ("qwen3-30b-a3b", {"num_layers": 48, "num_experts": 128, "head_dim": 128, "norm_topk_prob": True}),
        ("qwen3-235b-a22b", {"num_layers": 94, "num_experts": 128, "expert_hidden": 1536, "num_kv_heads": 4}),
    ],
)
def test_real_configs_are_read(shared_data: Path, name: str, expected: dict[str, Any]):
    config = ModelConfig.from_hf(json.loads((shared_data / "configs" / f"{name}.json").read_text()))
    assert {field: getattr(config, field) for field in expected} == expected
    assert config.weight_dtype == "bfloat16"
    assert set(config.layer_windows) == {None}
    assert config.moe_layers == tuple(range(config.num_layers))


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b", "glm-4.7-fp8", "switch-base-8"])
def test_real_configs_of_other_families_are_refused(shared_data: Path, name: str):
    with pytest.raises(ConfigError, match="is not supported; supported families"):
        ModelConfig.from_hf(json.loads((shared_data / "configs" / f"{name}.json").read_text()))
