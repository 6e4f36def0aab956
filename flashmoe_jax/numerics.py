"""The one matrix product that dense blocks and experts share, so that both round alike."""

import jax.numpy as jnp
from jax import Array, lax


def matmul(x: Array, kernel: Array) -> Array:
    """`x[..., in] @ kernel[out, in].T`: inputs in the kernel's dtype, float32 accumulation and result."""
    x = x.astype(kernel.dtype)
    if x.size == x.shape[-1] and kernel.dtype.itemsize == 2:
        # XLA's CPU backend copies a 16-bit kernel to float32 for one row, and reads it in place for two.
        two_rows = jnp.concatenate([x.reshape(1, -1), jnp.zeros((1, x.shape[-1]), x.dtype)])
        return _dot(two_rows, kernel)[0].reshape(*x.shape[:-1], -1)
    return _dot(x, kernel)


def _dot(x: Array, kernel: Array) -> Array:
    return lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
