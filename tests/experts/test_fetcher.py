"""The fetcher's queue with a store whose reads end when the test says so."""

import concurrent.futures
import threading
import time

import jax
import numpy as np
import pytest

from flashmoe_jax.errors import DamagedRecordError
from flashmoe_jax.experts.fetcher import Fetcher, Read
from flashmoe_jax.experts.slots import AliasedSlots

RECORD_BYTES = 4096
TIMEOUT_S = 20


class ControlledStore:
    """Begins reads when asked and ends them when told; a record is filled with its expert's number."""

    def __init__(self):
        self.begun: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.most_in_flight = 0
        self._changed = threading.Condition()
        self._open: dict[tuple[int, int], tuple[concurrent.futures.Future, np.ndarray]] = {}

    def read_into(self, layer: int, expert: int, out_words: np.ndarray) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._changed:
            self.begun.append((layer, expert))
            self.threads.add(threading.get_ident())
            self._open[layer, expert] = (future, out_words)
            self.most_in_flight = max(self.most_in_flight, len(self._open))
            self._changed.notify_all()
        return future

    def wait_until_begun(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, TIMEOUT_S)

    def end(self, layer: int, expert: int, error: Exception | None = None) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: (layer, expert) in self._open, TIMEOUT_S)
            future, out_words = self._open.pop((layer, expert))
        if error is None:
            out_words[:] = expert
            future.set_result(None)
        else:
            future.set_exception(error)

    @property
    def num_open(self) -> int:
        return len(self._open)


class InstantStore:
    """Every read is done when it was begun, in the thread that began it."""

    def read_into(self, layer: int, expert: int, out_words: np.ndarray) -> concurrent.futures.Future:
        out_words[:] = expert
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(None)
        return future


