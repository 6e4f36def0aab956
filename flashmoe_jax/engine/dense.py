"""Dense weights split once for the jitted steps: one tuple of leaves per layer, one graph definition per layer kind.

Steps take leaves as arguments and close over the graph definition only: `nnx.jit` on a 48-layer module costs 40 ms of
host time per call, a plain `jax.jit` with flat leaves 0.5 ms. Layers of one kind share their compiled steps.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.models.decoder import DecoderLayer, RMSNorm, head_logits

Leaves = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What layers with equal structure share: how to turn leaves back into a `DecoderLayer`."""

    graph: Any
    treedef: Any
    paths: tuple[str, ...]
    is_moe: bool

    def __post_init__(self) -> None:
        # Programs are looked up by kind for every layer of every token, and the graph takes 0.2 ms to hash.
        object.__setattr__(self, "_hash", hash((self.graph, self.treedef, self.paths, self.is_moe)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def merge(self, leaves: Leaves) -> DecoderLayer:
        """The layer module, inside a trace."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


@dataclasses.dataclass(frozen=True)
class DenseWeights:
    """All dense weights of a model, on the device."""

    config: ModelConfig
    kinds: tuple[LayerKind, ...]  # per layer; equal layers hold the same object
    layers: tuple[Leaves, ...]
    embedding: Array  # [V, D]
    final_norm: Array  # [D]
    head: Array  # [V, D]; the embedding itself where tied

    @property
    def num_bytes(self) -> int:
        arrays = [self.embedding, self.final_norm, *(leaf for leaves in self.layers for leaf in leaves)]
        return sum(a.nbytes for a in arrays) + (0 if self.head is self.embedding else self.head.nbytes)

    def router_of(self, layer: int) -> tuple[Array, Array]:
        """Scale `[D]` of the norm before a MoE layer's router, and the router's kernel `[E, D]`."""
        leaves = dict(zip(self.kinds[layer].paths, self.layers[layer], strict=True))
        return leaves["post_norm.scale"], leaves["router.kernel"]

    def embed(self, token: Array | np.ndarray) -> Array:
        """float32 `[..., D]` of int32 token ids."""
        return _embed(self.embedding, token)

    def logits(self, x: Array) -> Array:
        """float32 `[..., V]` from the last residual `[..., D]`."""
        return _logits(self.final_norm, self.head, x, eps=self.config.rms_norm_eps)


def split_dense_weights(config: ModelConfig, dense: Mapping[str, Array], device: jax.Device) -> DenseWeights:
    """Sorts loaded weights, by dotted path (`dense_weight_specs`), into the arguments of the steps.

    They are committed to `device`, as all long-lived arrays of an engine are: jit compiles a program once for
    committed and once for uncommitted arguments.
    """
    dense = {path: jax.device_put(array, device) for path, array in dense.items()}
    dtype = jnp.dtype(config.weight_dtype)
    kind_of: dict[tuple[bool, int | None], LayerKind] = {}
    kinds, layers = [], []
    for layer in range(config.num_layers):
        key = (layer in config.moe_layers, config.layer_windows[layer])
        if key not in kind_of:
            kind_of[key] = _layer_kind(config, layer, dtype)
        kind = kind_of[key]
        kinds.append(kind)
        layers.append(tuple(dense[f"layers.{layer}.{path}"] for path in kind.paths))
    embedding = dense["embedder.embedding"]
    head = embedding if config.tie_embeddings else dense["lm_head.kernel"]
    return DenseWeights(config, tuple(kinds), tuple(layers), embedding, dense["final_norm.scale"], head)


def _layer_kind(config: ModelConfig, layer: int, dtype: jnp.dtype) -> LayerKind:
    abstract = nnx.eval_shape(lambda: DecoderLayer(config, layer, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    entries, treedef = jax.tree.flatten_with_path(state)
    # A leaf's key path ends in the attribute that holds a variable's value; the rest is its place in the module.
    paths = tuple(".".join(_key_name(k) for k in path if _key_name(k) != "value") for path, _ in entries)
    return LayerKind(graph, treedef, paths, is_moe=abstract.is_moe)


def _key_name(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


@jax.jit
def _embed(embedding_VD: Array, token: Array | np.ndarray) -> Array:
    return jnp.take(embedding_VD, token, axis=0).astype(jnp.float32)


def _logits_impl(scale_D: Array, head_VD: Array, x: Array, *, eps: float) -> Array:
    norm = RMSNorm(scale_D.shape[0], eps=eps, dtype=scale_D.dtype)
    norm.scale[...] = scale_D
    return head_logits(norm, head_VD, x)


_logits = jax.jit(_logits_impl, static_argnames="eps")
