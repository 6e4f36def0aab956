"""What the page cache holds of files, and how to empty it of them.

Owns no state. Invariant: `drop` measures what it left, so that "cold" is a measurement and not a hope.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_DROP_ALL = Path("/proc/sys/vm/drop_caches")


def files_under(path: Path) -> list[Path]:
    """The file itself, or all files in a directory and below."""
    return [path] if not path.is_dir() else sorted(p for p in path.rglob("*") if p.is_file())


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if libc.mincore(address, size, pages.ctypes.data) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return int((pages & 1).sum()) * mmap.PAGESIZE


def drop(files: Iterable[Path]) -> str:
    """Empties the page cache of files; the whole cache where that left something and this user may.

    Returns:
        What was done and what is left, for the report.
    """
    files = list(files)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    left, how = sum(map(cached_bytes, files)), "posix_fadvise"
    if left:
        try:
            os.sync()
            _DROP_ALL.write_text("1")
        except OSError as error:
            how += f", drop_caches not ({error.strerror})"
        else:
            how += " and drop_caches"
        left = sum(map(cached_bytes, files))
    return f"{how}; {left / 1e6:.0f} MB left cached"
