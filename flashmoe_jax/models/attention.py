"""Grouped-query attention over a preallocated KV cache, and the rotary embedding.

Owns the maths between the projected queries, keys and values and the attention output. The cache of one layer is a
`KVCache` of *words*: 16-bit floats are kept as uint16, because XLA's CPU backend updates an integer array in place
and a bfloat16 one by converting the whole of it through float32. Invariant: a position past a sequence's length is
never attended to, so what a cache holds there does not matter.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashmoe_jax import native
from flashmoe_jax.models.axes import Array

# Queries attended to at once in prefill: bounds the scores to [B, N, QUERY_BLOCK, S].
QUERY_BLOCK = 128


class KVCache(NamedTuple):
    """Keys and values of one layer, `[B, S, K, H]` words, positions in order; donated and updated in place."""

    k: Array
    v: Array


def init_cache(batch: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache with room for `capacity` positions of each sequence."""
    shape = (batch, capacity, num_kv_heads, head_dim)
    return KVCache(k=jnp.zeros(shape, word_dtype(dtype)), v=jnp.zeros(shape, word_dtype(dtype)))


def word_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The unsigned integer of a float's width."""
    return jnp.dtype({2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize])


def write_cache(cache: KVCache, k_BTKH: Array, v_BTKH: Array, position_BT: Array) -> KVCache:
    """Stores keys and values at their positions; a position at or past the capacity is dropped."""
    batch_BT = jnp.broadcast_to(jnp.arange(position_BT.shape[0])[:, None], position_BT.shape)

    def put(buffer: Array, new: Array) -> Array:
        words = lax.bitcast_convert_type(new, buffer.dtype)
        return buffer.at[batch_BT, position_BT].set(words, mode="drop")

    return KVCache(k=put(cache.k, k_BTKH), v=put(cache.v, v_BTKH))


def read_cache(cache: KVCache, length: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Keys and values of the first `length` (static) positions, `[B, length, K, H]` in `dtype`."""

    def view(buffer: Array) -> Array:
        return lax.bitcast_convert_type(lax.slice_in_dim(buffer, 0, length, axis=1), dtype)

    return view(cache.k), view(cache.v)


def rotary_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """float32 `[head_dim / 2]`: radians per position of each pair of a head."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64: float32 powers are off by a unit or two, and differently on different processors.
    return np.float32(1) / (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)


def rotary_embedding(x_BTNH: Array, position_BT: Array, theta: float) -> Array:
    """Rotates each head by its position, halves paired as in `apply_rotary_pos_emb` of transformers; float32."""
    frequency_h = rotary_frequencies(x_BTNH.shape[-1], theta)
    angle_BT1h = position_BT[..., None, None].astype(jnp.float32) * frequency_h
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend_cache(
    q_BTNH: Array, cache: KVCache, position_BT: Array, window: int | None, length: int, dtype: jnp.dtype
) -> Array:
    """`attend` over a cache, written up to the queries' own positions.

    On the CPU the kernel of `flashmoe_jax/native`, where it could be loaded, reads the words in place and as far as the
    positions reach; elsewhere XLA reads the first `length` (static) positions.

    Args:
        dtype: of the cached keys and values.
    """

    def by_xla(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, position_BT: Array) -> Array:
        keys, values = read_cache(KVCache(k_BSKH, v_BSKH), length, dtype)
        return attend(q_BTNH, keys, values, position_BT, window)

    if dtype.name not in native.DTYPE_CODES or not native.load().is_loaded:
        return by_xla(q_BTNH, *cache, position_BT)
    kernel = functools.partial(native.attend, dtype=dtype.name, window=window)
    return lax.platform_dependent(q_BTNH, *cache, position_BT, cpu=kernel, default=by_xla)


def attend(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, position_BT: Array, window: int | None) -> Array:
    """Causal attention of queries at `position_BT` over keys at positions 0..S-1.

    Args:
        q_BTNH: queries, rotated, in the dtype of the keys.
        k_BSKH: keys, rotated; key s stands at position s.
        v_BSKH: values.
        position_BT: int32 position of each query.
        window: a query at p sees keys in (p - window, p]; None for all keys up to p.

    Returns:
        float32 `[B, T, N, H]`.
    """
    num_query_tokens = q_BTNH.shape[1]
    if num_query_tokens <= QUERY_BLOCK:
        return _attend_block(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    num_blocks = -(-num_query_tokens // QUERY_BLOCK)
    pad = num_blocks * QUERY_BLOCK - num_query_tokens

    def to_blocks(array: Array) -> Array:
        widths = [(0, 0), (0, pad)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, widths)
        blocked = padded.reshape(array.shape[0], num_blocks, QUERY_BLOCK, *array.shape[2:])
        return jnp.moveaxis(blocked, 1, 0)

    out = lax.map(
        lambda block: _attend_block(block[0], k_BSKH, v_BSKH, block[1], window),
        (to_blocks(q_BTNH), to_blocks(position_BT)),
    )
    merged = jnp.moveaxis(out, 0, 1).reshape(q_BTNH.shape[0], num_blocks * QUERY_BLOCK, *q_BTNH.shape[2:])
    return merged[:, :num_query_tokens]


def _attend_block(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, position_BT: Array, window: int | None) -> Array:
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    # Query heads n*G..n*G+G-1 share key/value head n (repeat_kv of transformers).
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    exact = lax.Precision.HIGHEST
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32, precision=exact
    ) * np.float32(H**-0.5)
    key_position_S = jnp.arange(k_BSKH.shape[1])
    visible_BTS = key_position_S <= position_BT[..., None]
    if window is not None:
        visible_BTS &= key_position_S > position_BT[..., None] - window
    # The lowest finite score, not -inf: a padded query whose window holds no key must not turn into NaN.
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)
    weight_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    out_BTKGH = jnp.einsum(
        "BKGTS,BSKH->BTKGH",
        weight_BKGTS.astype(v_BSKH.dtype),
        v_BSKH,
        preferred_element_type=jnp.float32,
        precision=exact,
    )
    return out_BTKGH.reshape(B, T, N, H)
