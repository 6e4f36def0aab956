"""The one matrix product that dense blocks and experts share, so that both round alike."""

import jax.numpy as jnp
from jax import Array, lax


def matmul(x: Array, kernel: Array) -> Array:
    """`x[..., in] @ kernel[out, in].T`: inputs in the kernel's dtype, float32 accumulation and result."""
    return lax.dot_general(
        x.astype(kernel.dtype),
        kernel,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
