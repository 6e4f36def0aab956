"""How loops are compiled: `kernel` is numba's `njit` without the interpreter lock, kept on disk where that is possible.

Invariant: a kernel calls no function and reads no constant of another file. Numba looks at a kernel's own file alone to
see whether what it kept is still valid.
"""

from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles at the first call; threads may run it side by side."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written to
        return numba.njit(nogil=True)(function)
