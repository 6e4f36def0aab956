"""Expert feed-forward over rows of the slot buffer, in plain XLA: the reference that every other backend agrees with.

Every expert's output is kept apart, `[T, X, D]`, and weighed and added in router-rank order by `add_expert_outputs`,
so that no sum depends on which experts were resident. Each output of a (token, rank) pair is computed by a
matrix-vector product of one shape, whatever the batch and whatever else is active: its bits depend on the token and
the record alone.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from flashmoe_jax.numerics import matmul


class FieldLike(Protocol):
    """Where one matrix lies in a record; `experts.record` provides it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def word_offset(self) -> int: ...


def expert_matrices(rows_RW: Array, row: Array, fields: tuple[FieldLike, ...]) -> dict[str, Array]:
    """The matrices of the record in `row`, by field name, in their stored dtype."""
    matrices = {}
    for field in fields:
        dtype = jnp.dtype(field.dtype)
        words = field.shape[0] * field.shape[1] * dtype.itemsize // rows_RW.dtype.itemsize
        flat = lax.dynamic_slice(rows_RW, (row, jnp.int32(field.word_offset)), (1, words))
        matrices[field.name] = lax.bitcast_convert_type(flat.reshape(field.shape), dtype)
    return matrices


def gated_ffn(x: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """`down(silu(gate(x)) * up(x))`, float32 out; x `[..., D]`."""
    return matmul(jax.nn.silu(matmul(x, gate_proj)) * matmul(x, up_proj), down_proj)


def expert_ffn(
    out_TXD: Array,
    h_TD: Array,
    rows_RW: Array,
    row_TX: Array,
    active_TX: Array,
    fields: tuple[FieldLike, ...],
) -> Array:
    """Writes the outputs of the active (token, rank) pairs into `out_TXD`; the others keep what they hold.

    Args:
        out_TXD: float32, donated by the jitted caller.
        h_TD: normed hidden states.
        rows_RW: the slot buffer.
        row_TX: int32 row of each pair's expert; read only where active.
        active_TX: bool.
        fields: of a record, static.
    """
    T, X = row_TX.shape

    def pair(i: Array, out: Array) -> Array:
        t, x = i // X, i % X

        def compute(out: Array) -> Array:
            h_1D = lax.dynamic_slice_in_dim(h_TD, t, 1, axis=0)
            y_1D = gated_ffn(h_1D, **expert_matrices(rows_RW, row_TX[t, x], fields))
            return lax.dynamic_update_slice(out, y_1D[None], (t, x, jnp.int32(0)))

        return lax.cond(active_TX[t, x], compute, lambda out: out, out)

    return lax.fori_loop(0, T * X, pair, out_TXD)


def add_expert_outputs(x_TD: Array, out_TXD: Array, weight_TX: Array, dense_TD: Array | None) -> Array:
    """Residual plus the experts' outputs, weighed and added in rank order, plus the shared expert's."""
    y_TD = weight_TX[:, 0, None] * out_TXD[:, 0]
    for rank in range(1, weight_TX.shape[1]):
        y_TD = y_TD + weight_TX[:, rank, None] * out_TXD[:, rank]
    return x_TD + (y_TD if dense_TD is None else y_TD + dense_TD)


def expert_ffn_group(
    y_TD: Array,
    h_TD: Array,
    rows_RW: Array,
    row: Array,
    token_G: Array,
    weight_G: Array,
    fields: tuple[FieldLike, ...],
) -> tuple[Array, Array]:
    """Adds one expert's weighed outputs for a group of tokens (prefill).

    Args:
        y_TD: float32 sums so far, donated by the jitted caller.
        h_TD: normed hidden states.
        rows_RW: the slot buffer.
        row: int32 scalar.
        token_G: int32 token indices, all different; T marks padding.
        weight_G: float32 router weights.
        fields: of a record, static.

    Returns:
        `y_TD` and a scalar that is ready when the row has been read.
    """
    h_GD = jnp.take(h_TD, token_G, axis=0, mode="fill", fill_value=0)
    out_GD = gated_ffn(h_GD, **expert_matrices(rows_RW, row, fields)) * weight_G[:, None]
    return y_TD.at[token_G].add(out_GD, mode="drop"), out_GD[0, 0]
