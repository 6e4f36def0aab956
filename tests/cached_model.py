"""The decoder's cached path with every expert in memory: prefill of a padded batch, then steps of one token.

What the engine does without its memory: attention through `KVCache` and positions, and the experts of a layer stacked
into one array per field. A padded position is the capacity, whose write the cache drops.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import Weights

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.models.attention import KVCache, init_cache
from flashmoe_jax.models.axes import Array
from flashmoe_jax.models.decoder import Routing, head_logits
from flashmoe_jax.models.reference import Reference, decoder_from_weights, expert_output, head_kernel, reference_forward

# Compiling is most of what these tests do; the models are too small for the quality of the code to matter.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def compiled_reference(config: ModelConfig, weights: Weights, token_BT: np.ndarray) -> Reference:
    """`reference_forward` in one jitted call: called op by op, it compiles for longer."""
    forward = jax.jit(partial(reference_forward, config), compiler_options=_QUICK_TO_COMPILE)
    return forward(weights.dense, weights.experts, token_BT.astype(np.int32))


class CachedModel:
    """One batch of sequences; `prefill` once, then `step` for each further token."""

    def __init__(self, config: ModelConfig, weights: Weights, *, capacity: int):
        self.config, self.capacity = config, capacity
        self._dense = jax.tree.map(jnp.asarray, weights.dense)
        self._experts = [
            {field: jnp.stack([expert[field] for expert in experts]) for field in experts[0]}
            for experts in weights.experts
        ]
        self._caches: list[KVCache] = []
        self._length_B = np.zeros(0, np.int32)

    def prefill(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Logits `[B, T, V]` and expert ids `[L, B, T, X]`, T the longest prompt; padding gives noise."""
        longest = max(map(len, prompts))
        token_BT = np.zeros((len(prompts), longest), np.int32)
        position_BT = np.full((len(prompts), longest), self.capacity, np.int32)
        for row, prompt in enumerate(prompts):
            token_BT[row, : len(prompt)] = prompt
            position_BT[row, : len(prompt)] = np.arange(len(prompt))
        config = self.config
        dtype = jnp.dtype(config.weight_dtype)
        self._caches = [
            init_cache(len(prompts), self.capacity, config.num_kv_heads, config.head_dim, dtype)
            for _ in range(config.num_layers)
        ]
        self._length_B = np.array([len(prompt) for prompt in prompts], np.int32)
        return self._run(token_BT, position_BT, attend_length=longest)

    def step(self, token_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits `[B, V]` and expert ids `[L, B, X]` after one more token of each sequence."""
        logits_BTV, ids_LBTX = self._run(token_B[:, None].astype(np.int32), self._length_B[:, None], None)
        self._length_B = self._length_B + 1
        return logits_BTV[:, 0], ids_LBTX[:, :, 0]

    def _run(
        self, token_BT: np.ndarray, position_BT: np.ndarray, attend_length: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        logits_BTV, expert_ids, self._caches = _forward(
            self.config, self._dense, self._experts, self._caches, token_BT, position_BT, attend_length
        )
        return np.asarray(logits_BTV), np.stack([np.asarray(ids) for ids in expert_ids])


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=3, compiler_options=_QUICK_TO_COMPILE)
def _forward(
    config: ModelConfig,
    dense: dict[str, Array],
    experts: list[dict[str, Array]],
    caches: list[KVCache],
    token_BT: Array,
    position_BT: Array,
    attend_length: int | None,
) -> tuple[Array, list[Array], list[KVCache]]:
    decoder = decoder_from_weights(config, dense)
    x_BTD = decoder.embedder(token_BT)
    expert_ids, new_caches = [], []
    for layer_id, layer in enumerate(decoder.layers):
        x_BTD, h_BTD, cache = layer.attend(x_BTD, position_BT, caches[layer_id], attend_length)
        new_caches.append(cache)
        dense_BTD = layer.dense_output(h_BTD)
        x_BTD = x_BTD if dense_BTD is None else x_BTD + dense_BTD
        if layer.is_moe:
            choice = layer.router(h_BTD)
            x_BTD = x_BTD + _routed(h_BTD, choice, experts[config.moe_layer_id[layer_id]])
            expert_ids.append(choice.expert_id)
    return head_logits(decoder.final_norm, head_kernel(decoder), x_BTD), expert_ids, new_caches


def _routed(h_BTD: Array, choice: Routing, experts: dict[str, Array]) -> Array:
    out_EBTD = jax.vmap(lambda expert: expert_output(h_BTD, expert))(experts)
    out_BTXD = jnp.take_along_axis(jnp.moveaxis(out_EBTD, 0, 2), choice.expert_id[..., None], axis=2)
    return jnp.sum(choice.weight[..., None] * out_BTXD, axis=2)
