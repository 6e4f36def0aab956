"""The drive's read rate: whole records at random places, one to sixteen at once, past the page cache.

Owns the files that are read, a temporary one where there is no model, and the threads; the system's own `preadv` is
all that stands between the drive and the clock. Invariant: nothing is left behind; a temporary file has no name from
its first byte on, so that even a kill removes it.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from flashmoe_jax.errors import CheckpointError, ConfigError
from flashmoe_jax.experts.record import RECORD_ALIGNMENT
from flashmoe_jax.probe.rounds import in_turn

DEPTHS = (1, 2, 4, 8, 16)
NUM_ROUNDS = 3
# One read takes no more, so that sixteen at once fit into memory; beyond some MiB a drive's rate does not depend on it.
MAX_READ_BYTES = 32 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


class DriveReader:
    """Files open for reading at random aligned places. Use `of_files` or `of_temporary_file`.

    Args:
        descriptors: of the files, owned by the caller; each holds at least one read.
        read_bytes: of one read, a multiple of 4096.
        is_direct: whether the page cache is passed by.
    """

    def __init__(self, descriptors: Sequence[int], read_bytes: int, *, is_direct: bool):
        assert descriptors and read_bytes % RECORD_ALIGNMENT == 0
        self.is_direct, self.read_bytes = is_direct, read_bytes
        self._places = [
            (fd, index * read_bytes) for fd in descriptors for index in range(os.fstat(fd).st_size // read_bytes)
        ]
        assert self._places, "the files are shorter than one read"
        self._random = random.Random(0)
        self._buffers: list[mmap.mmap] = []

    @property
    def num_places(self) -> int:
        """Different reads that there are."""
        return len(self._places)

    def rate(self, depth: int, seconds: float) -> float:
        """Reads with `depth` threads for about so many seconds; returns bytes per second."""
        while len(self._buffers) < depth:
            self._buffers.append(mmap.mmap(-1, self.read_bytes))
        seeds = [self._random.getrandbits(32) for _ in range(depth)]
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(depth) as pool:
            work = [
                pool.submit(self._read_until, began + seconds, seed, buffer)
                for seed, buffer in zip(seeds, self._buffers, strict=False)
            ]
            num_bytes = sum(reads.result() for reads in work)
        return num_bytes / (time.perf_counter() - began)

    def _read_until(self, deadline: float, seed: int, buffer: mmap.mmap) -> int:
        """Reads, at least once, until the deadline has passed; returns the bytes read."""
        places, choose = self._places, random.Random(seed).randrange
        num_bytes = 0
        while True:
            fd, offset = places[choose(len(places))]
            if not self.is_direct:
                _drop_cached(fd, offset, self.read_bytes)
            num_bytes += _read_whole(fd, buffer, offset)
            if time.perf_counter() >= deadline:
                return num_bytes


@contextlib.contextmanager
def of_files(paths: Sequence[Path], read_bytes: int) -> Iterator[DriveReader]:
    """Reads from files that exist, such as a model's shards.

    Raises:
        CheckpointError: a file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        descriptors = []
        for path in paths:
            try:
                descriptors.append(os.open(path, os.O_RDONLY))
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}; convert the model again") from None
            stack.callback(os.close, descriptors[-1])
        yield DriveReader(descriptors, read_bytes, is_direct=_make_direct(descriptors))


@contextlib.contextmanager
def of_temporary_file(directory: Path, read_bytes: int, file_bytes: int) -> Iterator[DriveReader]:
    """Reads from a file of random bytes that is made in `directory` and vanishes with the context.

    Raises:
        ConfigError: the directory cannot be written, or has too little room.
    """
    with _random_file(directory, read_bytes, file_bytes) as file:
        yield DriveReader([file.fileno()], read_bytes, is_direct=_make_direct([file.fileno()]))


def _random_file(directory: Path, read_bytes: int, file_bytes: int) -> IO[bytes]:
    """A file of random bytes without a name, on the drive and not in memory."""
    try:
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < 1.1 * file_bytes:
            raise ConfigError(
                f"measuring the drive takes a file of {file_bytes >> 20} MiB for some seconds, and {directory} has "
                f"{free_bytes >> 20} MiB free; free some, or give another directory"
            )
        generator = np.random.default_rng(0)
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - the caller closes it
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(file)
            for _ in range(file_bytes // read_bytes):
                file.write(generator.bytes(read_bytes))
            file.flush()
            os.fsync(file.fileno())
            on_failure.pop_all()
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}); give another directory, or a model directory"
        ) from error
    _drop_cached(file.fileno(), 0, file_bytes)
    return file


def measure_drive(reader: DriveReader, seconds: float = 1.0) -> dict[int, list[float]]:
    """Bytes per second in each round, by the number of reads in flight; `seconds` each, all rounds together."""
    part = seconds / NUM_ROUNDS
    reader.rate(max(DEPTHS), 0.0)  # the buffers get their memory
    return in_turn({depth: functools.partial(reader.rate, depth, part) for depth in DEPTHS}, NUM_ROUNDS, warm_up=False)


def _make_direct(descriptors: Sequence[int]) -> bool:
    """Sets the files to direct reads; False, and none is set, where the system or the file system has none."""
    if not _DIRECT:
        return False
    try:
        for fd in descriptors:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
            _read_whole(fd, mmap.mmap(-1, RECORD_ALIGNMENT), 0)
    except OSError:
        for fd in descriptors:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
        return False
    return True


def _read_whole(fd: int, buffer: mmap.mmap, offset: int) -> int:
    """Fills the buffer; a read may bring less than it was asked for."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        num_bytes = os.preadv(fd, [view[done:]], offset + done)
        if num_bytes == 0:
            raise CheckpointError(
                f"a file ends at byte {offset + done}, before a read is full; convert the model again"
            )
        done += num_bytes
    return done


def _drop_cached(fd: int, offset: int, num_bytes: int) -> None:
    """Asks the system to forget the pages of a range, where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
