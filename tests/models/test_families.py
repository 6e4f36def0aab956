"""Name maps: every key has one place and every place one key; anything else is refused by name."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from awkward_models import AWKWARD
from tiny_models import FAMILIES, random_tensors, split_tensors, tiny_hf_config

from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, FusedExpertsTarget, hf_name_map
from flashmoe_jax.models.weights import dense_weight_specs, expert_field_specs


@pytest.mark.parametrize("name", AWKWARD)
def test_every_target_has_one_key_and_back(name: str):
    config = ModelConfig.from_hf(AWKWARD[name])
    names = hf_name_map(config)
    targets = [DenseTarget(path) for path in dense_weight_specs(config)] + [
        ExpertTarget(layer, expert, field)
        for layer in range(config.num_moe_layers)
        for expert in range(config.num_experts)
        for field, _ in expert_field_specs(config)
    ]
    keys = [names.hf_key(target) for target in targets]
    assert keys == names.expected_keys()
    assert len(set(keys)) == len(keys)
    assert [names.locate(key) for key in keys] == targets


@pytest.mark.parametrize(
    ("family", "key", "target"),
    [
        (Family.OLMOE, "model.embed_tokens.weight", DenseTarget("embedder.embedding")),
        (Family.OLMOE, "model.norm.weight", DenseTarget("final_norm.scale")),
        (Family.OLMOE, "lm_head.weight", DenseTarget("lm_head.kernel")),
        (Family.OLMOE, "model.layers.2.self_attn.k_norm.weight", DenseTarget("layers.2.attention.k_norm.scale")),
        (Family.OLMOE, "model.layers.1.mlp.gate.weight", DenseTarget("layers.1.router.kernel")),
        (Family.OLMOE, "model.layers.1.mlp.experts.4.up_proj.weight", ExpertTarget(1, 4, "up_proj")),
        (Family.QWEN3_MOE, "model.layers.0.mlp.experts.0.down_proj.weight", ExpertTarget(0, 0, "down_proj")),
        (Family.MIXTRAL, "model.layers.0.block_sparse_moe.gate.weight", DenseTarget("layers.0.router.kernel")),
        (Family.MIXTRAL, "model.layers.2.block_sparse_moe.experts.3.w1.weight", ExpertTarget(2, 3, "gate_proj")),
        (Family.MIXTRAL, "model.layers.2.block_sparse_moe.experts.3.w2.weight", ExpertTarget(2, 3, "down_proj")),
        (Family.MIXTRAL, "model.layers.2.block_sparse_moe.experts.3.w3.weight", ExpertTarget(2, 3, "up_proj")),
        (Family.QWEN2_MOE, "model.layers.0.self_attn.q_proj.bias", DenseTarget("layers.0.attention.q_proj.bias")),
        (
            Family.QWEN2_MOE,
            "model.layers.0.mlp.shared_expert.up_proj.weight",
            DenseTarget("layers.0.shared_expert.up_proj.kernel"),
        ),
        (
            Family.QWEN2_MOE,
            "model.layers.0.mlp.shared_expert_gate.weight",
            DenseTarget("layers.0.shared_expert_gate.kernel"),
        ),
    ],
)
def test_known_keys(family: Family, key: str, target: DenseTarget | ExpertTarget):
    names = hf_name_map(ModelConfig.from_hf(tiny_hf_config(family)))
    assert names.locate(key) == target
    assert names.hf_key(target) == key


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_spelling(family: Family):
    names = hf_name_map(ModelConfig.from_hf(tiny_hf_config(family)))
    gate_up = FusedExpertsTarget(2, ("gate_proj", "up_proj"))
    assert names.locate("model.layers.2.mlp.experts.gate_up_proj") == gate_up
    assert names.locate("model.layers.2.mlp.experts.down_proj") == FusedExpertsTarget(2, ("down_proj",))
    assert names.locate("model.layers.1.mlp.gate.weight") == DenseTarget("layers.1.router.kernel")


def test_moe_layers_are_counted_apart_from_layers():
    config = ModelConfig.from_hf(tiny_hf_config(Family.QWEN3_MOE, mlp_only_layers=[0]))
    names = hf_name_map(config)
    assert names.locate("model.layers.1.mlp.experts.0.up_proj.weight") == ExpertTarget(0, 0, "up_proj")
    assert names.hf_key(ExpertTarget(1, 2, "up_proj")) == "model.layers.2.mlp.experts.2.up_proj.weight"
    assert names.locate("model.layers.0.mlp.up_proj.weight") == DenseTarget("layers.0.mlp.up_proj.kernel")
    with pytest.raises(CheckpointError, match=r"holds experts, but by config.json layer 0 has none"):
        names.locate("model.layers.0.mlp.experts.0.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not a weight"):
        names.locate("model.layers.1.mlp.up_proj.weight")


def test_tied_head_is_the_embedding():
    names = hf_name_map(ModelConfig.from_hf(tiny_hf_config(Family.OLMOE, tie_word_embeddings=True)))
    assert "lm_head.weight" not in names.expected_keys()
    assert names.locate("lm_head.weight") == DenseTarget("embedder.embedding")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "key",
    [
        "",
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale",
        "prefix.model.norm.weight",
        "model.layers.0.mlp.gate.bias",
        "model.layers.x.mlp.experts.0.gate_proj.weight",
    ],
)
def test_unknown_keys_are_refused(family: Family, key: str):
    names = hf_name_map(ModelConfig.from_hf(tiny_hf_config(family)))
    with pytest.raises(CheckpointError, match=f"is not a weight of a {family} model"):
        names.locate(key)


def test_expert_beyond_the_last_is_refused():
    names = hf_name_map(ModelConfig.from_hf(tiny_hf_config(Family.OLMOE)))
    with pytest.raises(CheckpointError, match=r"names expert 5, but config\.json has num_experts 5"):
        names.locate("model.layers.0.mlp.experts.5.gate_proj.weight")


def test_names_of_another_family_are_refused():
    mixtral = hf_name_map(ModelConfig.from_hf(tiny_hf_config(Family.MIXTRAL)))
    olmoe = hf_name_map(ModelConfig.from_hf(tiny_hf_config(Family.OLMOE)))
    with pytest.raises(CheckpointError):
        mixtral.locate("model.layers.0.mlp.experts.0.gate_proj.weight")
    with pytest.raises(CheckpointError):
        olmoe.locate("model.layers.0.block_sparse_moe.experts.0.w1.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_split_tensors_fill_every_place(family: Family):
    config = ModelConfig.from_hf(tiny_hf_config(family))
    weights = split_tensors(config, random_tensors(config, seed=1))
    assert {path: array.shape for path, array in weights.dense.items()} == {
        path: spec.shape for path, spec in dense_weight_specs(config).items()
    }
    for expert in np.ravel(weights.experts):
        assert {field: array.shape for field, array in expert.items()} == dict(expert_field_specs(config))


@pytest.mark.parametrize("name", ["olmoe-1b-7b-0924", "mixtral-8x7b-v0.1", "qwen3-30b-a3b"])
def test_tensors_of_real_checkpoints(shared_data: Path, name: str):
    config = ModelConfig.from_hf(json.loads((shared_data / "configs" / f"{name}.json").read_text()))
    listed = json.loads((shared_data / "configs" / f"{name}.tensors.json").read_text())
    expected = {
        row["name"].format(**dict(zip(row["repeat"], index, strict=True))): tuple(row["shape"])
        for row in listed["tensors"]
        for index in itertools.product(*map(range, row["repeat"].values()))
    }
    names = hf_name_map(config)
    ours = {names.hf_key(DenseTarget(path)): spec.shape for path, spec in dense_weight_specs(config).items()}
    for layer, expert in itertools.product(range(config.num_moe_layers), range(config.num_experts)):
        for field, shape in expert_field_specs(config):
            ours[names.hf_key(ExpertTarget(layer, expert, field))] = shape
    assert ours == expected
    assert sum(map(math.prod, ours.values())) == listed["total_params"]
