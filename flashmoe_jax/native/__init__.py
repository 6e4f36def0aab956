"""CPU kernels in C++, called by XLA: matrix products with stored weights, and experts read in place from the slots.

Owns finding the library, checking that it fits the running JAX, and the matrix product; the experts' calls are in
`experts.ffn.native`. Whether a model uses the kernels is decided in `numerics` and `experts.ffn`. Invariant: nothing
is registered with JAX unless the library's interface version is one that the running jaxlib knows; otherwise `load()`
says why and all goes on without it.
"""

from flashmoe_jax.native.calls import DTYPE_CODES, attend, isa_code, matmul
from flashmoe_jax.native.library import ISA_LEVELS, Library, load

__all__ = ["DTYPE_CODES", "ISA_LEVELS", "Library", "attend", "isa_code", "load", "matmul"]
