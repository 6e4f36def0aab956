"""What every decision of a replayed policy was worth, prompt by prompt.

Owns the counts that only who left when can tell: misses per prompt, and how many victims MIN would have agreed with.
The residents follow from the victims, as every step admits all that it misses. A decision is good, after the
good-decision ratio of LRB (Song, Berger, Li, Lloyd, NSDI 2020) with MIN's own choice in place of its boundary: where n
experts leave at a step, a victim is good if fewer than n of the experts that might have left then are used later than
it. MIN makes good decisions only, in any of its ties. Invariant: sums over prompts are the replay's own counts.
"""

from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from flashmoe_jax.telemetry.counters import REFETCH_TOKENS
from train_policy.policies.compiled import kernel
from train_policy.policies.optimal import next_use
from train_policy.policies.requests import Requests
from train_policy.replay_slots import SlotRun, thread_pool
from train_policy.replay_steps import Steps

# Columns of what is counted.
ACCESSES, MISSES, EVICTIONS, REFETCHES, GOOD, LRU_GOOD = range(6)
NUM_COLUMNS = 6
_NEVER = np.int64(2**62)
_LONG_AGO = -(10**9)


class Auditor(NamedTuple):
    """A trace of which decisions can be judged."""

    steps: Steps  # of Mode.TOKEN
    prompt_of_step: np.ndarray  # [S] int64, 0 to N - 1
    num_prompts: int
    coming: list[np.ndarray]  # per layer: `next_use`

    @classmethod
    def of(cls, steps: Steps, prompt_of_step: np.ndarray) -> "Auditor":
        """For prompts numbered from 0."""
        coming = [next_use(requests, steps.num_experts) for requests in steps.layers]
        return cls(steps, prompt_of_step, int(prompt_of_step.max()) + 1, coming)

    def counts(self, run: SlotRun) -> np.ndarray:
        """Int64 `[L, N, NUM_COLUMNS]` of a run that logged its victims.

        An eviction, what became of it, and whether it was good count for the prompt that caused it. LRU_GOOD counts
        the victims that LRU would have chosen in the same states and that are good.
        """
        assert run.victims is not None and not self.steps.is_prefill.any()
        result = np.zeros((self.steps.num_layers, self.num_prompts, NUM_COLUMNS), np.int64)
        with thread_pool() as pool:
            tasks: list[Future] = [
                pool.submit(
                    _audit_layer,
                    self.steps.layers[layer],
                    self.coming[layer],
                    run.victims[layer],
                    self.prompt_of_step,
                    REFETCH_TOKENS,
                    self.steps.num_experts,
                    result[layer],
                )
                for layer in range(self.steps.num_layers)
            ]
            for task in tasks:
                task.result()
        assert np.array_equal(result[..., MISSES].sum(axis=1), run.decode.misses)
        assert np.array_equal(result[..., REFETCHES].sum(axis=1), run.decode.refetches)
        return result


@kernel
def _audit_layer(
    requests: Requests,
    next_step: np.ndarray,
    victims: np.ndarray,
    prompt_of_step: np.ndarray,
    refetch_tokens: int,
    num_experts: int,
    counts: np.ndarray,
) -> None:
    """Adds one layer's counts to `[N, NUM_COLUMNS]`."""
    is_resident, may_leave = np.zeros(num_experts, np.bool_), np.zeros(num_experts, np.bool_)
    upcoming, last_use = np.full(num_experts, _NEVER), np.full(num_experts, np.int64(-1))
    evicted_at = np.full(num_experts, _LONG_AGO, np.int64)
    evicted_by = np.zeros(num_experts, np.int64)  # prompt
    candidates = np.empty(num_experts, np.int64)
    gone = 0
    for step in range(len(requests.is_cold)):
        if requests.is_cold[step]:
            is_resident.fill(False)
            evicted_at.fill(_LONG_AGO)
        prompt = prompt_of_step[step]
        # Those that might leave: residents from before this step that it does not ask for.
        may_leave[:] = is_resident
        for place in range(requests.start[step], requests.start[step + 1]):
            expert = requests.ids[place]
            upcoming[expert], last_use[expert] = next_step[place], step
            counts[prompt, ACCESSES] += 1
            may_leave[expert] = False
            if not is_resident[expert]:
                counts[prompt, MISSES] += 1
                if requests.first_token[step] - evicted_at[expert] <= refetch_tokens:
                    counts[evicted_by[expert], REFETCHES] += 1
                evicted_at[expert] = _LONG_AGO
                is_resident[expert] = True
        first = gone
        while gone < len(victims) and victims[gone, 0] == step:
            gone += 1
        num_leaving = gone - first
        if num_leaving == 0:
            continue
        counts[prompt, EVICTIONS] += num_leaving
        num_candidates = 0
        for expert in range(num_experts):
            if may_leave[expert]:
                candidates[num_candidates] = expert
                num_candidates += 1
        for place in range(first, gone):
            if _is_good(victims[place, 1], num_leaving, candidates[:num_candidates], upcoming):
                counts[prompt, GOOD] += 1
        for place in range(first, gone):
            leaving = victims[place, 1]
            is_resident[leaving] = False
            evicted_at[leaving] = requests.last_token[step]
            evicted_by[leaving] = prompt
        # What LRU would have chosen of the same candidates.
        # What LRU would have chosen of the same candidates.
        for _ in range(num_leaving):
            oldest = -1
            for expert in candidates[:num_candidates]:
                if may_leave[expert] and (oldest < 0 or last_use[expert] < last_use[oldest]):
                    oldest = expert
            may_leave[oldest] = False
            if _is_good(oldest, num_leaving, candidates[:num_candidates], upcoming):
                counts[prompt, LRU_GOOD] += 1


@kernel
def _is_good(victim: int, num_leaving: int, candidates: np.ndarray, upcoming: np.ndarray) -> bool:
    """Whether fewer than `num_leaving` candidates are used later than the victim."""
    num_later = 0
    for expert in candidates:
        if upcoming[expert] > upcoming[victim]:
            num_later += 1
    return num_later < num_leaving
