"""What only someone who knows the whole trace can do: MIN, MIN with a window, and MIN with bypass.

MIN (Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966) evicts the
expert whose next use is farthest away; it is optimal among policies that admit what they read. Here it is a keep value,
the negative number of steps to the next use, under the rules of all the others. MIN with bypass also may read an expert
and not keep it. A use whose expert stays until its next use is an interval, and the most hits are the most intervals of
which no more than R overlap; giving up the one that ends last whenever R + 1 overlap is optimal (Carlisle and Lloyd,
On the k-coloring of intervals, Discrete Applied Mathematics 1995; the same problem as OPTgen of Jain and Lin, Back to
the Future, ISCA 2016). Invariant: where a step's experts fit in the slots, no policy that admits everything has fewer
misses than MIN; MIN with bypass has never more than any. Where they do not fit, and where a prompt admits by the
engine's rules, MIN chooses greedily and is no bound.
"""

import numpy as np

from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests

NEVER = np.int64(2**62)
# Distances are float32 keep values; up to here they are exact.
FARTHEST = 2**24
HITS, MISSES, EVICTIONS, REFETCHES = 0, 1, 2, 3
_LONG_AGO = -(10**9)


@kernel
def next_use(requests: Requests, num_experts: int) -> np.ndarray:
    """The step in which each request's expert is asked for next, int64 like `ids`; NEVER past a cold start."""
    result = np.empty(len(requests.ids), np.int64)
    upcoming = np.full(num_experts, NEVER)
    for step in range(len(requests.start) - 2, -1, -1):
        for place in range(requests.start[step], requests.start[step + 1]):
            result[place] = upcoming[requests.ids[place]]
            upcoming[requests.ids[place]] = step
        if requests.is_cold[step]:
            upcoming.fill(NEVER)
    return result


@kernel
def write_distances(
    requests: Requests,
    next_step: np.ndarray,
    first: int,
    last: int,
    upcoming: np.ndarray,
    layer: int,
    distance: np.ndarray,
) -> None:
    """Steps from each of the steps `first` to `last` to every expert's next use.

    Args:
        requests: of one layer.
        next_step: of `next_use`.
        first: step.
        last: step after the last.
        upcoming: int64 `[E]` next use of every expert, updated in place; NEVER at the start.
        layer: where to write.
        distance: float32 `[last - first, L, E]`, written at `layer`; FARTHEST for never. What it says of an expert
            that was not asked for since the last cold start means nothing.
    """
    for step in range(first, last):
        for place in range(requests.start[step], requests.start[step + 1]):
            upcoming[requests.ids[place]] = next_step[place]
        for expert in range(len(upcoming)):
            distance[step - first, layer, expert] = min(upcoming[expert] - step, FARTHEST)


@kernel
def replay_bypass(
    requests: Requests,
    num_experts: int,
    num_slots: int,
    refetch_tokens: int,
    seed: int,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """MIN with bypass: after every step the R experts that are used soonest stay, of the residents and the step's own.

    A step's own experts need not stay, in decode and in prefill alike, so that it bounds the engine's rules too. Who
    leaves is not noted: what is read and not kept was never a resident that another might have kept.
    """
    next_step = next_use(requests, num_experts)
    upcoming = np.full(num_experts, NEVER)
    is_resident, was_resident = np.zeros(num_experts, np.bool_), np.zeros(num_experts, np.bool_)
    evicted_at = np.full(num_experts, _LONG_AGO, np.int64)
    evicted_by = np.zeros(num_experts, np.int64)
    num_resident = 0
    for step in range(len(requests.is_cold)):
        if requests.is_cold[step]:
            is_resident.fill(False)
            evicted_at.fill(_LONG_AGO)
            num_resident = 0
        stage = 1 if requests.is_prefill[step] else 0
        for expert in range(num_experts):
            was_resident[expert] = is_resident[expert]
        for place in range(requests.start[step], requests.start[step + 1]):
            expert = requests.ids[place]
            upcoming[expert] = next_step[place]
            if is_resident[expert]:
                counts[stage, HITS] += 1
                continue
            counts[stage, MISSES] += 1
            token = requests.first_token[step] + (requests.position[place] if len(requests.position) else 0)
            if token - evicted_at[expert] <= refetch_tokens:
                counts[evicted_by[expert], REFETCHES] += 1
            evicted_at[expert] = _LONG_AGO
            is_resident[expert] = True
            num_resident += 1
        while num_resident > num_slots:
            # Of those that are never used again, one that was not resident goes first: that is no eviction.
            last = -1
            for expert in range(num_experts):
                if is_resident[expert] and (
                    last < 0
                    or upcoming[expert] > upcoming[last]
                    or (upcoming[expert] == upcoming[last] and was_resident[last] and not was_resident[expert])
                ):
                    last = expert
            is_resident[last] = False
            num_resident -= 1
            if was_resident[last]:
                counts[stage, EVICTIONS] += 1
                evicted_at[last] = requests.last_token[step]
                evicted_by[last] = stage
