"""What the numbers were measured on, and the two physical limits beside them: drive and memory read rates.

Owns no state. Invariant: rates are measured with nothing else of the run under way, between two children.
"""

import mmap
import os
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.native.streams import STREAMS, library_reader, numpy_reader, read_rate
from scripts.peers.read_ahead import read_ahead_bytes

# Bytes of one read: one expert of OLMoE-1B-7B in bfloat16, as the engine reads it.
READ_BYTES = 12 << 20
_MEMORY_BLOCK_BYTES = 512 << 20


def describe(path: Path) -> dict[str, Any]:
    """Machine, system and the drive under `path`."""
    device = os.stat(path).st_dev
    drive = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "swap": _field(Path("/proc/meminfo"), "SwapTotal"),
        "system": platform.platform(),
        "drive": Path(drive).name,
        "drive_read_ahead_bytes": read_ahead_bytes(path),
        # A kernel that pages out what is cold takes weights out of the page cache again.
        "proactive_reclaim": _damon_actions(),
    }


def drive_read_rate(files: Sequence[Path], seconds: float = 1.5) -> float:
    """Bytes per second of `preadv` with O_DIRECT into one aligned block, one read at a time, at random places."""
    largest = max(files, key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    count = min(READ_BYTES, size // mmap.PAGESIZE * mmap.PAGESIZE)
    places = random.Random(time.monotonic_ns())
    read_bytes = 0
    with mmap.mmap(-1, count) as block:
        fd = os.open(largest, os.O_RDONLY | os.O_DIRECT)
        try:
            began = time.perf_counter()
            while (passed := time.perf_counter() - began) < seconds:
                offset = places.randrange(0, size - count + 1) // mmap.PAGESIZE * mmap.PAGESIZE
                read_bytes += os.preadv(fd, [block], offset)
        finally:
            os.close(fd)
    return read_bytes / passed


def memory_read_rate(rounds: int = 5) -> tuple[float, str]:
    """Bytes per second that all cores read together, best of some rounds, and how that was measured."""
    with mmap.mmap(-1, _MEMORY_BLOCK_BYTES) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        block = np.frombuffer(pages, np.uint64)
        block[:] = 1
        reader = library_reader()
        if reader is None:
            rate = max(read_rate(block, 1, numpy_reader) for _ in range(rounds))
        else:
            rate = max(read_rate(block, n, reader) for n in STREAMS for _ in range(rounds))
        del block  # else the block could not be unmapped
    return rate, "numpy, one stream per core" if reader is None else "compiled loop, the best number of streams"


def _field(path: Path, name: str) -> str | None:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return None


def _damon_actions() -> str | None:
    found = Path("/sys/kernel/mm/damon/admin/kdamonds").glob("*/contexts/*/schemes/*/action")
    try:
        return ", ".join(sorted({path.read_text().strip() for path in found})) or None
    except OSError:
        return None
