"""The plain way to compute what the engine computes: every expert in memory, in one `[E, W]` array per layer.

No store, slots, residency, fetcher or policy. It uses the decoder's modules and the expert feed-forward functions, and
follows the same rules of shape, all of which come from the prompt and the flags alone: prompts are padded to a bucket,
the tokens of an expert to a group size, the cache to a capacity. What it computes is therefore to be met bit by bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tiny_models import Weights

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.engine.budget import GROUP_SIZES, cache_capacity, prompt_bucket
from flashmoe_jax.experts.ffn import add_expert_outputs, expert_ffn, expert_ffn_group
from flashmoe_jax.experts.record import RecordField, RecordLayout
from flashmoe_jax.models.attention import KVCache, init_cache
from flashmoe_jax.models.decoder import head_logits
from flashmoe_jax.models.reference import decoder_from_weights, head_kernel


class ResidentModel:
    """A model with all its experts in memory."""

    def __init__(self, config: ModelConfig, layout: RecordLayout, weights: Weights):
        self.config = config
        self.fields = layout.fields
        decoder = decoder_from_weights(config, weights.dense)
        self.layers = [nnx.split(layer) for layer in decoder.layers]
        self.embedder = nnx.split(decoder.embedder)
        self.final_norm = nnx.split(decoder.final_norm)
        self.head = head_kernel(decoder)
        self.expert_rows = [
            jnp.asarray(np.stack([layout.pack(expert) for expert in experts])) for experts in weights.experts
        ]


class ResidentSession:
    """Sequences and their caches, with the methods of the engine's `Session`."""

    def __init__(self, model: ResidentModel, batch_size: int, context: int):
        config = model.config
        self._model, self._capacity = model, cache_capacity(context)
        self.lengths = np.zeros(batch_size, np.int32)
        self.expert_ids: list[np.ndarray] = []  # [B, L, T, X] of every step so far
        dtype = jnp.dtype(config.weight_dtype)
        self._caches = [
            init_cache(batch_size, self._capacity, config.num_kv_heads, config.head_dim, dtype)
            for _ in range(config.num_layers)
        ]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        added = np.array([len(prompt) for prompt in prompts], np.int32)
        token_BT = np.zeros((len(prompts), prompt_bucket(int(added.max()))), np.int32)
        for row, prompt in zip(token_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        column_T = np.arange(token_BT.shape[1], dtype=np.int32)
        is_padding_BT = column_T >= added[:, None]
        position_BT = np.where(is_padding_BT, self._capacity, self.lengths[:, None] + column_T).astype(np.int32)
        attend_length = min(self._capacity, prompt_bucket(int((self.lengths + added).max())))
        x_BTD = self._run(token_BT, position_BT, ~is_padding_BT, attend_length)
        self.lengths = self.lengths + added
        return self._logits(x_BTD[np.arange(len(prompts)), added - 1])

    def decode(self, token_B: np.ndarray, active_B: np.ndarray | None = None) -> np.ndarray:
        active_B = np.ones(len(token_B), bool) if active_B is None else active_B
        position_B = np.where(active_B, self.lengths, self._capacity).astype(np.int32)
        x_BTD = self._run(np.asarray(token_B, np.int32)[:, None], position_B[:, None], active_B[:, None], None)
        self.lengths = self.lengths + active_B
        return self._logits(x_BTD[:, 0])

    def rewind(self, sequence: int, length: int) -> None:
        self.lengths[sequence] = length

    def _run(
        self, token_BT: np.ndarray, position_BT: np.ndarray, valid_BT: np.ndarray, attend_length: int | None
    ) -> Array:
        """Residual `[B, T, D]` after the last layer; `attend_length` None is a step of one token per sequence."""
        model, config = self._model, self._model.config
        is_decode = attend_length is None
        x_BTD = _embed(*model.embedder, token_BT)
        all_ids = []
        for layer, (graph, state) in enumerate(model.layers):
            if layer not in config.moe_layers:
                x_BTD, self._caches[layer] = _dense_layer(
                    graph, state, x_BTD, self._caches[layer], position_BT, attend_length
                )
                continue
            x_TD, h_TD, dense_TD, id_TX, weight_TX, self._caches[layer] = _attention_and_router(
                graph, state, x_BTD, self._caches[layer], position_BT, attend_length, is_decode
            )
            rows_EW = model.expert_rows[config.moe_layer_id[layer]]
            id_TX = np.where(valid_BT.reshape(-1, 1), np.asarray(id_TX), -1)
            all_ids.append(id_TX.reshape(*valid_BT.shape, -1))
            if is_decode:
                x_TD = self._decode_experts(x_TD, h_TD, dense_TD, id_TX, weight_TX, rows_EW)
            else:
                x_TD = self._prefill_experts(x_TD, h_TD, dense_TD, id_TX, np.asarray(weight_TX), rows_EW)
            x_BTD = x_TD.reshape(x_BTD.shape)
        self.expert_ids.append(np.stack(all_ids, axis=1))
        return x_BTD

    def _decode_experts(
        self, x_TD: Array, h_TD: Array, dense_TD: Array | None, id_TX: np.ndarray, weight_TX: Array, rows_EW: Array
    ) -> Array:
        out_TXD = np.zeros((*id_TX.shape, x_TD.shape[-1]), np.float32)
        out_TXD = _expert_ffn(out_TXD, h_TD, rows_EW, np.maximum(id_TX, 0), id_TX >= 0, self._model.fields)
        return _add_expert_outputs(x_TD, out_TXD, weight_TX, dense_TD)

    def _prefill_experts(
        self, x_TD: Array, h_TD: Array, dense_TD: Array | None, id_TX: np.ndarray, weight_TX: np.ndarray, rows_EW: Array
    ) -> Array:
        sum_TD = jnp.zeros(x_TD.shape, jnp.float32)
        for expert in range(len(rows_EW)):
            tokens, ranks = np.nonzero(id_TX == expert)
            for first in range(0, len(tokens), GROUP_SIZES[-1]):
                token_G, rank_G = tokens[first:][: GROUP_SIZES[-1]], ranks[first:][: GROUP_SIZES[-1]]
                size = min(s for s in GROUP_SIZES if s >= len(token_G))
                padding = np.arange(len(id_TX), len(id_TX) + size - len(token_G))
                sum_TD = _expert_ffn_group(
                    sum_TD,
                    h_TD,
                    rows_EW,
                    np.int32(expert),
                    np.concatenate([token_G, padding]).astype(np.int32),
                    np.concatenate([weight_TX[token_G, rank_G], 0 * padding]).astype(np.float32),
                    self._model.fields,
                )
        return _add_sums(x_TD, sum_TD, dense_TD)

    def _logits(self, x_BD: Array) -> np.ndarray:
        return np.asarray(_head(*self._model.final_norm, self._model.head, x_BD))


def greedy_tokens(
    session: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int] = ()
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Tokens per sequence and the logits of every step, greedy; a sequence ends with a stop id or when it is full."""
    logits = [np.asarray(session.prefill(prompts))]
    tokens: list[list[int]] = [[] for _ in prompts]
    while True:
        token_B = logits[-1].argmax(axis=-1).astype(np.int32)
        for sequence, token in zip(tokens, token_B.tolist(), strict=True):
            if not _has_ended(sequence, max_new_tokens, stop_ids):
                sequence.append(token)
        active_B = np.array([not _has_ended(sequence, max_new_tokens, stop_ids) for sequence in tokens])
        if not active_B.any():
            return tokens, logits
        logits.append(np.asarray(session.decode(token_B, active_B)))


def _has_ended(tokens: list[int], max_new_tokens: int, stop_ids: Sequence[int]) -> bool:
    return len(tokens) >= max_new_tokens or (bool(tokens) and tokens[-1] in stop_ids)


@partial(jax.jit, static_argnums=0)
def _embed(graph: Any, state: Any, token_BT: Array) -> Array:
    return nnx.merge(graph, state)(token_BT)


@partial(jax.jit, static_argnums=0)
def _head(graph: Any, state: Any, head_VD: Array, x_BD: Array) -> Array:
    return head_logits(nnx.merge(graph, state), head_VD, x_BD)


@partial(jax.jit, static_argnums=(0, 5), donate_argnums=3)
def _dense_layer(
    graph: Any, state: Any, x_BTD: Array, cache: KVCache, position_BT: Array, attend_length: int | None
) -> tuple[Array, KVCache]:
    layer = nnx.merge(graph, state)
    x_BTD, h_BTD, cache = layer.attend(x_BTD, position_BT, cache, attend_length)
    return x_BTD + layer.mlp(h_BTD), cache


@partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=3)
def _attention_and_router(
    graph: Any,
    state: Any,
    x_BTD: Array,
    cache: KVCache,
    position_BT: Array,
    attend_length: int | None,
    is_decode: bool,
) -> tuple[Array, Array, Array | None, Array, Array, KVCache]:
    layer = nnx.merge(graph, state)
    D = x_BTD.shape[-1]
    x_BTD, h_BTD, cache = layer.attend(x_BTD, position_BT, cache, attend_length)
    x_TD, h_TD = (x_BTD[:, 0], h_BTD[:, 0]) if is_decode else (x_BTD.reshape(-1, D), h_BTD.reshape(-1, D))
    routing = layer.router(h_TD)
    return x_TD, h_TD, layer.dense_output(h_TD), routing.expert_id, routing.weight, cache


@partial(jax.jit, static_argnums=5)
def _expert_ffn(
    out: Array, h_TD: Array, rows_EW: Array, row_TX: Array, active_TX: Array, fields: tuple[RecordField, ...]
) -> Array:
    return expert_ffn(out, h_TD, rows_EW, row_TX, active_TX, fields)


@partial(jax.jit, static_argnums=6)
def _expert_ffn_group(
    sum_TD: Array,
    h_TD: Array,
    rows_EW: Array,
    row: Array,
    token_G: Array,
    weight_G: Array,
    fields: tuple[RecordField, ...],
) -> Array:
    return expert_ffn_group(sum_TD, h_TD, rows_EW, row, token_G, weight_G, fields)[0]


_add_expert_outputs = jax.jit(add_expert_outputs)


@jax.jit
def _add_sums(x_TD: Array, sum_TD: Array, dense_TD: Array | None) -> Array:
    return x_TD + (sum_TD if dense_TD is None else sum_TD + dense_TD)
