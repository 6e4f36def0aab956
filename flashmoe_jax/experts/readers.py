"""Ways of a record from the drive into memory; every one checks what it read, next to the reading.

`array` reads through the tensorstore array, `range` a byte range of the shard through tensorstore's key-value layer,
and `direct` by preadv(2) straight into the destination, on local drives. Which one is used is decided in
`reader_choice.py`. Invariant: whatever the reader, the same bytes arrive or the same error is raised.
"""

import abc
import concurrent.futures
import functools
import math
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import tensorstore as ts
import xxhash

from flashmoe_jax.experts.landing import Landing

# A direct read is cut into pieces, so that one is checked while the next comes: large ones, which a drive likes.
DIRECT_PIECE_BYTES = 4 << 20
# A range read is cut so that one piece is copied while others come, small enough for malloc to keep its memory.
RANGE_PIECE_BYTES = 1 << 20


class Reader(abc.ABC):
    """Begins reads; each ends in its landing's future."""

    name: str

    @abc.abstractmethod
    def begin(self, landing: Landing) -> None:
        """Begins one read and returns at once; may be called from any thread."""

    @abc.abstractmethod
    def transient_bytes(self, record_bytes: int) -> int:
        """Most memory that a read under way holds besides its destination."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees threads and files; no read is under way any more."""


class ArrayReader(Reader):
    """Through the tensorstore array, which writes into the destination itself."""

    name = "array"

    def __init__(self, array: ts.TensorStore, word_dtype: str, num_threads: int):
        self._array, self._word_dtype = array, word_dtype
        self._checkers = _pool(num_threads, "expert-check")

    def begin(self, landing: Landing) -> None:
        target = ts.array(landing.out.view(self._word_dtype))
        copy = target.write(self._array[landing.layer, landing.expert]).commit
        copy.add_done_callback(functools.partial(self._hand_over, landing))

    def transient_bytes(self, record_bytes: int) -> int:
        return record_bytes

    def close(self) -> None:
        self._checkers.shutdown(wait=True)

    def _hand_over(self, landing: Landing, done: ts.Future) -> None:
        # This runs in a thread of tensorstore's, which must not be kept from the next read.
        self._checkers.submit(self._arrived, landing, done)

    @staticmethod
    def _arrived(landing: Landing, done: ts.Future) -> None:
        try:
            done.result()
        except Exception as error:
            landing.failed(error)
        else:
            landing.arrived_whole()


class RangeReader(Reader):
    """A byte range of the shard through the key-value layer, in pieces: one is copied while others come."""

    name = "range"

    def __init__(self, kvstore: ts.KvStore, num_threads: int):
        self._kvstore = kvstore
        self._workers = _pool(num_threads, "expert-copy")

    def begin(self, landing: Landing) -> None:
        _Pieces(self._kvstore, self._workers, landing).begin()

    def transient_bytes(self, record_bytes: int) -> int:
        # The bytes as tensorstore has them, and as Python gets them.
        return record_bytes + piece_bytes(record_bytes, RANGE_PIECE_BYTES)

    def close(self) -> None:
        self._workers.shutdown(wait=True)


class _Pieces:
    """One range read on its way: its pieces arrive in any order, the last one is followed by the check."""

    def __init__(self, kvstore: ts.KvStore, workers: concurrent.futures.ThreadPoolExecutor, landing: Landing):
        self._kvstore, self._workers, self._landing = kvstore, workers, landing
        self._lock = threading.Lock()
        self._num_open = 0
        self._error: BaseException | None = None

    def begin(self) -> None:
        (key, start, _), size = self._landing.place, len(self._landing.out)
        step = piece_bytes(size, RANGE_PIECE_BYTES)
        bounds = [(first, min(first + step, size)) for first in range(0, size, step)]
        self._num_open = len(bounds)
        for first, last in bounds:
            piece = self._kvstore.read(key, byte_range=slice(start + first, start + last))
            # The callback runs in a thread of tensorstore's, which must not be kept from the next read.
            piece.add_done_callback(functools.partial(self._hand_over, first, last))

    def _hand_over(self, first: int, last: int, piece: ts.Future) -> None:
        self._workers.submit(self._land, first, last, piece)

    def _land(self, first: int, last: int, piece: ts.Future) -> None:
        try:
            data = range_bytes(piece)
            if len(data) != last - first:
                raise ValueError(f"{len(data)} of {last - first} bytes could be read")
            self._landing.out[first:last] = np.frombuffer(data, np.uint8)
        except Exception as error:
            self._error = error
        with self._lock:
            self._num_open -= 1
            is_last = self._num_open == 0
        if not is_last:
            return
        if self._error is not None:
            self._landing.failed(self._error)
        else:
            self._landing.arrived_whole()


class DirectReader(Reader):
    """preadv(2) into the destination, past the page cache where the drive allows it.

    A thread per read under way; another one checks each piece while the next is read.
    """

    name = "direct"

    def __init__(self, folder: Path, num_threads: int, *, is_direct: bool):
        self._folder, self._flags = folder, os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
        self._readers = _pool(num_threads, "expert-read")
        # One thread: what is given to it is done in that order, and a processor checks faster than a drive reads.
        self._checker = _pool(1, "expert-check")
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}

    def begin(self, landing: Landing) -> None:
        self._readers.submit(self._read, landing)

    def transient_bytes(self, record_bytes: int) -> int:
        return piece_bytes(record_bytes, DIRECT_PIECE_BYTES)  # for a destination that is not aligned

    def close(self) -> None:
        self._readers.shutdown(wait=True)
        self._checker.shutdown(wait=True)
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _read(self, landing: Landing) -> None:
        out, digest = landing.out, xxhash.xxh3_64()
        step = piece_bytes(len(out), DIRECT_PIECE_BYTES)
        is_aligned = out.ctypes.data % mmap.PAGESIZE == 0
        bounce = None if is_aligned else np.frombuffer(mmap.mmap(-1, step), np.uint8)
        try:
            fd = self._open(landing.place.key)
            for first in range(0, len(out), step):
                piece = out[first : first + step]
                target = piece if bounce is None else bounce[: len(piece)]
                _fill(fd, target, landing.place.start + first)
                if bounce is not None:
                    piece[:] = target
                self._checker.submit(digest.update, piece.data)
        except Exception as error:
            # Behind the checks of the pieces that came: nobody looks at the memory after the future is done.
            self._checker.submit(landing.failed, error)
        else:
            self._checker.submit(landing.arrived, digest)

    def _open(self, key: str) -> int:
        with self._lock:
            if key not in self._files:
                self._files[key] = os.open(self._folder / key, self._flags)
            return self._files[key]


def _fill(fd: int, target: np.ndarray, offset: int) -> None:
    """Reads exactly `target`; a read may end early, within a page only at the end of the file."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:].data], offset + done)
        if count == 0:
            raise ValueError(f"the file ends {len(target) - done} bytes early")
        done += count
        if done < len(target) and done % mmap.PAGESIZE:
            raise ValueError(f"the file ends {len(target) - done} bytes early")


def piece_bytes(record_bytes: int, target: int) -> int:
    """Size of the pieces of a record: equal, of whole pages, near `target`."""
    num_pieces = max(1, round(record_bytes / target))
    return math.ceil(record_bytes / num_pieces / mmap.PAGESIZE) * mmap.PAGESIZE


def range_bytes(piece: ts.Future) -> bytes:
    """Bytes of a read of the key-value layer. Raises ValueError where there are none."""
    result = piece.result()
    if result.state != "value":
        raise ValueError("the file is missing")
    return result.value


def _pool(num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix=name)
