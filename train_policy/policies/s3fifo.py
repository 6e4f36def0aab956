"""S3-FIFO: a small queue that most pass through once, a main queue, and a ghost queue of those that left the small one.

Yang, Zhang, Qiu, Yue, Vigfusson, FIFO queues are all you need for cache eviction, SOSP 2023, in libCacheSim's reading:
the small queue is due for 10 % of the slots, the ghost queue remembers 90 % of their number, an expert moves from small
to main after two hits, main is a clock of two bits, and until the first eviction main takes what the small queue is too
full for. Step-atomic form: as in `queues.py`; a queue whose experts are
all needed in the step is passed over for the other. Below 20 slots, where 10 % are no two slots, libCacheSim admits
nothing; here the small queue is due for one slot at least.
"""

import numpy as np

from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests

HITS, MISSES, EVICTIONS, REFETCHES = 0, 1, 2, 3
_LONG_AGO = -(10**9)
# Of one type, or the helpers are compiled once for every number.
_NOWHERE, _SMALL, _MAIN, _GHOST = (np.int8(i) for i in range(4))
_HITS_TO_MAIN = 2
_CLOCK_MAX = 3


@kernel
def replay_s3fifo(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    seed: int,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """S3-FIFO over one layer."""
    small_size, num_ghosts = max(int(num_slots * 0.1), 1), int(num_slots * 0.9)
    has_evicted = False
    queue = np.zeros(num_experts, np.int8)
    size = np.zeros(4, np.int64)  # of each queue, and of the ghost queue
    turn, hits = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    ghost_turn = np.zeros(num_experts, np.int64)  # 0 = not in the ghost queue
    is_pinned = np.zeros(num_experts, np.bool_)
    evicted_at = np.full(num_experts, _LONG_AGO, np.int64)
    now = 0
    for step in range(len(requests.is_cold)):
        if requests.is_cold[step]:
            queue.fill(_NOWHERE)
            ghost_turn.fill(0)
            size.fill(0)
            evicted_at.fill(_LONG_AGO)
            has_evicted = False
        requested = requests.ids[requests.start[step] : requests.start[step + 1]]
        num_pinned = 0
        for expert in requested:
            is_pinned[expert] = True
            if queue[expert] != _NOWHERE:
                counts[0, HITS] += 1
                num_pinned += 1
                hits[expert] += 1
        for expert in requested:
            if queue[expert] != _NOWHERE:
                continue
            counts[0, MISSES] += 1
            if requests.first_token[step] - evicted_at[expert] <= refetch_tokens:
                counts[0, REFETCHES] += 1
            evicted_at[expert] = _LONG_AGO
            if num_pinned == num_slots:
                continue
            to_main = ghost_turn[expert] > 0
            if to_main:
                ghost_turn[expert] = 0
                size[_GHOST] -= 1
            if size[_SMALL] + size[_MAIN] == num_slots:
                has_evicted = True
                from_main = size[_MAIN] > num_slots - small_size
                now, victim = _evict(queue, size, turn, hits, ghost_turn, is_pinned, from_main, num_ghosts, now)
                evicted_at[victim] = requests.last_token[step]
                if len(victims):
                    victims[counts[0, EVICTIONS], 0], victims[counts[0, EVICTIONS], 1] = step, victim
                counts[0, EVICTIONS] += 1
            elif not has_evicted and size[_SMALL] >= small_size:
                to_main = True
            now += 1
            queue[expert] = _MAIN if to_main else _SMALL
            size[queue[expert]] += 1
            turn[expert], hits[expert] = now, 0
            num_pinned += 1
        for expert in requested:
            is_pinned[expert] = False


@kernel
def _evict(
    queue: np.ndarray,
    size: np.ndarray,
    turn: np.ndarray,
    hits: np.ndarray,
    ghost_turn: np.ndarray,
    is_pinned: np.ndarray,
    from_main: bool,
    num_ghosts: int,
    now: int,
) -> tuple[int, int]:
    """Makes one expert leave, out of main if there is one; gives the clock of turns and the expert."""
    while True:
        oldest = _oldest(queue, turn, is_pinned, _MAIN if from_main else _SMALL)
        if oldest < 0:
            from_main = not from_main
            continue
        if from_main and hits[oldest] > 0:
            now += 1
            hits[oldest] = min(hits[oldest], _CLOCK_MAX) - 1
            turn[oldest] = now
        elif not from_main and hits[oldest] >= _HITS_TO_MAIN:
            now += 1
            queue[oldest], turn[oldest], hits[oldest] = _MAIN, now, 0
            size[_SMALL] -= 1
            size[_MAIN] += 1
        else:
            break
    size[queue[oldest]] -= 1
    queue[oldest] = _NOWHERE
    if not from_main and num_ghosts > 0:
        now += 1
        ghost_turn[oldest] = now
        size[_GHOST] += 1
        if size[_GHOST] > num_ghosts:
            size[_GHOST] -= 1
            first = -1
            for expert in range(len(ghost_turn)):
                if ghost_turn[expert] > 0 and (first < 0 or ghost_turn[expert] < ghost_turn[first]):
                    first = expert
            ghost_turn[first] = 0
    return now, oldest


@kernel
def _oldest(queue: np.ndarray, turn: np.ndarray, is_pinned: np.ndarray, which: int) -> int:
    """The expert that has been in a queue for longest, of those that may leave; -1 = none."""
    oldest = -1
    for expert in range(len(queue)):
        if queue[expert] == which and not is_pinned[expert] and (oldest < 0 or turn[expert] < turn[oldest]):
            oldest = expert
    return oldest
