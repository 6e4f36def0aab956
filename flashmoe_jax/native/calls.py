"""The matrix product of the library as a JAX function, on the CPU platform, after `load()` succeeded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.native.library import ISA_LEVELS

# Weight dtypes of the kernels, by their numbers in kernels.h.
DTYPE_CODES = {"bfloat16": 0, "float16": 1, "float32": 2}


def matmul(x: Array, kernel: Array, *, isa: str = "auto") -> Array:
    """`x[..., K] @ kernel[N, K].T`: x rounded to the kernel's dtype, float32 accumulation and result.

    Args:
        x: any float dtype.
        kernel: bfloat16, float16 or float32.
        isa: instruction set, one of `ISA_LEVELS`.
    """
    assert kernel.ndim == 2 and x.shape[-1] == kernel.shape[1], (x.shape, kernel.shape)
    assert kernel.dtype.name in DTYPE_CODES, kernel.dtype
    # The batch axes are merged: a row's result does not depend on the others.
    x_MK = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct((x_MK.shape[0], kernel.shape[0]), jnp.float32)
    y_MN = jax.ffi.ffi_call("flashmoe_matmul", out, vmap_method="sequential")(x_MK, kernel, isa=isa_code(isa))
    return y_MN.reshape(*x.shape[:-1], kernel.shape[0])


def attend(
    q_BTNH: Array,
    keys_BSKH: Array,
    values_BSKH: Array,
    position_BT: Array,
    *,
    dtype: str,
    window: int | None,
    isa: str = "auto",
) -> Array:
    """Causal attention over a KV cache that is read in place, as far as the queries' positions reach.

    Args:
        q_BTNH: rotated queries, any float; rounded to the cache's dtype.
        keys_BSKH: words of the cache, uint16 or uint32.
        values_BSKH: as the keys.
        position_BT: int32; one at or past the capacity marks padding, whose output is zero.
        dtype: what the words are, of `DTYPE_CODES`.
        window: a query at p sees keys in (p - window, p]; None for all up to p.

    Returns:
        float32 `[B, T, N, H]`.
    """
    call = jax.ffi.ffi_call("flashmoe_attend", jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32))
    return call(
        q_BTNH.astype(jnp.float32),
        keys_BSKH,
        values_BSKH,
        position_BT.astype(jnp.int32),
        isa=isa_code(isa),
        dtype=np.int64(DTYPE_CODES[dtype]),
        window=np.int64(window or 0),
    )


def isa_code(name: str) -> np.int64:
    """The attribute of a call for a level's name."""
    return np.int64(ISA_LEVELS.index(name))
