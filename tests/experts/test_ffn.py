"""Expert feed-forward over rows of the slot buffer: against numpy, and what its bits may depend on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashmoe_jax.experts.ffn import add_expert_outputs, expert_ffn, expert_ffn_group, expert_matrices
from flashmoe_jax.experts.record import RecordLayout, numpy_dtype

D, F, ROWS, TOP_K = 24, 14, 6, 3
DTYPES = ["float32", "bfloat16", "float16"]
# Of the output's root mean square; the numpy reference rounds inputs of a product as the experts do.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}

ffn = jax.jit(expert_ffn, static_argnums=5)
group = jax.jit(expert_ffn_group, static_argnums=6)


@functools.lru_cache
def layout_of(dtype: str) -> RecordLayout:
    return RecordLayout.for_experts((("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))), dtype)


@functools.lru_cache
def experts_of(dtype: str) -> list[dict[str, np.ndarray]]:
    random = np.random.RandomState(1)
    return [
        {f.name: random.standard_normal(f.shape).astype(numpy_dtype(dtype)) for f in layout_of(dtype).fields}
        for _ in range(ROWS)
    ]


def rows_of(dtype: str, num_rows: int = ROWS) -> np.ndarray:
    """The experts in the first rows; every word of the rest is a NaN."""
    layout = layout_of(dtype)
    rows = np.full((num_rows, layout.record_words), np.iinfo(layout.word_dtype).max, layout.word_dtype)
    rows[:ROWS] = [layout.pack(expert) for expert in experts_of(dtype)]
    return rows


def tokens(count: int) -> np.ndarray:
    return np.random.RandomState(2).standard_normal((count, D)).astype(np.float32)


def plain_output(h_D: np.ndarray, expert: dict[str, np.ndarray]) -> np.ndarray:
    """One token through one expert, products in float64 of inputs rounded to the weight's dtype."""
    dtype = expert["gate_proj"].dtype

    def product(kernel: np.ndarray, x: np.ndarray) -> np.ndarray:
        return kernel.astype(np.float64) @ x.astype(np.float32).astype(dtype).astype(np.float64)

    gate, up = product(expert["gate_proj"], h_D), product(expert["up_proj"], h_D)
    return product(expert["down_proj"], gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_are_the_bits_of_the_record(dtype: str):
    matrices = expert_matrices(jnp.asarray(rows_of(dtype)), jnp.int32(4), layout_of(dtype).fields)
    for name, expected in experts_of(dtype)[4].items():
        assert matrices[name].dtype == numpy_dtype(dtype)
        np.testing.assert_array_equal(np.asarray(matrices[name]), expected)


def random_choice(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(3)
    row_TX = np.stack([random.permutation(ROWS)[:TOP_K] for _ in range(count)]).astype(np.int32)
    return row_TX, random.rand(count, TOP_K) < 0.6


@pytest.mark.parametrize("dtype", DTYPES)
def test_active_pairs_are_computed_and_the_others_keep_what_they_hold(dtype: str):
    h_TD, (row_TX, active_TX) = tokens(4), random_choice(4)
    held = np.random.RandomState(4).standard_normal((4, TOP_K, D)).astype(np.float32)
    row_TX = np.where(active_TX, row_TX, ROWS + 1)  # a row nobody vouches for
    out = np.asarray(ffn(held, h_TD, rows_of(dtype, ROWS + 2), row_TX, active_TX, layout_of(dtype).fields))
    np.testing.assert_array_equal(out[~active_TX], held[~active_TX])
    for t, x in zip(*np.nonzero(active_TX), strict=True):
        expected = plain_output(h_TD[t], experts_of(dtype)[row_TX[t, x]])
        error = np.abs(out[t, x] - expected).max() / np.sqrt(np.mean(np.square(expected)))
        # One value that rounds the other way between the products moves the output by half a step of the dtype.
        assert error < (TOLERANCE[dtype] if dtype == "float32" else float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_token_and_the_record_alone(dtype: str):
    """Not on the batch, nor on the row, nor on what else is active: hits and misses may come in any order."""
    fields, h_TD, (row_TX, _) = layout_of(dtype).fields, tokens(4), random_choice(4)
    rows, none = rows_of(dtype), np.zeros((4, TOP_K, D), np.float32)
    everything = np.ones((4, TOP_K), bool)
    whole = np.asarray(ffn(none, h_TD, rows, row_TX, everything, fields))

    some = np.random.RandomState(5).rand(4, TOP_K) < 0.5
    in_two = ffn(ffn(none, h_TD, rows, row_TX, some, fields), h_TD, rows, row_TX, ~some, fields)
    np.testing.assert_array_equal(np.asarray(in_two), whole)

    moved = rows_of(dtype, 2 * ROWS)
    moved[ROWS:] = rows[::-1]
    np.testing.assert_array_equal(np.asarray(ffn(none, h_TD, moved, 2 * ROWS - 1 - row_TX, everything, fields)), whole)
    for t in range(4):
        alone = ffn(none[:1], h_TD[t : t + 1], rows, row_TX[t : t + 1], everything[:1], fields)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[t])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8])
