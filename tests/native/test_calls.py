"""The kernels as XLA calls: against float64, and bit for bit against themselves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax import native
from flashmoe_jax.experts.ffn import native as kernels
from flashmoe_jax.experts.ffn import reference
from flashmoe_jax.experts.record import RecordLayout, numpy_dtype

DTYPES = ("bfloat16", "float16", "float32")
# Relative to the sum of the terms' magnitudes: float32 sums in another order.
SUM_TOLERANCE = 2e-6
# Hidden units are rounded to the weights' dtype before the down projection.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}

pytestmark = pytest.mark.usefixtures("library")

dtypes = st.sampled_from(DTYPES)
levels = st.integers(0, 7).map(lambda i: native.load().isa_levels[i % max(1, len(native.load().isa_levels))])
seeds = st.integers(0, 2**32 - 1)
fuzz = settings(deadline=None, max_examples=25)

_matmul = functools.partial(jax.jit, static_argnames="isa")(native.matmul)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(numpy_dtype(dtype)).astype(np.float64)


@fuzz
@given(dtypes, levels, seeds, st.integers(0, 9), st.integers(1, 40), st.integers(1, 150))
def test_matmul_equals_float64(dtype: str, isa: str, seed: int, M: int, N: int, K: int) -> None:
    random = np.random.default_rng(seed)
    x, kernel = random.normal(size=(M, K)).astype(np.float32), random.normal(size=(N, K)).astype(numpy_dtype(dtype))
    y = np.asarray(_matmul(x, kernel, isa=isa))
    exact = rounded(x, dtype) @ rounded(kernel, dtype).T
    scale = np.abs(rounded(x, dtype)) @ np.abs(rounded(kernel, dtype)).T
    assert y.shape == (M, N)
    assert np.all(np.abs(y - exact) <= SUM_TOLERANCE * scale + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_batch(library: native.Library, dtype: str) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(131, 200)).astype(np.float32)
    kernel = jnp.asarray(random.normal(size=(77, 200)), dtype)
    for isa in library.isa_levels:
        together = np.asarray(_matmul(x, kernel, isa=isa))
        for first, last in ((0, 1), (3, 5), (64, 131), (130, 131)):
            assert np.array_equal(np.asarray(_matmul(x[first:last], kernel, isa=isa)), together[first:last])


def test_auto_is_the_best_level(library: native.Library) -> None:
    x, kernel = np.ones((2, 40), np.float32) / 3, jnp.full((8, 40), 0.1, jnp.bfloat16)
    assert library.isa == library.isa_levels[-1]
    assert np.array_equal(_matmul(x, kernel, isa="auto"), _matmul(x, kernel, isa=library.isa))


def test_matmul_keeps_leading_axes_and_takes_other_floats() -> None:
    x = jnp.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4) / 8
    kernel = jnp.eye(4, dtype=jnp.bfloat16)[:3]
    y = _matmul(x, kernel)
    assert y.dtype == jnp.float32
    assert np.array_equal(y, x[..., :3].astype(jnp.float32))


def test_kernels_are_read_in_place() -> None:
    """No temporary near the size of the weights: 16-bit kernels are neither converted nor copied."""
    kernel = jnp.ones((512, 256), jnp.bfloat16)
    memory = _matmul.lower(np.ones((1, 256), np.float32), kernel, isa="auto").compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8192


def make_rows(random: np.random.Generator, layout: RecordLayout, num_rows: int) -> np.ndarray:
    """Slot rows of random records whose padding is NaN, which must reach no result."""
    rows = np.full((num_rows, layout.record_words), 0x7FFF if layout.word_dtype == "uint16" else 0x7FFFFFFF)
    rows = rows.astype(layout.word_dtype)
    for row in rows:
        layout.pack_into({f.name: random.normal(size=f.shape).astype(numpy_dtype(f.dtype)) for f in layout.fields}, row)
    return rows


def exact_ffn(x: np.ndarray, words: np.ndarray, layout: RecordLayout) -> tuple[np.ndarray, float]:
    """Float64 outputs of a token and a bound for the error of rounding."""
    dtype = layout.fields[0].dtype
    gate, up, down = (layout.unpack(words)[n].astype(np.float64) for n in ("gate_proj", "up_proj", "down_proj"))
    g = gate @ rounded(x, dtype)
    hidden = g / (1 + np.exp(-g)) * (up @ rounded(x, dtype))
    return down @ hidden, float((np.abs(down) @ np.abs(hidden)).max()) * (ROUNDING[dtype] + 1e-5) + 1e-5


def layout_of(D: int, F: int, dtype: str) -> RecordLayout:
    return RecordLayout.for_experts((("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))), dtype)


def jitted_ffn(layout: RecordLayout, isa: str = "auto") -> Any:
    return jax.jit(
        lambda out, h, rows, row, active: kernels.expert_ffn(out, h, rows, row, active, layout.fields, isa=isa)
    )


@fuzz
@given(dtypes, levels, seeds, st.integers(0, 5), st.integers(1, 3), st.integers(1, 70), st.integers(1, 40))
def test_expert_ffn_equals_float64_and_leaves_the_rest(
    dtype: str, isa: str, seed: int, T: int, X: int, D: int, F: int
) -> None:
    random = np.random.default_rng(seed)
    layout = layout_of(D, F, dtype)
    rows = make_rows(random, layout, 3)
    h_TD, active_TX = random.normal(size=(T, D)).astype(np.float32), random.random((T, X)) < 0.7
    row_TX = np.where(active_TX, random.integers(0, 3, (T, X)), -7).astype(np.int32)
    before = random.normal(size=(T, X, D)).astype(np.float32)
    out = np.asarray(jitted_ffn(layout, isa)(before, h_TD, rows, row_TX, active_TX))
    assert np.array_equal(out[~active_TX], before[~active_TX])
    for t, x in np.argwhere(active_TX):
        exact, bound = exact_ffn(h_TD[t], rows[row_TX[t, x]], layout)
        assert np.abs(out[t, x] - exact).max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_does_not_depend_on_the_others(dtype: str) -> None:
    random = np.random.default_rng(1)
    layout = layout_of(72, 40, dtype)
    rows = make_rows(random, layout, 4)
    h_TD = random.normal(size=(9, 72)).astype(np.float32)
    row_TX = random.integers(0, 4, (9, 2)).astype(np.int32)
    ffn, zeros = jitted_ffn(layout), np.zeros((9, 2, 72), np.float32)
    together = np.asarray(ffn(zeros, h_TD, rows, row_TX, np.ones((9, 2), bool)))
    hits = random.random((9, 2)) < 0.5
    in_two_calls = ffn(ffn(zeros, h_TD, rows, row_TX, hits), h_TD, rows, row_TX, ~hits)
    assert np.array_equal(np.asarray(in_two_calls), together)
    one = np.asarray(ffn(zeros[:1, :1], h_TD[4:5], rows, row_TX[4:5, 1:], np.ones((1, 1), bool)))
    assert np.array_equal(one[0, 0], together[4, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference(dtype: str) -> None:
    random = np.random.default_rng(2)
    layout = layout_of(96, 64, dtype)
    rows = make_rows(random, layout, 5)
    h_TD = random.normal(size=(6, 96)).astype(np.float32)
    row_TX, active_TX = random.integers(0, 5, (6, 2)).astype(np.int32), random.random((6, 2)) < 0.8
    before = np.zeros((6, 2, 96), np.float32)
    ffn = jax.jit(lambda *arguments: reference.expert_ffn(*arguments, layout.fields))
    expected = ffn(before, h_TD, rows, row_TX, active_TX)
    got = jitted_ffn(layout)(before, h_TD, rows, row_TX, active_TX)
    tolerance = 2 * ROUNDING[dtype] * float(np.abs(expected).max()) + 1e-4
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    token_G, weight_G = np.array([5, 0, 6, 7, 2], np.int32), random.normal(size=5).astype(np.float32)
    y_TD = random.normal(size=(6, 96)).astype(np.float32)
    arguments = (h_TD, rows, np.int32(3), token_G, weight_G)
    expected, _ = jax.jit(lambda *arguments: reference.expert_ffn_group(*arguments, layout.fields))(y_TD, *arguments)
    got, _ = jax.jit(lambda y, *rest: kernels.expert_ffn_group(y, *rest, layout.fields))(y_TD, *arguments)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2 * tolerance)
    assert np.array_equal(np.asarray(got)[[1, 3, 4]], y_TD[[1, 3, 4]])


def test_a_group_adds_what_its_pairs_give() -> None:
    random = np.random.default_rng(3)
    layout = layout_of(64, 48, "bfloat16")
    rows = make_rows(random, layout, 2)
    h_TD = random.normal(size=(60, 64)).astype(np.float32)
    token_G = random.permutation(64).astype(np.int32)  # 60 to 63 are padding
    weight_G = random.normal(size=64).astype(np.float32)
    zeros = np.zeros((60, 64), np.float32)
    group = jax.jit(lambda y, h, token, weight: kernels.expert_ffn_group(y, h, rows, 1, token, weight, layout.fields))
    sums, done = group(zeros, h_TD, token_G, weight_G)
    assert float(done) == 0
    row_TX, active_TX = np.ones((60, 1), np.int32), np.ones((60, 1), bool)
    pairs = np.asarray(jitted_ffn(layout)(zeros[:, None], h_TD, rows, row_TX, active_TX))[:, 0]
    weight_T = np.zeros(64, np.float32)
    weight_T[token_G] = weight_G
    assert np.array_equal(np.asarray(sums), weight_T[:60, None] * pairs)


def test_donated_outputs_are_updated_in_place() -> None:
    layout = layout_of(64, 32, "bfloat16")
    rows = make_rows(np.random.default_rng(4), layout, 1)
    out = jnp.zeros((1, 1, 64))
    donating = jax.jit(
        lambda out, h: kernels.expert_ffn(out, h, rows, np.zeros((1, 1)), np.ones((1, 1), bool), layout.fields),
        donate_argnums=0,
    )
    pointer = out.unsafe_buffer_pointer()
    assert donating(out, np.ones((1, 64), np.float32)).unsafe_buffer_pointer() == pointer
    assert out.is_deleted()


def test_a_row_outside_of_the_buffer_is_an_error() -> None:
    layout = layout_of(16, 8, "float32")
    rows = make_rows(np.random.default_rng(5), layout, 2)
    arguments = (np.zeros((1, 1, 16), np.float32), np.ones((1, 16), np.float32), rows)
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside of the slot buffer"):
        jitted_ffn(layout)(*arguments, np.full((1, 1), 2, np.int32), np.ones((1, 1), bool)).block_until_ready()


def test_a_level_that_the_processor_lacks_is_an_error(library: native.Library) -> None:
    missing = [level for level in native.ISA_LEVELS[1:] if level not in library.isa_levels]
    if not missing:
        pytest.skip("this processor has every level")
    with pytest.raises(jax.errors.JaxRuntimeError, match="lacks the instruction set"):
        _matmul(np.ones((1, 8), np.float32), jnp.ones((4, 8), jnp.bfloat16), isa=missing[0]).block_until_ready()
