"""The rate at which the cores together read memory, the limit that the kernels are compared with.

Owns the threads and the clock; the loop is `streams.cc`, called through ctypes, which lets go of the interpreter's
lock. Needs no JAX. Invariant: what is reported was read by loads from the block that the caller gave, so the block
must be several times larger than the caches.
"""

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashmoe_jax.native.library import find_library

STREAMS = (1, 2, 4)  # interleaved streams of one thread; which is fastest depends on the memory controllers

# Reads the words of a part, as so many streams.
_Read = Callable[[np.ndarray, int], object]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def library_reader() -> _Read | None:
    """The library's loop; None where the library was not built or is of an older version."""
    path = find_library(Path(__file__).parent)
    if path is None:
        return None
    try:
        sum_streams = ctypes.CDLL(str(path)).flashmoe_sum_streams
    except (OSError, AttributeError):
        return None
    sum_streams.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    sum_streams.restype = ctypes.c_uint64
    return lambda words, streams: sum_streams(words.ctypes.data, words.nbytes, streams)


def numpy_reader(words: np.ndarray, streams: int) -> object:
    """What numpy can do without the library: one stream."""
    assert streams == 1, "numpy reads one stream"
    return np.add.reduce(words)


def read_rate(block: np.ndarray, streams: int, read: _Read) -> float:
    """Reads a block once with all cores; returns bytes per second.

    Args:
        block: contiguous and page-aligned, of any dtype; each core reads one part of whole pages.
        streams: of each core, one of STREAMS.
        read: `library_reader()` or `numpy_reader`.
    """
    assert streams in STREAMS and block.flags.c_contiguous
    cores = num_cores()
    page_words = 4096 // 8
    words = block.reshape(-1).view(np.uint64)
    part_words = words.size // cores // page_words * page_words
    assert part_words, "the block has less than a page for each core"
    parts = [words[i * part_words : (i + 1) * part_words] for i in range(cores)]
    threads = [threading.Thread(target=read, args=(part, streams)) for part in parts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cores * part_words * 8 / (time.perf_counter() - began)