def test_a_group_adds_one_experts_outputs(size: int, dtype: str):
    h_TD, sums = tokens(5), np.random.RandomState(6).standard_normal((5, D)).astype(np.float32)
    chosen = [3] if size == 1 else [0, 2, 3]
    token_G = np.array(chosen + list(range(5, 5 + size - len(chosen))), np.int32)
    weight_G = np.linspace(0.2, 0.9, size).astype(np.float32)
    y_TD, done = group(sums, h_TD, rows_of(dtype), np.int32(2), token_G, weight_G, layout_of(dtype).fields)
    assert done.shape == ()
    untouched = [t for t in range(5) if t not in chosen]
    np.testing.assert_array_equal(np.asarray(y_TD)[untouched], sums[untouched])
    for token, weight in zip(chosen, weight_G, strict=False):
        output = plain_output(h_TD[token], experts_of(dtype)[2])
        expected = sums[token] + weight * output
        scale = np.sqrt(np.mean(np.square(output)))
        assert np.abs(np.asarray(y_TD)[token] - expected).max() / scale < max(1e-5, float(jnp.finfo(dtype).eps))


def test_outputs_are_added_in_rank_order():
    out_TXD = np.array([[[1e8], [-1e8], [1.0]], [[1.0], [1e8], [-1e8]]], np.float32)
    ones, x_TD = np.ones((2, 3), np.float32), np.zeros((2, 1), np.float32)
    assert np.asarray(add_expert_outputs(x_TD, out_TXD, ones, None)).tolist() == [[1.0], [0.0]]
    shared = np.array([[0.25], [0.5]], np.float32)
    assert np.asarray(add_expert_outputs(x_TD + 2, 0 * out_TXD, ones, shared)).tolist() == [[2.25], [2.5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("program", ["ffn", "group-1", "group-32"])
def test_temporaries_do_not_grow_with_the_buffer(program: str, dtype: str):
    """XLA takes the rows it needs out of the buffer and never copies the whole of it."""
    layout = RecordLayout.for_experts((("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))), dtype)

    def temporary_bytes(num_rows: int) -> int:
        def array(shape: tuple[int, ...], kind: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, kind)

        rows = array((num_rows, layout.record_words), jnp.dtype(layout.word_dtype))
        if program == "ffn":
            pairs = array((2, TOP_K), jnp.int32), array((2, TOP_K), jnp.bool_)
            lowered = ffn.lower(array((2, TOP_K, 64)), array((2, 64)), rows, *pairs, layout.fields)
        else:
            size = int(program.split("-")[1])
            parts = array((), jnp.int32), array((size,), jnp.int32), array((size,))
            lowered = group.lower(array((40, 64)), array((40, 64)), rows, *parts, layout.fields)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(3), temporary_bytes(300)
    assert many == few
    assert many < 3 * layout.record_bytes + (1 << 17)
