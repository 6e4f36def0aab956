"""Reads of experts into the slot buffer: one bounded queue, asynchronous, checked before use.

Owns which reads are under way and the count of bytes; does not decide what to read or where it goes. Invariant: a row
handed to `start` is written until its read was waited for or failed, and nobody else may use it until then.
"""

import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from flashmoe_jax.experts.slots import SlotBuffer


class ReadsInto(Protocol):
    """The part of an expert store that the fetcher needs."""

    def read_into(self, layer: int, expert: int, out_words: np.ndarray) -> "concurrent.futures.Future[None]": ...


class Read(NamedTuple):
    """One expert on its way to a row; `done` completes when its bytes are in place and checked."""

    layer: int
    expert: int
    row: int
    done: "concurrent.futures.Future[None]"


class Fetcher:
    """Starts reads in order, at most `max_in_flight` at once, and waits for them."""

    def __init__(self, store: ReadsInto, slots: SlotBuffer, record_bytes: int, max_in_flight: int):
        self._store, self._slots = store, slots
        self._record_bytes, self._max_in_flight = record_bytes, max_in_flight
        self._lock = threading.Lock()
        self._queue: collections.deque[tuple[Read, np.ndarray]] = collections.deque()
        self._in_flight = 0
        self._open: set[concurrent.futures.Future[None]] = set()
        self.num_reads = 0
        self.read_bytes = 0

    def start(self, layer: int, placements: Iterable[tuple[int, int]]) -> list[Read]:
        """Begins reading experts of a layer, given as (expert, row), in this order."""
        reads = [Read(layer, expert, row, concurrent.futures.Future()) for expert, row in placements]
        # Landings are taken here, in the caller's thread: the slot buffer is not shared between threads.
        landings = [self._slots.landing(read.row) for read in reads]
        with self._lock:
            self._queue.extend(zip(reads, landings, strict=True))
            self._open.update(read.done for read in reads)
            self.num_reads += len(reads)
            self.read_bytes += len(reads) * self._record_bytes
        self._pump()
        return reads

    def wait(self, reads: Sequence[Read]) -> float:
        """Waits until the reads are in place and commits their rows.

        Returns:
            Seconds waited.

        Raises:
            CheckpointError: a record is damaged or could not be read; the other reads are waited for first.
        """
        began = time.perf_counter()
        concurrent.futures.wait([read.done for read in reads])
        waited = time.perf_counter() - began
        for read in reads:
            read.done.result()
        self._slots.commit([read.row for read in reads])
        return waited

    def drain(self) -> None:
        """Drops reads not begun and waits for the others; used when a step is abandoned."""
        with self._lock:
            dropped = [read for read, _ in self._queue]
            self._queue.clear()
            self.num_reads -= len(dropped)
            self.read_bytes -= len(dropped) * self._record_bytes
        for read in dropped:
            self._finish(read, None)
        concurrent.futures.wait(tuple(self._open))

    def _pump(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._in_flight >= self._max_in_flight:
                    return
                read, landing = self._queue.popleft()
                self._in_flight += 1
            try:
                future = self._store.read_into(read.layer, read.expert, landing)
            except BaseException as error:
                self._arrived(read, error)
                raise
            future.add_done_callback(functools.partial(self._completed, read))

    def _completed(self, read: Read, future: "concurrent.futures.Future[None]") -> None:
        self._arrived(read, future.exception())

    def _arrived(self, read: Read, error: BaseException | None) -> None:
        with self._lock:
            self._in_flight -= 1
        self._finish(read, error)
        self._pump()

    def _finish(self, read: Read, error: BaseException | None) -> None:
        with self._lock:
            self._open.discard(read.done)
        if error is None:
            read.done.set_result(None)
        else:
            read.done.set_exception(error)
