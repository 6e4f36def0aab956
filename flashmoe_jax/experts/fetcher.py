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
        self._changed = threading.Condition()
        self._queue: collections.deque[tuple[Read, np.ndarray]] = collections.deque()
        self._in_flight = 0
        # Reads are begun in this thread alone. Ctrl-C interrupts the main thread anywhere, and a read that is half
        # begun could neither be waited for nor be kept from writing its row later.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="expert-start")
        self.num_reads = 0
        self.read_bytes = 0

    def start(self, layer: int, placements: Iterable[tuple[int, int]]) -> list[Read]:
        """Begins reading experts of a layer, given as (expert, row), in this order."""
        reads = [Read(layer, expert, row, concurrent.futures.Future()) for expert, row in placements]
        if not reads:
            return reads
        # Landings are taken here, in the caller's thread: the slot buffer is not shared between threads.
        landings = [self._slots.landing(read.row) for read in reads]
        with self._changed:
            self._queue.extend(zip(reads, landings, strict=True))
            self.num_reads += len(reads)
            self.read_bytes += len(reads) * self._record_bytes
        self._starter.submit(self._begin_reads)
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
        """Cancels reads not begun and waits for the others; used when a step is abandoned."""
        with self._changed:
            dropped = [read for read, _ in self._queue]
            self._queue.clear()
            self.num_reads -= len(dropped)
            self.read_bytes -= len(dropped) * self._record_bytes
            self._changed.wait_for(lambda: self._in_flight == 0)
        for read in dropped:
            read.done.cancel()

    def close(self) -> None:
        """Drains; no row is written any more. May be called twice."""
        self.drain()
        self._starter.shutdown(wait=True)

    def _begin_reads(self) -> None:
        while True:
            with self._changed:
                if not self._queue or self._in_flight >= self._max_in_flight:
                    return
                read, landing = self._queue.popleft()
                self._in_flight += 1
            try:
                future = self._store.read_into(read.layer, read.expert, landing)
            except Exception as error:
                self._arrived(read, error)
            else:
                future.add_done_callback(functools.partial(self._completed, read))

    def _completed(self, read: Read, future: "concurrent.futures.Future[None]") -> None:
        self._arrived(read, future.exception())

    def _arrived(self, read: Read, error: BaseException | None) -> None:
        with self._changed:
            self._in_flight -= 1
            if self._queue:
                self._starter.submit(self._begin_reads)
            self._changed.notify_all()
        if error is None:
            read.done.set_result(None)
        else:
            read.done.set_exception(error)
