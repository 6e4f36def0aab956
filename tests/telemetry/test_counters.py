"""Counters: identities, names, and the share of evicted experts that are asked for again soon."""

import numpy as np
import pytest

from flashmoe_jax.telemetry.counters import REFETCH_TOKENS, RefetchWatch, StageCounters


def test_bytes_are_reads_of_whole_records():
    counters = StageCounters(record_bytes=4096, accesses=10, hits=4, misses=6, demand_reads=5)
    counters.prefetch_late, counters.prefetch_useful, counters.prefetch_wasted = 1, 2, 3
    counters.prefetch_cancelled = 7  # never read
    counters.check_identities()
    assert counters.num_reads == 11
    assert counters.to_json()["read_bytes"] == 11 * 4096


@pytest.mark.parametrize("change", [{"hits": 5}, {"misses": 5}, {"demand_reads": 5}])
def test_broken_identities_are_noticed(change: dict[str, int]):
    values = {"accesses": 10, "hits": 4, "misses": 6, "demand_reads": 6} | change
    with pytest.raises(AssertionError):
        StageCounters(record_bytes=1, **values).check_identities()


def test_public_names():
    assert list(StageCounters(record_bytes=1).to_json()) == [
        *("accesses", "hits", "misses", "demand_reads", "host_hits", "prefetch_reads", "read_bytes", "stall_ms"),
        *("shares", "evictions", "refetch_5"),
    ]
    assert StageCounters(record_bytes=1).to_json()["prefetch_reads"] == {
        "useful": 0,
        "late": 0,
        "wasted": 0,
        "cancelled": 0,
    }


def test_shares_of_nothing_are_none():
    counters = StageCounters(record_bytes=1)
    assert counters.hit_rate is None
    assert counters.to_json()["refetch_5"] is None


class Watched:
    """A watch over one layer, with the counters of both stages."""

    def __init__(self):
        self.prefill, self.decode = StageCounters(record_bytes=1), StageCounters(record_bytes=1)
        self.watch = RefetchWatch(1, 6, (self.prefill, self.decode))

    def refetches(self) -> tuple[int, int]:
        return self.prefill.refetches, self.decode.refetches


def test_refetches_within_five_tokens_count():
    w = Watched()
    w.watch.evicted(0, [0, 1], 10, w.decode)
    w.watch.evicted(0, [2], 11, w.decode)
    w.watch.missed(0, [3, 0], 10 + REFETCH_TOKENS)  # 3 never left
    w.watch.missed(0, [1, 2], 11 + REFETCH_TOKENS)  # 1 left six tokens ago
    assert w.refetches() == (0, 2)
    assert w.decode.evictions == 3
    assert w.decode.to_json()["refetch_5"] == pytest.approx(2 / 3)


def test_each_eviction_counts_once():
    w = Watched()
    w.watch.evicted(0, [4], 0, w.decode)
    w.watch.missed(0, [4], 1)
    w.watch.missed(0, [4], 2)
    assert w.refetches() == (0, 1)


def test_a_refetch_belongs_to_the_stage_that_evicted():
    w = Watched()
    w.watch.evicted(0, [0], 7, w.prefill)
    w.watch.evicted(0, [1, 2], 7, w.decode)
    w.watch.missed(0, [0, 1, 2], np.array([8, 8, 7 + REFETCH_TOKENS + 1]))
    assert w.refetches() == (1, 1)
    assert w.prefill.to_json()["refetch_5"] == 1
    assert w.decode.to_json()["refetch_5"] == 0.5