def make(store, max_in_flight: int = 2, num_rows: int = 8) -> tuple[Fetcher, AliasedSlots]:
    slots = AliasedSlots(num_rows, RECORD_BYTES // 2, np.dtype(np.uint16), jax.devices()[0])
    return Fetcher(store, slots, RECORD_BYTES, max_in_flight), slots


def rows(slots: AliasedSlots) -> list[int]:
    return np.asarray(slots.array)[:, 0].tolist()


def wait_in_thread(fetcher: Fetcher, reads: list[Read]) -> concurrent.futures.Future:
    done: concurrent.futures.Future = concurrent.futures.Future()

    def wait() -> None:
        try:
            done.set_result(fetcher.wait(reads))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return done


def test_reads_begin_in_order_and_never_too_many():
    store = ControlledStore()
    fetcher, slots = make(store)
    reads = fetcher.start(1, [(5, 0), (3, 1), (4, 2), (6, 3)])
    assert [(r.layer, r.expert, r.row) for r in reads] == [(1, 5, 0), (1, 3, 1), (1, 4, 2), (1, 6, 3)]
    store.wait_until_begun(2)
    more = fetcher.start(2, [(7, 4)])
    time.sleep(0.02)
    assert store.begun == [(1, 5), (1, 3)]
    store.end(1, 3)
    store.wait_until_begun(3)
    for key in ((1, 5), (1, 4), (1, 6), (2, 7)):
        store.end(*key)
    assert fetcher.wait(reads + more) >= 0
    assert store.begun == [(1, 5), (1, 3), (1, 4), (1, 6), (2, 7)]
    assert store.most_in_flight == 2
    assert rows(slots)[:5] == [5, 3, 4, 6, 7]
    assert (fetcher.num_reads, fetcher.read_bytes) == (5, 5 * RECORD_BYTES)
    fetcher.close()


def test_waiting_ends_with_the_last_read_and_is_timed():
    store = ControlledStore()
    fetcher, _ = make(store)
    reads = fetcher.start(0, [(1, 0), (2, 1)])
    waiting = wait_in_thread(fetcher, reads)
    store.end(0, 2)
    time.sleep(0.05)
    assert not waiting.done()
    store.end(0, 1)
    assert 0.04 < waiting.result(TIMEOUT_S) < TIMEOUT_S
    assert fetcher.wait(reads[:0]) < 1
    assert fetcher.start(0, []) == []
    fetcher.close()


def test_reads_can_be_waited_for_one_by_one():
    store = ControlledStore()
    fetcher, slots = make(store)
    first, second = fetcher.start(0, [(1, 0), (2, 1)])
    store.end(0, 1)
    fetcher.wait([first])
    assert rows(slots)[0] == 1
    assert not second.done.done()
    store.end(0, 2)
    fetcher.wait([second])
    fetcher.close()


def test_a_bad_record_is_raised_after_the_others_were_waited_for():
    store = ControlledStore()
    fetcher, _ = make(store)
    reads = fetcher.start(3, [(1, 0), (2, 1), (4, 2)])
    waiting = wait_in_thread(fetcher, reads)
    store.end(3, 1, DamagedRecordError("layer 3 expert 1 is damaged"))
    store.end(3, 2)
    store.wait_until_begun(3)
    time.sleep(0.02)
    assert not waiting.done()
    store.end(3, 4)
    with pytest.raises(DamagedRecordError, match="layer 3 expert 1"):
        waiting.result(TIMEOUT_S)
    # The queue goes on working.
    again = fetcher.start(3, [(1, 0)])
    store.end(3, 1)
    fetcher.wait(again)
    fetcher.close()


def test_a_read_that_cannot_begin_fails_its_wait_and_no_other():
    class Refusing(InstantStore):
        def read_into(self, layer, expert, out_words):
            if expert == 2:
                raise RuntimeError("the drive is gone")
            return super().read_into(layer, expert, out_words)

    fetcher, slots = make(Refusing())
    first, second, third = fetcher.start(0, [(1, 0), (2, 1), (3, 2)])
    fetcher.wait([first, third])
    with pytest.raises(RuntimeError, match="the drive is gone"):
        fetcher.wait([second])
    assert rows(slots)[:3] == [1, 0, 3]
    fetcher.close()


def test_draining_cancels_what_has_not_begun_and_waits_for_the_rest():
    store = ControlledStore()
    fetcher, _ = make(store)
    reads = fetcher.start(0, [(e, e) for e in range(5)])
    store.wait_until_begun(2)
    draining = threading.Thread(target=fetcher.drain)
    draining.start()
    time.sleep(0.02)
    assert draining.is_alive()
    store.end(0, 0)
    store.end(0, 1, DamagedRecordError("bad"))
    draining.join(TIMEOUT_S)
    assert not draining.is_alive()
    assert store.num_open == 0
    assert store.begun == [(0, 0), (0, 1)]
    # What never began cannot be taken for a record in place, and is not counted.
    assert [read.done.cancelled() for read in reads] == [False, False, True, True, True]
    assert (fetcher.num_reads, fetcher.read_bytes) == (2, 2 * RECORD_BYTES)
    fetcher.drain()
    again = fetcher.start(0, [(4, 4)])
    store.end(0, 4)
    fetcher.wait(again)
    fetcher.close()
    fetcher.close()


def test_reads_that_end_at_once_do_not_pile_up_on_the_stack():
    fetcher, slots = make(InstantStore(), max_in_flight=1, num_rows=3000)
    fetcher.wait(fetcher.start(0, [(row % 251, row) for row in range(3000)]))
    assert rows(slots) == [row % 251 for row in range(3000)]
    fetcher.close()


def test_no_read_begins_in_the_thread_that_ctrl_c_interrupts():
    store = ControlledStore()
    fetcher, _ = make(store, max_in_flight=1)
    reads = fetcher.start(0, [(1, 0), (2, 1)])
    store.end(0, 1)  # the next one begins when this ends
    store.end(0, 2)
    fetcher.wait(reads)
    assert store.threads.isdisjoint({threading.main_thread().ident})
    fetcher.close()


def test_reads_ahead_wait_until_nothing_is_demanded():
    store = ControlledStore()
    fetcher, _ = make(store, max_in_flight=4)
    demanded = fetcher.start(0, [(1, 0)])
    store.wait_until_begun(1)
    ahead = fetcher.read_ahead(1, [(5, 1), (6, 2), (7, 3)])
    more = fetcher.start(0, [(2, 4)])
    store.wait_until_begun(2)
    store.end(0, 1)
    time.sleep(0.02)
    assert store.begun == [(0, 1), (0, 2)]
    store.end(0, 2)
    # At most half of what may be in flight.
    store.wait_until_begun(4)
    time.sleep(0.02)
    assert store.begun[2:] == [(1, 5), (1, 6)]
    late = fetcher.start(0, [(3, 5)])  # does not wait for what was read ahead
    store.wait_until_begun(5)
    assert store.begun[4] == (0, 3)
    store.end(1, 5)
    time.sleep(0.02)
    assert len(store.begun) == 5
    store.end(0, 3)
    store.wait_until_begun(6)
    store.end(1, 6)
    store.end(1, 7)
    fetcher.wait([*demanded, *ahead, *more, *late])
    fetcher.close()


def test_reads_ahead_can_be_dropped_or_demanded():
    store = ControlledStore()
    fetcher, slots = make(store, max_in_flight=2)
    begun, waiting, needed = fetcher.read_ahead(0, [(1, 0), (2, 1), (3, 2)])
    store.wait_until_begun(1)
    assert fetcher.drop([begun, waiting]) == [waiting]
    assert waiting.done.cancelled()
    assert (fetcher.num_reads, fetcher.read_bytes) == (2, 2 * RECORD_BYTES)
    fetcher.demand([needed])
    store.wait_until_begun(2)  # beside the one ahead
    store.end(0, 3)
    arrived, others, waited = fetcher.wait_for_some([begun, needed])
    assert (arrived, others) == ([needed], [begun]) and waited >= 0
    fetcher.demand([begun])
    store.end(0, 1)
    fetcher.wait([begun])
    assert rows(slots)[:3] == [1, 0, 3]
    assert fetcher.busy_s > 0
    fetcher.close()


def test_waiting_for_some_raises_after_all_were_waited_for():
    store = ControlledStore()
    fetcher, _ = make(store)
    reads = fetcher.start(0, [(1, 0), (2, 1)])
    store.end(0, 1, DamagedRecordError("layer 0 expert 1 is damaged"))
    waiting = concurrent.futures.ThreadPoolExecutor(1).submit(fetcher.wait_for_some, reads)
    time.sleep(0.02)
    assert not waiting.done()
    store.end(0, 2)
    with pytest.raises(DamagedRecordError):
        waiting.result(TIMEOUT_S)
    fetcher.close()
