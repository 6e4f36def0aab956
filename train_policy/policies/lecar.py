"""LeCaR: LRU or LFU chooses the victim, by weights that ghost hits lower.

Vietri, Rodriguez, Martinez, Lyons, Liu, Rangaswami, Zhao, Narasimhan, Driving cache replacement with ML-based LeCaR,
HotStorage 2018, in libCacheSim's reading: learning rate 0.45, discount 0.005^(1/R) per access, each expert's history is
R/2 long, an expert chosen by both leaves no history, uses are forgotten at eviction. Time counts accesses, of which a
step has as many as it has experts. Step-atomic form: as in `queues.py`. The choice is random: `seed` fixes it.
"""

import numpy as np

from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests

HITS, MISSES, EVICTIONS, REFETCHES = 0, 1, 2, 3
_LONG_AGO = -(10**9)
_LEARNING_RATE = 0.45
_NO_GHOST, _BY_LRU, _BY_LFU = 0, 1, 2


@kernel
def replay_lecar(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    seed: int,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """LeCaR over one layer."""
    np.random.seed(seed)
    discount = 0.005 ** (1.0 / num_slots)
    is_resident, is_pinned = np.zeros(num_experts, np.bool_), np.zeros(num_experts, np.bool_)
    uses, turn = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    num_ghosts = np.zeros(3, np.int64)  # of _BY_LRU and _BY_LFU
    ghost_of, left_at = np.zeros(num_experts, np.int8), np.zeros(num_experts, np.int64)
    evicted_at = np.full(num_experts, _LONG_AGO, np.int64)
    weight = np.full(3, 0.5)  # of _BY_LRU and _BY_LFU
    now = num_resident = 0
    for step in range(len(requests.is_cold)):
        if requests.is_cold[step]:
            is_resident.fill(False)
            ghost_of.fill(_NO_GHOST)
            num_ghosts.fill(0)
            evicted_at.fill(_LONG_AGO)
            weight.fill(0.5)
            num_resident = 0
        requested = requests.ids[requests.start[step] : requests.start[step + 1]]
        num_pinned = 0
        for expert in requested:
            is_pinned[expert] = True
            if is_resident[expert]:
                counts[0, HITS] += 1
                num_pinned += 1
                now += 1
                uses[expert] += 1
                turn[expert] = now
        for expert in requested:
            if is_resident[expert]:
                continue
            now += 1
            counts[0, MISSES] += 1
            if requests.first_token[step] - evicted_at[expert] <= refetch_tokens:
                counts[0, REFETCHES] += 1
            evicted_at[expert] = _LONG_AGO
            if num_pinned == num_slots:
                continue
            if ghost_of[expert] != _NO_GHOST:
                # Whoever made it leave was wrong, the more so the shorter ago.
                blamed, other = ghost_of[expert], 3 - ghost_of[expert]
                regret = discount ** float(now - left_at[expert])
                weight[blamed] = weight[blamed] * np.exp(-_LEARNING_RATE * regret) + 1e-10
                total = weight[blamed] + weight[other] + 2e-10
                weight[blamed] /= total
                weight[other] = (weight[other] + 1e-10) / total
                ghost_of[expert] = _NO_GHOST
                num_ghosts[blamed] -= 1
            if num_resident == num_slots:
                by_lru, by_lfu = -1, -1
                for other in range(num_experts):
                    if not is_resident[other] or is_pinned[other]:
                        continue
                    if by_lru < 0 or turn[other] < turn[by_lru]:
                        by_lru = other
                    if (
                        by_lfu < 0
                        or uses[other] < uses[by_lfu]
                        or (uses[other] == uses[by_lfu] and turn[other] < turn[by_lfu])
                    ):
                        by_lfu = other
                victim = by_lru
                if by_lru != by_lfu:
                    chance = int(np.random.random() * 100) / 100.0
                    chooser = _BY_LRU if chance < weight[_BY_LRU] else _BY_LFU
                    victim = by_lru if chooser == _BY_LRU else by_lfu
                    ghost_of[victim], left_at[victim] = chooser, now
                    num_ghosts[chooser] += 1
                    if num_ghosts[chooser] > num_slots // 2:
                        num_ghosts[chooser] -= 1
                        _forget_oldest(ghost_of, left_at, chooser)
                is_resident[victim] = False
                evicted_at[victim] = requests.last_token[step]
                if len(victims):
                    victims[counts[0, EVICTIONS], 0], victims[counts[0, EVICTIONS], 1] = step, victim
                counts[0, EVICTIONS] += 1
                num_resident -= 1
            uses[expert], turn[expert] = 1, now
            is_resident[expert] = True
            num_resident += 1
            num_pinned += 1
        for expert in requested:
            is_pinned[expert] = False


@kernel
def _forget_oldest(ghost_of: np.ndarray, left_at: np.ndarray, chooser: int) -> None:
    """Shortens a history by one."""
    oldest = -1
    for expert in range(len(ghost_of)):
        if ghost_of[expert] == chooser and (oldest < 0 or left_at[expert] < left_at[oldest]):
            oldest = expert
    ghost_of[oldest] = _NO_GHOST
