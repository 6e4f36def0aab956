"""The one matrix product that dense blocks and experts share, so that both round alike.

On the CPU it is the C++ kernel where that could be loaded (`flashmoe_jax/native`), else XLA's product; on every other
platform XLA's. Which one a program gets is decided when it is lowered for a platform.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from flashmoe_jax import native


def matmul(x: Array, kernel: Array) -> Array:
    """`x[..., in] @ kernel[out, in].T`: inputs in the kernel's dtype, float32 accumulation and result."""
    if kernel.ndim == 2 and kernel.dtype.name in native.DTYPE_CODES and native.load().is_loaded:
        return _by_platform(x, kernel)
    return xla_matmul(x, kernel)


def xla_matmul(x: Array, kernel: Array) -> Array:
    """`matmul` in plain XLA."""
    x = x.astype(kernel.dtype)
    if x.size == x.shape[-1] and kernel.dtype.itemsize == 2:
        # XLA's CPU backend copies a 16-bit kernel to float32 for one row, and reads it in place for two.
        two_rows = jnp.concatenate([x.reshape(1, -1), jnp.zeros((1, x.shape[-1]), x.dtype)])
        return _dot(two_rows, kernel)[0].reshape(*x.shape[:-1], -1)
    return _dot(x, kernel)


@jax.custom_jvp
def _by_platform(x: Array, kernel: Array) -> Array:
    return lax.platform_dependent(x, kernel, cpu=native.matmul, default=xla_matmul)


@_by_platform.defjvp
def _by_platform_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # Training needs derivatives, and a call of the library has none of its own.
    return _by_platform(*primals), jax.jvp(xla_matmul, primals, tangents)[1]


def _dot(x: Array, kernel: Array) -> Array:
    return lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
