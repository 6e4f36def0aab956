"""The attention kernel: against float64, and bit for bit against itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax import native
from flashmoe_jax.models.attention import init_cache, word_dtype, write_cache

pytestmark = pytest.mark.usefixtures("library")

# Weights are rounded to the cache's dtype before they meet the values.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-21}
DTYPES = tuple(ROUNDING)

_attend = functools.partial(jax.jit, static_argnames=("dtype", "window", "isa"))(native.attend)


def words(x: np.ndarray, dtype: str) -> Any:
    return jax.lax.bitcast_convert_type(jnp.asarray(x, dtype), word_dtype(jnp.dtype(dtype)))


def exact(q, k, v, position, window) -> np.ndarray:
    """Float64, one query at a time; zeros for padding."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        last = position[b, t]
        if last >= S:
            continue
        first = 0 if window is None else max(0, last - window + 1)
        head = n // (N // K)
        scores = k[b, first : last + 1, head] @ q[b, t, n] / np.sqrt(H)
        weight = np.exp(scores - scores.max())
        out[b, t, n] = weight / weight.sum() @ v[b, first : last + 1, head]
    return out


def case(seed: int, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
    B, T, K, group, H, S = shape
    random = np.random.default_rng(seed)
    q = random.normal(size=(B, T, K * group, H))
    k, v = random.normal(size=(2, B, S, K, H))
    # Some queries are padding.
    position = random.integers(0, S + 2, (B, T)).astype(np.int32)
    return *(np.asarray(jnp.asarray(x, dtype)).astype(np.float64) for x in (q, k, v)), position


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    level=st.integers(0, 7),
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(*(st.integers(1, most) for most in (2, 9, 3, 5, 70, 40))),
    window=st.one_of(st.none(), st.integers(1, 12)),
)
def test_equals_float64(dtype: str, level: int, seed: int, shape, window) -> None:
    levels = native.load().isa_levels
    q, k, v, position = case(seed, shape, dtype)
    isa = levels[level % len(levels)]
    out = _attend(q.astype(np.float32), words(k, dtype), words(v, dtype), position, dtype=dtype, window=window, isa=isa)
    assert out.dtype == jnp.float32
    bound = (ROUNDING[dtype] * 2 + 1e-5) * np.abs(v).max()
    np.testing.assert_allclose(out, exact(q, k, v, position, window), atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_does_not_depend_on_others_nor_on_what_it_does_not_see(library: native.Library, dtype: str) -> None:
    """Batch, other queries, capacity, and whatever stands behind its position, not numbers included."""
    q, k, v, position = case(1, (2, 70, 2, 3, 40, 90), dtype)
    q = q.astype(np.float32)
    for isa in library.isa_levels:
        for window in (None, 7):
            attend = functools.partial(_attend, dtype=dtype, window=window, isa=isa)
            together = np.asarray(attend(q, words(k, dtype), words(v, dtype), position))
            for b, t in ((0, 0), (1, 33), (1, 69)):
                seen = min(int(position[b, t]) + 1, 90)
                longer_k, longer_v = (np.full((1, 128, 2, 40), np.nan) for _ in range(2))
                longer_k[:, :seen], longer_v[:, :seen] = k[b, :seen], v[b, :seen]
                at = position[b : b + 1, t : t + 1] if position[b, t] < 90 else np.array([[128]], np.int32)
                alone = attend(q[b : b + 1, t : t + 1], words(longer_k, dtype), words(longer_v, dtype), at)
                np.testing.assert_array_equal(np.asarray(alone)[0, 0], together[b, t])


def test_the_cache_is_read_in_place() -> None:
    cache = init_cache(1, 4096, 4, 64, jnp.dtype("bfloat16"))
    q, position = np.ones((1, 1, 8, 64), np.float32), np.array([[3]], np.int32)

    def step(cache, q, position):
        cache = write_cache(cache, *(jnp.ones((1, 1, 4, 64), jnp.bfloat16),) * 2, position)
        return cache, native.attend(q, *cache, position, dtype="bfloat16", window=None)

    compiled = jax.jit(step, donate_argnums=0).lower(cache, q, position).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.zeros((1, 4, 3, 8), np.uint16)}, "attend takes q"),
        ({"values": np.zeros((1, 4, 2, 8), np.uint32)}, "a cache is uint16 words"),
        ({"position": np.zeros((1, 2), np.int32)}, "attend takes q"),
    ],
)
def test_shapes_and_words_are_checked(change: dict[str, Any], message: str) -> None:
    arguments = {
        "keys": np.zeros((1, 4, 2, 8), np.uint16),
        "values": np.zeros((1, 4, 2, 8), np.uint16),
        "position": np.zeros((1, 1), np.int32),
    } | change
    with pytest.raises(Exception, match=message):
        _attend(
            np.ones((1, 1, 4, 8), np.float32), *arguments.values(), dtype="bfloat16", window=None, isa="auto"
        ).block_until_ready()
