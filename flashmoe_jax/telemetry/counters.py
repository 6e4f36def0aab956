"""Counters of expert caching, kept apart for prefill and decode.

One access is one distinct (step, layer, expert). Names are those of `--json`, logs and metrics. Invariants, checked
by `check_identities`: accesses = hits + misses, misses = demand_reads + late + host_hits, and read_bytes counts every
read begun.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# An evicted expert asked for again within this many tokens counts as re-fetched.
REFETCH_TOKENS = 5
_LONG_AGO = -(10**9)


@dataclasses.dataclass
class StageCounters:
    """Sums over the steps of one stage."""

    record_bytes: int
    accesses: int = 0
    hits: int = 0
    misses: int = 0
    demand_reads: int = 0
    host_hits: int = 0  # misses that the host tier served, without a read
    prefetch_useful: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_cancelled: int = 0
    evictions: int = 0
    refetches: int = 0
    wall_s: float = 0.0  # of whole steps
    stall_s: float = 0.0  # of that, waiting for reads
    compute_s: float = 0.0  # of that, waiting for the device, or dispatching while it was busy anyway
    tokens: int = 0

    @property
    def num_reads(self) -> int:
        return self.demand_reads + self.prefetch_useful + self.prefetch_late + self.prefetch_wasted

    @property
    def read_bytes(self) -> int:
        return self.num_reads * self.record_bytes

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.accesses if self.accesses else None

    @property
    def shares(self) -> dict[str, float] | None:
        """Where the time of steps went: reads, the device, and the host's own work that neither of them hid."""
        if not self.wall_s:
            return None
        stall, compute = self.stall_s / self.wall_s, self.compute_s / self.wall_s
        return {"stall": round(stall, 4), "compute": round(compute, 4), "host": round(1 - stall - compute, 4)}

    def check_identities(self) -> None:
        """Asserts what must hold after every step."""
        assert self.accesses == self.hits + self.misses
        assert self.misses == self.demand_reads + self.prefetch_late + self.host_hits

    def to_json(self) -> dict[str, Any]:
        """The counters under their public names."""
        return {
            "accesses": self.accesses,
            "hits": self.hits,
            "misses": self.misses,
            "demand_reads": self.demand_reads,
            "host_hits": self.host_hits,
            "prefetch_reads": {
                "useful": self.prefetch_useful,
                "late": self.prefetch_late,
                "wasted": self.prefetch_wasted,
                "cancelled": self.prefetch_cancelled,
            },
            "read_bytes": self.read_bytes,
            "stall_ms": round(self.stall_s * 1e3, 3),
            "shares": self.shares,
            "evictions": self.evictions,
            "refetch_5": self.refetches / self.evictions if self.evictions else None,
        }


class RefetchWatch:
    """Notices evicted experts that are asked for again soon, and counts both in the stage that evicted them."""

    def __init__(self, num_layers: int, num_experts: int, stages: Sequence[StageCounters]):
        self._stages = tuple(stages)
        self._evicted_at = np.full((num_layers, num_experts), _LONG_AGO, np.int64)
        self._evicted_by = np.zeros((num_layers, num_experts), np.int8)

    def evicted(self, layer: int, experts: Sequence[int] | np.ndarray, token: int, stage: StageCounters) -> None:
        """Experts of a layer left at token number `token`."""
        gone = np.asarray(experts, np.int64)
        stage.evictions += len(gone)
        self._evicted_at[layer, gone] = token
        self._evicted_by[layer, gone] = next(i for i, known in enumerate(self._stages) if known is stage)

    def missed(self, layer: int, experts: Sequence[int] | np.ndarray, token: int | np.ndarray) -> None:
        """Experts of a layer, all different, were missed at token number `token` (of all, or of each)."""
        asked = np.asarray(experts, np.int64)
        is_soon = token - self._evicted_at[layer, asked] <= REFETCH_TOKENS
        evicted_by = self._evicted_by[layer, asked[is_soon]]
        for i, stage in enumerate(self._stages):
            stage.refetches += int(np.count_nonzero(evicted_by == i))
        self._evicted_at[layer, asked] = _LONG_AGO  # each eviction counts once
