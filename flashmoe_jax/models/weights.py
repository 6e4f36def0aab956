"""One abstract description of every weight of a model: its path, shape and dtype.

Initialisation, loading, conversion and the checks of all three follow from these tables. Kernels keep the
orientation of the checkpoint, `[out, in]`: a matrix-vector product reads them row by row.
"""

from typing import NamedTuple

from flashmoe_jax.config import ModelConfig, QKNorm


class WeightSpec(NamedTuple):
    """Shape and stored dtype of one dense weight."""

    shape: tuple[int, ...]
    dtype: str


def dense_weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight that stays on the device, by dotted path, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {"embedder.embedding": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{path}": shape for path, shape in _layer_shapes(config, layer).items()}
    shapes["final_norm.scale"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.kernel"] = (config.vocab_size, config.hidden_size)
    return {path: WeightSpec(shape, config.weight_dtype) for path, shape in shapes.items()}


def expert_field_specs(config: ModelConfig) -> tuple[tuple[str, tuple[int, int]], ...]:
    """The matrices of one expert in record order, as (field name, shape)."""
    D, F = config.hidden_size, config.expert_hidden
    return (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F)))


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    D = config.hidden_size
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_norm.scale": (D,)}
    for name, width in (("q_proj", q_dim), ("k_proj", kv_dim), ("v_proj", kv_dim)):
        shapes[f"attention.{name}.kernel"] = (width, D)
        if config.qkv_bias:
            shapes[f"attention.{name}.bias"] = (width,)
    if config.qk_norm is QKNorm.FULL:
        shapes |= {"attention.q_norm.scale": (q_dim,), "attention.k_norm.scale": (kv_dim,)}
    elif config.qk_norm is QKNorm.HEAD:
        shapes |= {"attention.q_norm.scale": (config.head_dim,), "attention.k_norm.scale": (config.head_dim,)}
    shapes["attention.o_proj.kernel"] = (D, q_dim)
    if config.out_bias:
        shapes["attention.o_proj.bias"] = (D,)
    shapes["post_norm.scale"] = (D,)
    if layer not in config.moe_layers:
        return shapes | _mlp_shapes("mlp", D, config.dense_hidden)
    shapes["router.kernel"] = (config.num_experts, D)
    if config.shared_expert_hidden:
        shapes |= _mlp_shapes("shared_expert", D, config.shared_expert_hidden)
        shapes["shared_expert_gate.kernel"] = (1, D)
    return shapes


def _mlp_shapes(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.kernel": (hidden, width),
        f"{prefix}.up_proj.kernel": (hidden, width),
        f"{prefix}.down_proj.kernel": (width, hidden),
    }
