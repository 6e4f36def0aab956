"""Expert feed-forward by the CPU kernels, which read the rows of the slot buffer in place.

The functions have the signatures of `reference.py` and agree with it to the tolerance of the dtype. Invariant: the
bits of a pair's output depend on its token and its record alone, and are the same in both functions.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.experts.ffn.reference import FieldLike
from flashmoe_jax.native import DTYPE_CODES, isa_code


def expert_ffn(
    out_TXD: Array,
    h_TD: Array,
    rows_RW: Array,
    row_TX: Array,
    active_TX: Array,
    fields: tuple[FieldLike, ...],
    *,
    isa: str = "auto",
) -> Array:
    """As `reference.expert_ffn`; pairs that share an expert share one reading of its record."""
    call = jax.ffi.ffi_call(
        "flashmoe_expert_ffn",
        jax.ShapeDtypeStruct(out_TXD.shape, jnp.float32),
        input_output_aliases={0: 0},
    )
    return call(
        out_TXD.astype(jnp.float32),
        h_TD.astype(jnp.float32),
        rows_RW,
        row_TX.astype(jnp.int32),
        active_TX.astype(jnp.bool_),
        **_layout(fields, h_TD.shape[-1]),
        isa=isa_code(isa),
    )


def expert_ffn_group(
    y_TD: Array,
    h_TD: Array,
    rows_RW: Array,
    row: Array,
    token_G: Array,
    weight_G: Array,
    fields: tuple[FieldLike, ...],
    *,
    isa: str = "auto",
) -> tuple[Array, Array]:
    """As `reference.expert_ffn_group`; the scalar that says the row has been read is zero."""
    call = jax.ffi.ffi_call(
        "flashmoe_expert_ffn_group",
        (jax.ShapeDtypeStruct(y_TD.shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)),
        input_output_aliases={0: 0},
    )
    y_TD, done = call(
        y_TD.astype(jnp.float32),
        h_TD.astype(jnp.float32),
        rows_RW,
        jnp.asarray(row, jnp.int32),
        token_G.astype(jnp.int32),
        weight_G.astype(jnp.float32),
        **_layout(fields, h_TD.shape[-1]),
        isa=isa_code(isa),
    )
    return y_TD, done


def _layout(fields: tuple[FieldLike, ...], width: int) -> dict[str, np.int64]:
    """Attributes of a record's fields, which have the shapes [F, D], [F, D] and [D, F]."""
    by_name = {field.name: field for field in fields}
    gate, up, down = (by_name[name] for name in ("gate_proj", "up_proj", "down_proj"))
    hidden = gate.shape[0]
    assert gate.shape == up.shape == (hidden, width) and down.shape == (width, hidden), "not a gated feed-forward"
    assert gate.dtype == up.dtype == down.dtype, "the matrices of a record differ in dtype"
    return {
        "dtype": np.int64(DTYPE_CODES[gate.dtype]),
        "hidden": np.int64(hidden),
        "gate_offset": np.int64(gate.word_offset),
        "up_offset": np.int64(up.word_offset),
        "down_offset": np.int64(down.word_offset),
    }
