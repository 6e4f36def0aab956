"""ARC: two queues of residents, seen once and seen again, two of ghosts, and a target that the ghosts' hits move.

Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003, with a real-valued target. T1 and T2
are the residents, B1 and B2 the ghosts that left them. Step-atomic form: as in `queues.py`; where REPLACE would take a
queue whose experts are all needed in the step, it takes the other.
"""

import numpy as np

from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests

HITS, MISSES, EVICTIONS, REFETCHES = 0, 1, 2, 3
_LONG_AGO = -(10**9)
# Of one type, or the helpers are compiled once for every number.
_NOWHERE, _T1, _T2, _B1, _B2 = (np.int8(i) for i in range(5))


@kernel
def replay_arc(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    seed: int,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """ARC over one layer."""
    queue = np.zeros(num_experts, np.int8)
    turn = np.zeros(num_experts, np.int64)  # the highest of a queue was there last
    size = np.zeros(5, np.int64)  # of each queue
    is_pinned = np.zeros(num_experts, np.bool_)
    evicted_at = np.full(num_experts, _LONG_AGO, np.int64)
    target, now = 0.0, 0
    for step in range(len(requests.is_cold)):
        if requests.is_cold[step]:
            queue.fill(_NOWHERE)
            size.fill(0)
            evicted_at.fill(_LONG_AGO)
            target = 0.0
        requested = requests.ids[requests.start[step] : requests.start[step + 1]]
        num_pinned = 0
        for expert in requested:
            is_pinned[expert] = True
            if queue[expert] in (_T1, _T2):
                counts[0, HITS] += 1
                num_pinned += 1
                now += 1
                _move(expert, _T2, now, queue, turn, size)
        for expert in requested:
            was = queue[expert]
            if was in (_T1, _T2):
                continue
            counts[0, MISSES] += 1
            if requests.first_token[step] - evicted_at[expert] <= refetch_tokens:
                counts[0, REFETCHES] += 1
            evicted_at[expert] = _LONG_AGO
            if num_pinned == num_slots:
                continue
            if was == _B1:
                target = min(target + max(size[_B2] / size[_B1], 1.0), float(num_slots))
            elif was == _B2:
                target = max(target - max(size[_B1] / size[_B2], 1.0), 0.0)
            _move(expert, _NOWHERE, 0, queue, turn, size)
            if size[_T1] + size[_T2] == num_slots:
                leaves_ghost = True
                if was == _NOWHERE:
                    if size[_T1] + size[_B1] >= num_slots:
                        if size[_B1] > 0:
                            _move(_last(queue, turn, is_pinned, _B1), _NOWHERE, 0, queue, turn, size)
                        else:
                            leaves_ghost = False
                    elif size[_T1] + size[_T2] + size[_B1] + size[_B2] >= 2 * num_slots and size[_B2] > 0:
                        _move(_last(queue, turn, is_pinned, _B2), _NOWHERE, 0, queue, turn, size)
                from_t1 = size[_T2] == 0 or (
                    size[_T1] > 0 and (size[_T1] > target or (was == _B2 and size[_T1] == target))
                )
                victim = _last(queue, turn, is_pinned, _T1 if from_t1 else _T2)
                if victim < 0:
                    from_t1 = not from_t1
                    victim = _last(queue, turn, is_pinned, _T1 if from_t1 else _T2)
                now += 1
                ghosts = _B1 if from_t1 else _B2
                _move(victim, ghosts if leaves_ghost else _NOWHERE, now, queue, turn, size)
                evicted_at[victim] = requests.last_token[step]
                if len(victims):
                    victims[counts[0, EVICTIONS], 0], victims[counts[0, EVICTIONS], 1] = step, victim
                counts[0, EVICTIONS] += 1
            now += 1
            _move(expert, _T1 if was == _NOWHERE else _T2, now, queue, turn, size)
            num_pinned += 1
        for expert in requested:
            is_pinned[expert] = False


@kernel
def _move(expert: int, where: int, now: int, queue: np.ndarray, turn: np.ndarray, size: np.ndarray) -> None:
    size[queue[expert]] -= 1
    size[where] += 1
    queue[expert] = where
    turn[expert] = now


@kernel
def _last(queue: np.ndarray, turn: np.ndarray, is_pinned: np.ndarray, which: int) -> int:
    """The least recently used of a queue that may leave; -1 = none. No ghost is resident, so a pin keeps none."""
    last = -1
    for expert in range(len(queue)):
        may_leave = queue[expert] == which and (which > _T2 or not is_pinned[expert])
        if may_leave and (last < 0 or turn[expert] < turn[last]):
            last = expert
    return last
