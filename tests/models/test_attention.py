"""Attention, its cache and the rotary embedding, against loops in numpy float64 that read like the definition."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashmoe_jax import native
from flashmoe_jax.models import attention
from flashmoe_jax.models.attention import (
    attend,
    attend_cache,
    init_cache,
    read_cache,
    rotary_embedding,
    word_dtype,
    write_cache,
)

TOLERANCE = 2e-6


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def cache_of(k_BSKH: np.ndarray, v_BSKH: np.ndarray) -> attention.KVCache:
    """A float32 cache that holds all of the keys and values."""
    return attention.KVCache(*(jnp.asarray(x.view(np.uint32)) for x in (k_BSKH, v_BSKH)))


def attend_by_kernel(
    q_BTNH: np.ndarray, k_BSKH: np.ndarray, v_BSKH: np.ndarray, position_BT: np.ndarray, window: int | None
) -> jax.Array:
    """`attend` over a cache: what the kernel is used for."""
    if not native.load().is_loaded:
        pytest.skip("no CPU kernels")
    length = k_BSKH.shape[1]
    return attend_cache(q_BTNH, cache_of(k_BSKH, v_BSKH), position_BT, window, length, jnp.dtype(jnp.float32))


both_ways = pytest.mark.parametrize("attend", [attend, attend_by_kernel])
Attend = Callable[..., jax.Array]


def attend_by_definition(
    q_BTNH: np.ndarray, k_BSKH: np.ndarray, v_BSKH: np.ndarray, position_BT: np.ndarray, window: int | None
) -> np.ndarray:
    B, T, N, H = q_BTNH.shape
    group = N // k_BSKH.shape[2]
    out_BTNH = np.zeros(q_BTNH.shape, np.float64)
    for b, t, n in np.ndindex(B, T, N):
        last = position_BT[b, t]
        first = 0 if window is None else max(0, last - window + 1)
        k_SH = k_BSKH[b, first : last + 1, n // group].astype(np.float64)
        score_S = k_SH @ q_BTNH[b, t, n].astype(np.float64) / np.sqrt(H)
        weight_S = np.exp(score_S - score_S.max())
        out_BTNH[b, t, n] = weight_S / weight_S.sum() @ v_BSKH[b, first : last + 1, n // group]
    return out_BTNH


@both_ways
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attend(attend: Attend, num_heads: int, num_kv_heads: int, window: int | None):
    q_BTNH, k_BSKH, v_BSKH = (
        draw(2, 7, num_heads, 10),
        draw(2, 7, num_kv_heads, 10, seed=1),
        draw(2, 7, num_kv_heads, 10, seed=2),
    )
    position_BT = np.tile(np.arange(7), (2, 1))
    out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    expected = attend_by_definition(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    assert out_BTNH.dtype == jnp.float32
    np.testing.assert_allclose(out_BTNH, expected, atol=TOLERANCE, rtol=0)


@both_ways
@pytest.mark.parametrize("window", [None, 2])
def test_queries_stand_where_their_positions_say(attend: Attend, window: int | None):
    q_BTNH, k_BSKH, v_BSKH = draw(3, 2, 2, 4), draw(3, 9, 1, 4, seed=1), draw(3, 9, 1, 4, seed=2)
    position_BT = np.array([[0, 1], [8, 3], [4, 4]])
    out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    expected = attend_by_definition(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    np.testing.assert_allclose(out_BTNH, expected, atol=TOLERANCE, rtol=0)


@both_ways
def test_keys_after_a_query_do_not_matter(attend: Attend):
    q_BTNH, k_BSKH, v_BSKH = draw(1, 3, 2, 4), draw(1, 8, 2, 4, seed=1), draw(1, 8, 2, 4, seed=2)
    position_BT = np.array([[2, 3, 4]])
    out = attend(q_BTNH, k_BSKH, v_BSKH, position_BT, None)
    # Not in place: the CPU backend may read arrays of numpy where they lie, and later.
    k_BSKH, v_BSKH = k_BSKH.copy(), v_BSKH.copy()
    k_BSKH[:, 5:], v_BSKH[:, 5:] = 1e30, -1e30
    np.testing.assert_array_equal(attend(q_BTNH, k_BSKH, v_BSKH, position_BT, None), out)


@pytest.mark.parametrize(("num_query_tokens", "window"), [(128, None), (129, None), (300, 50)])
def test_blocks_of_queries_equal_one_block(num_query_tokens: int, window: int | None, monkeypatch: pytest.MonkeyPatch):
    q_BTNH = draw(2, num_query_tokens, 2, 4)
    k_BSKH, v_BSKH = draw(2, num_query_tokens, 1, 4, seed=1), draw(2, num_query_tokens, 1, 4, seed=2)
    position_BT = np.stack([np.arange(num_query_tokens), np.arange(num_query_tokens)[::-1]])
    in_blocks = attend(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    monkeypatch.setattr(attention, "QUERY_BLOCK", num_query_tokens)
    at_once = attend(q_BTNH, k_BSKH, v_BSKH, position_BT, window)
    assert in_blocks.shape == at_once.shape
    np.testing.assert_allclose(in_blocks, at_once, atol=TOLERANCE, rtol=0)


@both_ways
def test_padded_query_without_a_visible_key_is_finite(attend: Attend):
    # Padding stands at the capacity; with a window, none of the keys looked at may lie within its reach.
    out = attend(draw(1, 1, 2, 4), draw(1, 6, 1, 4), draw(1, 6, 1, 4), np.array([[100]]), 3)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_cache_is_attended_to_alike_by_kernel_and_by_xla(dtype: jnp.dtype, window: int | None):
    q_BTNH, position_BT = jnp.asarray(draw(2, 5, 4, 16), dtype), np.array([[0, 1, 2, 3, 4], [7, 5, 8, 6, 2]])
    cache = write_cache(
        init_cache(2, 12, 2, 16, dtype),
        *(jnp.asarray(draw(2, 9, 2, 16, seed=i), dtype) for i in (1, 2)),
        np.tile(np.arange(9), (2, 1)),
    )
    by_xla = attend(q_BTNH, *read_cache(cache, 9, dtype), position_BT, window)
    out = attend_cache(q_BTNH, cache, position_BT, window, 9, jnp.dtype(dtype))
    assert out.dtype == jnp.float32
    # A weight that lies between two numbers of the dtype may be rounded either way.
    tolerance = TOLERANCE if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, by_xla, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_cache_returns_what_was_written(dtype: jnp.dtype):
    cache = init_cache(2, 5, 3, 4, dtype)
    assert cache.k.dtype == word_dtype(dtype)
    assert cache.k.shape == (2, 5, 3, 4)
    k_BTKH, v_BTKH = jnp.asarray(draw(2, 2, 3, 4), dtype), jnp.asarray(draw(2, 2, 3, 4, seed=1), dtype)
    cache = write_cache(cache, k_BTKH, v_BTKH, jnp.array([[0, 1], [3, 2]]))
    k_BSKH, v_BSKH = read_cache(cache, 4, dtype)
    assert k_BSKH.shape == (2, 4, 3, 4)
    assert k_BSKH.dtype == dtype
    np.testing.assert_array_equal(k_BSKH[0, :2], k_BTKH[0])
    np.testing.assert_array_equal(v_BSKH[0, :2], v_BTKH[0])
    np.testing.assert_array_equal(k_BSKH[1, 2:], k_BTKH[1, ::-1])
    np.testing.assert_array_equal(v_BSKH[1, 2:], v_BTKH[1, ::-1])
    assert not np.any(k_BSKH[0, 2:])
    assert not np.any(k_BSKH[1, :2])


def test_write_at_or_past_the_capacity_is_dropped():
    cache = init_cache(1, 3, 1, 2, jnp.float32)
    cache = write_cache(cache, draw(1, 3, 1, 2), draw(1, 3, 1, 2), jnp.array([[3, 1, 1_000_000]]))
    k_BSKH, _ = read_cache(cache, 3, jnp.float32)
    np.testing.assert_array_equal(k_BSKH[0, 1], draw(1, 3, 1, 2)[0, 1])
    assert not np.any(k_BSKH[0, ::2])


def test_donated_cache_is_deleted_and_compiled_once():
    num_traces = 0

    def write(cache: attention.KVCache, position_BT: jax.Array) -> attention.KVCache:
        nonlocal num_traces
        num_traces += 1
        return write_cache(cache, jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2)), position_BT)

    step = jax.jit(write, donate_argnums=0)
    first = init_cache(1, 4, 1, 2, jnp.float32)
    second = step(first, jnp.array([[0]]))
    third = step(second, jnp.array([[3]]))
    assert first.k.is_deleted() and second.v.is_deleted()
    assert num_traces == 1
    assert np.flatnonzero(np.asarray(third.k)).tolist() == [0, 1, 6, 7]


def test_rotary_embedding_rotates_pairs_of_halves():
    x_BTNH = draw(1, 3, 2, 6)
    position_BT = np.array([[0, 5, 77]])
    angle_Th = position_BT[0][:, None] * 100.0 ** (-np.arange(3) / 3)
    first, second = x_BTNH[..., :3].astype(np.float64), x_BTNH[..., 3:].astype(np.float64)
    cos, sin = np.cos(angle_Th)[None, :, None], np.sin(angle_Th)[None, :, None]
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    np.testing.assert_allclose(rotary_embedding(x_BTNH, position_BT, 100.0), expected, atol=2e-5, rtol=0)


def test_rotary_scores_depend_on_distance_only():
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8, seed=1)

    def score(query_position: int, key_position: int) -> float:
        rotated = (
            rotary_embedding(q, np.array([[query_position]]), 1e4),
            rotary_embedding(k, np.array([[key_position]]), 1e4),
        )
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 5), abs=1e-2)
