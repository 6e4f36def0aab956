"""Tiny models of every family: config.json values, weights from a seed, checkpoints on disk and their reading.

Shared by all tests; needs neither torch nor the network. Weights are scaled so that routing varies from token to
token: embeddings 64 times their usual size, norms around 1, biases that are not zero.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, FusedExpertsTarget, hf_name_map
from flashmoe_jax.models.weights import dense_weight_specs, expert_field_specs

FAMILIES = tuple(Family)

_COMMON: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OF_FAMILY: dict[Family, dict[str, Any]] = {
    Family.OLMOE: {"intermediate_size": 14, "num_experts": 5, "norm_topk_prob": False},
    Family.QWEN3_MOE: {
        "intermediate_size": 20,
        "moe_intermediate_size": 14,
        "num_experts": 5,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    Family.MIXTRAL: {"intermediate_size": 14, "num_local_experts": 5},
    Family.QWEN2_MOE: {
        "intermediate_size": 20,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 18,
        "num_experts": 5,
        "norm_topk_prob": False,
    },
}


class Weights(NamedTuple):
    """A model's weights as the reference forward takes them."""

    dense: dict[str, np.ndarray]  # by path
    experts: list[list[dict[str, np.ndarray]]]  # [moe_layer][expert]


def tiny_hf_config(family: Family | str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model: 3 layers, 5 experts, top 3; a change of None removes the field."""
    values = {"model_type": str(family)} | _COMMON | _OF_FAMILY[Family(family)] | changes
    return {name: value for name, value in values.items() if value is not None}


def random_tensors(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint by its Hugging Face key, in the config's dtype."""
    # RandomState promises its stream for all numpy versions; committed logits depend on it.
    random = np.random.RandomState(seed)
    names = hf_name_map(config)
    dtype = _numpy_dtype(config.weight_dtype)
    tensors = {
        names.hf_key(DenseTarget(path)): _draw(random, path, spec.shape).astype(dtype)
        for path, spec in dense_weight_specs(config).items()
    }
    for layer in range(config.num_moe_layers):
        for expert in range(config.num_experts):
            for field, shape in expert_field_specs(config):
                key = names.hf_key(ExpertTarget(layer, expert, field))
                tensors[key] = _draw(random, f"{field}.kernel", shape).astype(dtype)
    return tensors


def _draw(random: np.random.RandomState, path: str, shape: tuple[int, ...]) -> np.ndarray:
    values = random.standard_normal(shape)
    kind = path.rsplit(".", 1)[-1]
    if kind == "embedding":
        return values * 0.02 * 64
    if kind == "scale":
        return 1 + 0.2 * values
    if kind == "bias":
        return 0.5 * values
    return values * shape[-1] ** -0.5 * (2.0 if path.endswith("router.kernel") else 1.0)


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def split_tensors(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Weights:
    """Sorts checkpoint tensors into dense weights and experts by the name map."""
    names = hf_name_map(config)
    dense: dict[str, np.ndarray] = {}
    experts: list[list[dict[str, np.ndarray]]] = [
        [{} for _ in range(config.num_experts)] for _ in range(config.num_moe_layers)
    ]
    for key, tensor in tensors.items():
        match names.locate(key):
            case DenseTarget(path):
                dense[path] = tensor
            case ExpertTarget(layer, expert, field):
                experts[layer][expert][field] = tensor
            case FusedExpertsTarget(layer, fields):
                for expert in range(config.num_experts):
                    parts = np.split(tensor[expert], len(fields), axis=0)
                    experts[layer][expert] |= dict(zip(fields, parts, strict=True))
    return Weights(dense, experts)


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """The weights of `write_hf_checkpoint` with the same seed, without a file."""
    return split_tensors(config, random_tensors(config, seed))


def write_hf_checkpoint(directory: Path, hf_config: Mapping[str, Any], *, seed: int = 0, num_shards: int = 1) -> Path:
    """Writes config.json and safetensors, with an index where there are several shards; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(hf_config), indent=1))
    tensors = random_tensors(ModelConfig.from_hf(hf_config), seed)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard, keys in enumerate(_deal(tensors, num_shards), start=1):
        name = f"model-{shard:05d}-of-{num_shards:05d}.safetensors"
        save_file({key: tensors[key] for key in keys}, directory / name)
        weight_map |= dict.fromkeys(keys, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _deal(keys: Iterable[str], num_hands: int) -> list[list[str]]:
    # Dealt in turn, so that the tensors of one expert lie in different shards.
    keys = list(keys)
    return [keys[start::num_hands] for start in range(num_hands)]


def read_hf_checkpoint(directory: Path) -> tuple[ModelConfig, Weights]:
    """Config and weights of a Hugging Face directory, read whole."""
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return config, split_tensors(config, tensors)
