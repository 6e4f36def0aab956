"""A block of expert records far larger than the caches: what memory, kernel and copy are measured on.

Owns its size and its pages. Invariant: rows start at multiples of 4096 bytes, as in the slot buffer, and going through
all rows reads more than any cache keeps.
"""

import mmap
import os

import numpy as np

from flashmoe_jax.engine.budget import format_size
from flashmoe_jax.errors import BudgetError
from flashmoe_jax.experts.record import RecordLayout, numpy_dtype

BLOCK_BYTES = 512 << 20
_HUGE_PAGE = 2 << 20


def num_rows(layout: RecordLayout, experts_per_token: int, available_bytes: int) -> tuple[int, str]:
    """Records in the block, and what should be noted about that, if anything.

    Raises:
        BudgetError: there is no memory for two records.
    """
    wanted_bytes = max(BLOCK_BYTES, 4 * _last_cache_bytes())
    wanted = max(experts_per_token, 1 + wanted_bytes // layout.record_bytes)
    # The other half is for whatever else the measurements hold: copies, JAX itself.
    possible = available_bytes // 2 // layout.record_bytes
    if possible < 1:
        raise BudgetError(
            f"the measurements need {format_size(2 * layout.record_bytes, up=True)} of memory and "
            f"{format_size(max(0, available_bytes))} are available; free some"
        )
    if possible < wanted:
        return possible, (
            f"only {format_size(possible * layout.record_bytes)} could be taken for measuring memory and kernel; "
            "caches may make both look faster than they are"
        )
    return wanted, ""


def make_records(layout: RecordLayout, rows: int) -> np.ndarray:
    """Records `[rows, record_words]`, all alike; ordinary numbers, as denormals or NaN could have another speed."""
    generator = np.random.default_rng(0)
    one = layout.pack(
        {f.name: (generator.normal(size=f.shape) * 0.02).astype(numpy_dtype(f.dtype)) for f in layout.fields}
    )
    words = _huge_pages(rows * layout.record_bytes).view(layout.word_dtype).reshape(rows, layout.record_words)
    words[:] = one
    return words


def _huge_pages(num_bytes: int) -> np.ndarray:
    """Zeroed bytes from a multiple of 2 MiB on, in huge pages where the system has them: fewer table walks."""
    block = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(block, np.uint8)
    first = -everything.ctypes.data % _HUGE_PAGE
    return everything[first : first + num_bytes]


def _last_cache_bytes() -> int:
    """Of the last level that the system tells of, 0 if none."""
    names = [n for n in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE") if n in getattr(os, "sysconf_names", ())]
    return max([0, *map(os.sysconf, names)])
