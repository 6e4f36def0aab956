"""FIFO, and LFU that forgets what it evicts.

Published per access. The step-atomic form, here and in the other files of this folder: the step's resident experts are
looked up first, then its missing ones are admitted one by one, both in ascending order of their ids, each as the
original treats one access; the step's own experts are passed over when a victim is chosen, and once nobody else is left
the others are streamed, which leaves no trace. Who leaves is noted in `victims` (step and expert, in order), where that
has rows. With one id per step nothing can be passed over, and that is the original, in libCacheSim's reading, miss for
miss.
"""

import numpy as np

from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests

HITS, MISSES, EVICTIONS, REFETCHES = 0, 1, 2, 3
_LONG_AGO = -(10**9)


def replay_fifo(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    seed: int,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """First in, first out."""
    _replay_one_queue(requests, num_experts, num_slots, refetch_tokens, False, counts, victims)


def replay_lfu_resident(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    seed: int,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """The least often used since its admission leaves first, among equals the least recently used.

    The engine's `lfu` counts on while an expert is not resident; caches of the literature forget.
    """
    _replay_one_queue(requests, num_experts, num_slots, refetch_tokens, True, counts, victims)


@kernel
def _replay_one_queue(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    by_frequency: bool,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """The lowest (uses, turn) leaves first; a hit changes them only where frequency counts."""
    is_resident, is_pinned = np.zeros(num_experts, np.bool_), np.zeros(num_experts, np.bool_)
    uses, turn = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    evicted_at = np.full(num_experts, _LONG_AGO, np.int64)
    now = num_resident = 0
    for step in range(len(requests.is_cold)):
        if requests.is_cold[step]:
            is_resident.fill(False)
            evicted_at.fill(_LONG_AGO)
            num_resident = 0
        requested = requests.ids[requests.start[step] : requests.start[step + 1]]
        num_pinned = 0  # residents that this step needs
        for expert in requested:
            is_pinned[expert] = True
            if is_resident[expert]:
                counts[0, HITS] += 1
                num_pinned += 1
                if by_frequency:
                    now += 1
                    uses[expert] += 1
                    turn[expert] = now
        for expert in requested:
            if is_resident[expert]:
                continue
            counts[0, MISSES] += 1
            if requests.first_token[step] - evicted_at[expert] <= refetch_tokens:
                counts[0, REFETCHES] += 1
            evicted_at[expert] = _LONG_AGO
            if num_pinned == num_slots:
                continue
            if num_resident == num_slots:
                victim = -1
                for other in range(num_experts):
                    if (
                        is_resident[other]
                        and not is_pinned[other]
                        and (
                            victim < 0
                            or uses[other] < uses[victim]
                            or (uses[other] == uses[victim] and turn[other] < turn[victim])
                        )
                    ):
                        victim = other
                is_resident[victim] = False
                evicted_at[victim] = requests.last_token[step]
                if len(victims):
                    victims[counts[0, EVICTIONS], 0], victims[counts[0, EVICTIONS], 1] = step, victim
                counts[0, EVICTIONS] += 1
                num_resident -= 1
            now += 1
            uses[expert], turn[expert] = 1, now
            is_resident[expert] = True
            num_resident += 1
            num_pinned += 1
        for expert in requested:
            is_pinned[expert] = False
