"""Reads of experts into the slot buffer: one bounded queue, asynchronous, checked before use.

Owns which reads are under way and their order: what a token waits for goes first, and what is read ahead begins only
while no such read is queued or under way. Does not decide what to read or where it goes. Invariant: a row handed to
`start` or `read_ahead` is written until its read was waited for, dropped or failed, and nobody else may use it until
then.
"""

import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from flashmoe_jax.experts.slots import SlotBuffer

# Reads under way together: so many bytes, as one large read saturates a drive and small ones need company.
BYTES_IN_FLIGHT = 8 << 20
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 2, 8


def reads_in_flight(record_bytes: int) -> int:
    """Reads of records of this size that are under way together."""
    return max(MIN_IN_FLIGHT, min(MAX_IN_FLIGHT, -(-BYTES_IN_FLIGHT // record_bytes)))


class ReadsInto(Protocol):
    """The part of an expert store that the fetcher needs."""

    def read_into(self, layer: int, expert: int, out_words: np.ndarray) -> "concurrent.futures.Future[None]": ...


class Read:
    """One expert on its way to a row; `done` completes when its bytes are in place and checked."""

    def __init__(self, layer: int, expert: int, row: int, landing: np.ndarray, *, is_ahead: bool):
        self.layer, self.expert, self.row = layer, expert, row
        self.landing = landing
        self.is_ahead = is_ahead  # nobody is known to need it
        self.has_begun = False
        self.done: concurrent.futures.Future[None] = concurrent.futures.Future()


class Fetcher:
    """Starts reads in order, at most `max_in_flight` at once, and waits for them."""

    def __init__(self, store: ReadsInto, slots: SlotBuffer, record_bytes: int, max_in_flight: int):
        self._store, self._slots = store, slots
        self._record_bytes, self._max_in_flight = record_bytes, max_in_flight
        self._max_ahead = max(1, max_in_flight // 2)
        self._changed = threading.Condition()
        self._demanded: collections.deque[Read] = collections.deque()
        self._ahead: collections.deque[Read] = collections.deque()
        self._in_flight = 0
        self._ahead_in_flight = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        # Reads are begun in threads that Ctrl-C does not interrupt: a read that is half begun could neither be waited
        # for nor be kept from writing its row later.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="expert-start")
        self.num_reads = 0
        self.read_bytes = 0

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one read was under way."""
        with self._changed:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._in_flight else 0.0)

    def start(self, layer: int, placements: Iterable[tuple[int, int]]) -> list[Read]:
        """Begins reading experts of a layer, given as (expert, row), in this order."""
        return self._enqueue(layer, placements, is_ahead=False)

    def read_ahead(self, layer: int, placements: Iterable[tuple[int, int]]) -> list[Read]:
        """As `start`, behind all that is demanded; begun while no demanded read is queued or under way."""
        return self._enqueue(layer, placements, is_ahead=True)

    def demand(self, reads: Sequence[Read]) -> None:
        """Reads ahead are waited for now: those not begun go to the end of the demanded."""
        with self._changed:
            for read in reads:
                if read.is_ahead and not read.has_begun:
                    self._ahead.remove(read)
                    self._demanded.append(read)
                elif read.is_ahead and not read.done.done():
                    self._ahead_in_flight -= 1
                read.is_ahead = False
        self._starter.submit(self._begin_reads)

    def drop(self, reads: Sequence[Read]) -> list[Read]:
        """Takes back reads ahead that have not begun, and returns those; the others go on."""
        with self._changed:
            dropped = [read for read in reads if not read.has_begun]
            for read in dropped:
                self._ahead.remove(read)
            self.num_reads -= len(dropped)
            self.read_bytes -= len(dropped) * self._record_bytes
        for read in dropped:
            self._slots.release(read.row)
            read.done.cancel()
        return dropped

    def forget(self, read: Read) -> None:
        """A read that has ended and is not used."""
        self._slots.release(read.row)

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
        self._commit(reads)
        return waited

    def wait_for_some(self, reads: Sequence[Read]) -> tuple[list[Read], list[Read], float]:
        """Waits until at least one of the reads is in place, and commits what is.

        Returns:
            Those in place, the others, and seconds waited.

        Raises:
            CheckpointError: as `wait`; every read is waited for first.
        """
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: any(read.done.done() for read in reads))
        arrived = [read for read in reads if read.done.done()]
        if any(read.done.exception() is not None for read in arrived):
            concurrent.futures.wait([read.done for read in reads])
        waited = time.perf_counter() - began
        self._commit(arrived)
        return arrived, [read for read in reads if read not in arrived], waited

    def drain(self) -> None:
        """Cancels reads not begun and waits for the others; used when a step is abandoned."""
        with self._changed:
            dropped = [*self._demanded, *self._ahead]
            self._demanded.clear()
            self._ahead.clear()
            self.num_reads -= len(dropped)
            self.read_bytes -= len(dropped) * self._record_bytes
            self._changed.wait_for(lambda: self._in_flight == 0)
        for read in dropped:
            read.done.cancel()

    def close(self) -> None:
        """Drains; no row is written any more. May be called twice."""
        self.drain()
        self._starter.shutdown(wait=True)

    def _enqueue(self, layer: int, placements: Iterable[tuple[int, int]], *, is_ahead: bool) -> list[Read]:
        # Landings are taken here, in the caller's thread: the slot buffer is not shared between threads.
        reads = [Read(layer, e, row, self._slots.landing(row), is_ahead=is_ahead) for e, row in placements]
        if not reads:
            return reads
        with self._changed:
            (self._ahead if is_ahead else self._demanded).extend(reads)
            self.num_reads += len(reads)
            self.read_bytes += len(reads) * self._record_bytes
        self._starter.submit(self._begin_reads)
        return reads

    def _commit(self, reads: Sequence[Read]) -> None:
        for read in reads:
            read.done.result()
        self._slots.commit([read.row for read in reads])

    def _next_read(self) -> Read | None:
        """The read to begin now, if there is one; the caller holds the lock."""
        if self._in_flight >= self._max_in_flight:
            return None
        if self._demanded:
            return self._demanded.popleft()
        is_demanded_in_flight = self._in_flight > self._ahead_in_flight
        if self._ahead and not is_demanded_in_flight and self._ahead_in_flight < self._max_ahead:
            self._ahead_in_flight += 1
            return self._ahead.popleft()
        return None

    def _begin_reads(self) -> None:
        while True:
            with self._changed:
                read = self._next_read()
                if read is None:
                    return
                read.has_begun = True
                if self._in_flight == 0:
                    self._busy_since = time.perf_counter()
                self._in_flight += 1
            try:
                future = self._store.read_into(read.layer, read.expert, read.landing)
            except Exception as error:
                self._arrived(read, error)
            else:
                future.add_done_callback(functools.partial(self._completed, read))

    def _completed(self, read: Read, future: "concurrent.futures.Future[None]") -> None:
        self._arrived(read, future.exception())

    def _arrived(self, read: Read, error: BaseException | None) -> None:
        with self._changed:
            self._in_flight -= 1
            if read.is_ahead:
                self._ahead_in_flight -= 1
            if self._in_flight == 0:
                self._busy_s += time.perf_counter() - self._busy_since
            if error is None:
                read.done.set_result(None)
            else:
                read.done.set_exception(error)
            if self._demanded or self._ahead:
                self._starter.submit(self._begin_reads)
            self._changed.notify_all()
