"""Which reader a store uses: the one asked for, or the fastest here.

`auto` on a local drive reads a few records with every reader, in turns, and takes the fastest whose first record
equals the array's; of those that are as fast, the one that keeps the processor least, which has other work while reads
are under way. On other stores it is `range`: there is no local file, and the array copies more.
"""

import concurrent.futures
import logging
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from flashmoe_jax.config import ReaderName
from flashmoe_jax.experts.landing import Landing
from flashmoe_jax.experts.readers import Reader

# What the start-up measurement reads: at least a record, at most so many bytes, by each reader in each round.
ROUND_BYTES = 24 << 20
MAX_RECORDS = 4
NUM_ROUNDS = 2
# Within this factor readers are as fast: a drive's rate differs so much from one moment to the next.
AS_FAST = 1.2

_log = logging.getLogger(__name__)


def fastest_reader(
    readers: Mapping[ReaderName, Reader],
    make_landing: Callable[[int, int, np.ndarray], Landing],
    ids: Iterator[tuple[int, int]],
    record_bytes: int,
) -> ReaderName:
    """The fastest of `readers`, measured.

    Args:
        readers: `array` among them.
        make_landing: from layer, expert and memory.
        ids: layers and experts to read, without end.

    Raises:
        DamagedRecordError, CheckpointError: the array cannot be read.
    """
    num_records = max(1, min(MAX_RECORDS, ROUND_BYTES // record_bytes))
    memory = aligned_rows(num_records, record_bytes)
    first = next(ids)

    def read(reader: Reader, chosen: list[tuple[int, int]]) -> tuple[float, float]:
        """Wall and processor seconds."""
        began, processor_began = time.perf_counter(), time.process_time()
        landings = [make_landing(layer, expert, row) for (layer, expert), row in zip(chosen, memory, strict=False)]
        for landing in landings:
            reader.begin(landing)
        concurrent.futures.wait([landing.future for landing in landings])
        for landing in landings:
            landing.future.result()
        return time.perf_counter() - began, time.process_time() - processor_began

    read(readers[ReaderName.ARRAY], [first])
    expected = memory[0].copy()
    usable = [ReaderName.ARRAY]
    for name in readers:
        if name is ReaderName.ARRAY:
            continue
        try:
            read(readers[name], [first])
        except Exception as error:
            _log.warning("reader %s is not used: %s", name, error)
            continue
        if np.array_equal(memory[0], expected):
            usable.append(name)
        else:
            _log.warning("reader %s is not used: it read other bytes than the array", name)
    seconds: dict[ReaderName, list[tuple[float, float]]] = {name: [] for name in usable}
    for _ in range(NUM_ROUNDS):
        for name in usable:
            seconds[name].append(read(readers[name], [next(ids) for _ in range(num_records)]))
    wall = {name: statistics.median(s[0] for s in seconds[name]) for name in usable}
    as_fast = [name for name in usable if wall[name] <= AS_FAST * min(wall.values())]
    return min(as_fast, key=lambda name: statistics.median(s[1] for s in seconds[name]))


def aligned_rows(num_rows: int, row_bytes: int) -> np.ndarray:
    """Page-aligned memory, uint8 `[num_rows, row_bytes]`."""
    return np.frombuffer(mmap.mmap(-1, num_rows * row_bytes), np.uint8).reshape(num_rows, row_bytes)
