"""Replay of policies that say what each expert is worth: slots, admission and victims from keep values.

Owns the compiled twin of the engine's rules: a decode step is `plan_step` of `flashmoe_jax/experts/residency.py`, a
prompt is `fill_free_slots` and the replacement at the end of `flashmoe_jax/engine/prefill.py`, and a learned policy may
be under the guard of `flashmoe_jax/engine/guard.py`. Keep values come from
elsewhere, a chunk of steps at a time; what is requested comes from `replay_steps.py`. Invariant: the twin decides as
the originals do, ties included; tests/train_policy prove it on random states and on recorded runs.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from flashmoe_jax.engine.guard import OUTSIDE
from flashmoe_jax.telemetry.counters import REFETCH_TOKENS
from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests
from train_policy.replay_steps import Steps

HITS, MISSES, EVICTIONS, REFETCHES = range(4)  # what kernels count, in this order
_LONG_AGO = -(10**9)
# What the guarded kernel keeps of a layer, in this order.
_DEBT100, _IS_FALLBACK, _STEPS, _FALLBACK_STEPS, _FALLS, _RETURNS = range(6)


class Counts(NamedTuple):
    """Sums per layer, int64 `[L]`."""

    hits: np.ndarray
    misses: np.ndarray
    evictions: np.ndarray
    refetches: np.ndarray  # of the evicted experts, those asked for again within REFETCH_TOKENS tokens

    @property
    def accesses(self) -> np.ndarray:
        return self.hits + self.misses


class GuardCounts(NamedTuple):
    """What the guard of a learned policy did in decode, int64 `[L]`."""

    steps: np.ndarray
    fallback_steps: np.ndarray
    falls: np.ndarray
    returns: np.ndarray
    shadow_reads: np.ndarray  # what `decayed` would have read


class SlotRun(NamedTuple):
    """A replay of one policy with one number of slots per layer."""

    decode: Counts
    prefill: Counts
    expert_of_slot: np.ndarray | None = None  # [L, R] int32 at the end; -1 = free
    victims: list[np.ndarray] | None = None  # per layer, [evictions, 2]: step and expert, in the order of leaving
    guard: GuardCounts | None = None
    ledgers: list[np.ndarray] | None = None  # per layer, [S, 2]: a step's reads and the shadow's; prompts have none


def split_counts(counts: np.ndarray) -> tuple[Counts, Counts]:
    """Decode's and prefill's of `[L, 2, 4]`, as kernels count."""
    decode, prefill = (Counts(*counts[:, stage].T.copy()) for stage in (0, 1))
    return decode, prefill


def thread_pool() -> ThreadPoolExecutor:
    """One thread per core this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(cores)


class _Layer:
    """What one layer's slots hold between two chunks."""

    def __init__(self, steps: Steps, layer: int, num_slots: int, log_victims: bool):
        self.slot_of_expert = np.full(steps.num_experts, -1, np.int32)
        self.expert_of_slot = np.full(num_slots, -1, np.int32)
        self.evicted_at = np.full(steps.num_experts, _LONG_AGO, np.int64)
        self.evicted_by = np.zeros(steps.num_experts, np.int64)  # stage
        self.counts = np.zeros((2, 4), np.int64)
        self.victims = np.zeros((len(steps.layers[layer].ids) if log_victims else 0, 2), np.int32)


class _GuardedLayer(_Layer):
    """The same under guard."""

    def __init__(self, steps: Steps, layer: int, num_slots: int, log_victims: bool):
        super().__init__(steps, layer, num_slots, log_victims)
        self.shadow = _Layer(steps, layer, num_slots, False)
        self.guard = np.zeros(6, np.int64)
        self.ledger = np.zeros((steps.num_steps if log_victims else 0, 2), np.int32)


def replay_slots(
    steps: Steps,
    keep_chunks: Iterable[np.ndarray],
    slots: Sequence[int],
    *,
    num_staging: int,
    log_victims: bool = False,
) -> list[SlotRun]:
    """Replays one policy for several numbers of slots, layers side by side.

    Args:
        steps: what is requested.
        keep_chunks: float32 `[n, L, E]` keep values of the next n steps, until every step has its own; or
            `[n, slots, L, E]`, for each number of slots others.
        slots: numbers of slots per layer.
        num_staging: records of the prefill ring that may replace residents.
        log_victims: whether to record who left when.

    Returns:
        One run per number of slots.
    """
    layers = [[_Layer(steps, layer, r, log_victims) for layer in range(steps.num_layers)] for r in slots]

    def advance(layer: int, first: int, last: int, keeps: Sequence[np.ndarray], at: _Layer) -> None:
        given = (steps.layers[layer], first, last, *keeps, layer, num_staging, REFETCH_TOKENS)
        _replay_layer(*given, *_tables(at))

    _drive(steps, ((chunk,) for chunk in keep_chunks), layers, advance)
    return [_finished(run, log_victims) for run in layers]


def replay_guarded(
    steps: Steps,
    keep_chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    slots: Sequence[int],
    *,
    num_staging: int,
    allowed_reads: int,
    log_victims: bool = False,
) -> list[SlotRun]:
    """Replays a learned policy under guard.

    Args:
        steps: as for `replay_slots`.
        keep_chunks: keep values of the policy and of `decayed`, pairs of what `replay_slots` takes.
        slots: as for `replay_slots`.
        num_staging: as for `replay_slots`.
        allowed_reads: the guard's allowance, window x top_k.
        log_victims: whether to record who left when, and what every step read.
    """
    layers = [[_GuardedLayer(steps, layer, r, log_victims) for layer in range(steps.num_layers)] for r in slots]

    def advance(layer: int, first: int, last: int, keeps: Sequence[np.ndarray], at: _GuardedLayer) -> None:
        given = (steps.layers[layer], first, last, *keeps, layer, num_staging, REFETCH_TOKENS)
        rules = (100 * allowed_reads, np.float32(OUTSIDE))
        _replay_guarded_layer(*given, *_tables(at), *_tables(at.shadow), *rules, at.guard, at.ledger)

    _drive(steps, keep_chunks, layers, advance)
    return [_finished_guarded(run, log_victims) for run in layers]


def _drive(
    steps: Steps,
    keep_chunks: Iterable[tuple[np.ndarray, ...]],
    layers: Sequence[Sequence[Any]],
    advance: Callable[..., None],
) -> None:
    """Calls `advance(layer, first, last, keeps, state)` for every chunk, layer and number of slots."""
    done = 0
    with thread_pool() as pool:
        for chunk in keep_chunks:
            last = done + len(chunk[0])
            keeps_of = [[_of_slots(keep, place) for keep in chunk] for place in range(len(layers))]
            tasks: list[Future] = [
                pool.submit(advance, layer, done, last, keeps, run[layer])
                for layer in range(steps.num_layers)
                for run, keeps in zip(layers, keeps_of, strict=True)
            ]
            for task in tasks:
                task.result()
            done = last
    assert done == steps.num_steps


def _of_slots(keep: np.ndarray, place: int) -> np.ndarray:
    """Keep values `[n, L, E]` for one number of slots."""
    mine = keep.view() if keep.ndim == 3 else np.ascontiguousarray(keep[:, place])
    # JAX's arrays are read-only, and a second compilation for others takes seconds.
    mine.flags.writeable = False
    return mine


def _tables(at: _Layer) -> tuple[np.ndarray, ...]:
    return at.slot_of_expert, at.expert_of_slot, at.evicted_at, at.evicted_by, at.counts, at.victims


def _finished_guarded(run: list[_GuardedLayer], log_victims: bool) -> SlotRun:
    steps, fallback_steps, falls, returns = np.stack([layer.guard for layer in run])[:, _STEPS:].T
    shadow_reads = np.array([layer.shadow.counts[0, MISSES] for layer in run])
    return _finished(run, log_victims)._replace(
        guard=GuardCounts(steps, fallback_steps, falls, returns, shadow_reads),
        ledgers=[layer.ledger for layer in run] if log_victims else None,
    )


def _finished(run: Sequence[_Layer], log_victims: bool) -> SlotRun:
    decode, prefill = split_counts(np.stack([layer.counts for layer in run]))
    victims = [layer.victims[: layer.counts[:, EVICTIONS].sum()] for layer in run] if log_victims else None
    return SlotRun(decode, prefill, np.stack([layer.expert_of_slot for layer in run]), victims)


@kernel
def _best_first(experts: np.ndarray, worth: np.ndarray) -> None:
    """Sorts ascending ids by worth, the highest first, equals by id."""
    for place in range(1, len(experts)):
        expert, back = experts[place], place
        while back > 0 and worth[experts[back - 1]] < worth[expert]:
            experts[back] = experts[back - 1]
            back -= 1
        experts[back] = expert


@kernel
def _replay_layer(
    requests: Requests,
    first: int,
    last: int,
    keep: np.ndarray,
    layer: int,
    num_staging: int,
    refetch_tokens: int,
    slot_of_expert: np.ndarray,
    expert_of_slot: np.ndarray,
    evicted_at: np.ndarray,
    evicted_by: np.ndarray,
    counts: np.ndarray,
    victims: np.ndarray,
) -> None:
    """Steps `first` to `last` of one layer; everything from `slot_of_expert` on is updated in place."""
    num_experts, num_slots = len(slot_of_expert), len(expert_of_slot)
    all_missed = np.empty(num_experts, np.int64)
    arriving, into_slot = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64)
    worth_of_slot = np.empty(num_slots, np.float32)
    num_free = int(np.count_nonzero(expert_of_slot < 0))
    num_gone = counts[0, EVICTIONS] + counts[1, EVICTIONS]
    for step in range(first, last):
        if requests.is_cold[step]:
            slot_of_expert.fill(-1)
            expert_of_slot.fill(-1)
            evicted_at.fill(_LONG_AGO)
            num_free = num_slots
        stage = 1 if requests.is_prefill[step] else 0
        requested = requests.ids[requests.start[step] : requests.start[step + 1]]
        num_missed = 0
        for place in range(requests.start[step], requests.start[step + 1]):
            expert = requests.ids[place]
            if slot_of_expert[expert] < 0:
                all_missed[num_missed] = expert
                num_missed += 1
                token = requests.first_token[step] + (requests.position[place] if len(requests.position) else 0)
                if token - evicted_at[expert] <= refetch_tokens:
                    counts[evicted_by[expert], REFETCHES] += 1
                evicted_at[expert] = _LONG_AGO
        counts[stage, HITS] += len(requested) - num_missed
        counts[stage, MISSES] += num_missed
        if num_missed == 0:
            continue
        worth = keep[step - first, layer]
        missed = all_missed[:num_missed]
        _best_first(missed, worth)
        num_admitted = num_missed if num_missed < num_free else num_free
        slot = 0
        for rank in range(num_admitted):
            while expert_of_slot[slot] >= 0:
                slot += 1
            expert_of_slot[slot] = missed[rank]
            slot_of_expert[missed[rank]] = slot
        num_free -= num_admitted
        if num_admitted == num_missed:
            continue
        candidates = missed[num_admitted:]
        for slot in range(num_slots):
            worth_of_slot[slot] = worth[expert_of_slot[slot]]
        if stage == 1:
            # Nothing is evicted to admit; of the staged, which came in the order of their ids, the last are at hand.
            num_staged = 0
            for expert in requested:
                if slot_of_expert[expert] < 0:
                    all_missed[num_staged] = expert
                    num_staged += 1
            candidates = all_missed[max(num_staged - num_staging, 0) : num_staged]
            _best_first(candidates, worth)
        else:
            # The step's own experts are never victims; when nobody else is left, what is still missed is streamed.
            for expert in requested:
                if slot_of_expert[expert] >= 0:
                    worth_of_slot[slot_of_expert[expert]] = np.inf
        num_arriving = 0
        for expert in candidates:
            victim, least = 0, worth_of_slot[0]
            for slot in range(1, num_slots):
                if worth_of_slot[slot] < least:
                    victim, least = slot, worth_of_slot[slot]
            if least == np.inf or (stage == 1 and not worth[expert] > least):
                break
            worth_of_slot[victim] = np.inf
            arriving[num_arriving], into_slot[num_arriving] = expert, victim
            num_arriving += 1
        for rank in range(num_arriving):
            leaving = expert_of_slot[into_slot[rank]]
            slot_of_expert[leaving] = -1
            evicted_at[leaving] = requests.last_token[step]
            evicted_by[leaving] = stage
            slot_of_expert[arriving[rank]] = into_slot[rank]
            expert_of_slot[into_slot[rank]] = arriving[rank]
            if len(victims):
                victims[num_gone, 0], victims[num_gone, 1] = step, leaving
            num_gone += 1
        counts[stage, EVICTIONS] += num_arriving


@kernel
def _replay_guarded_layer(
    requests: Requests,
    first: int,
    last: int,
    keep: np.ndarray,
    decayed: np.ndarray,
    layer: int,
    num_staging: int,
    refetch_tokens: int,
    slot_of_expert: np.ndarray,
    expert_of_slot: np.ndarray,
    evicted_at: np.ndarray,
    evicted_by: np.ndarray,
    counts: np.ndarray,
    victims: np.ndarray,
    shadow_slot_of_expert: np.ndarray,
    shadow_expert_of_slot: np.ndarray,
    shadow_evicted_at: np.ndarray,
    shadow_evicted_by: np.ndarray,
    shadow_counts: np.ndarray,
    shadow_victims: np.ndarray,
    allowance100: int,
    outside: float,
    guard: np.ndarray,
    ledger: np.ndarray,
) -> None:
    """`_replay_layer` for a policy under guard; `decayed` are the keep values of the shadow."""
    worth = np.empty((1, 1, len(slot_of_expert)), np.float32)
    for step in range(first, last):
        worth[0, 0] = decayed[step - first, layer]
        if not requests.is_prefill[step]:
            num_shadow_reads = -shadow_counts[0, MISSES]
            _replay_layer(
                requests,
                step,
                step + 1,
                worth,
                0,
                num_staging,
                refetch_tokens,
                shadow_slot_of_expert,
                shadow_expert_of_slot,
                shadow_evicted_at,
                shadow_evicted_by,
                shadow_counts,
                shadow_victims,
            )
            num_shadow_reads += shadow_counts[0, MISSES]
            num_reads = 0
            for place in range(requests.start[step], requests.start[step + 1]):
                if requests.is_cold[step] or slot_of_expert[requests.ids[place]] < 0:
                    num_reads += 1
            debt100 = max(guard[_DEBT100] + 100 * num_reads - 101 * num_shadow_reads, -allowance100)
            is_fallback = int(debt100 > (allowance100 // 2 if guard[_IS_FALLBACK] else allowance100))
            if requests.start[step] < requests.start[step + 1]:
                guard[_STEPS] += 1
                guard[_FALLBACK_STEPS] += is_fallback
            guard[_FALLS] += is_fallback > guard[_IS_FALLBACK]
            guard[_RETURNS] += is_fallback < guard[_IS_FALLBACK]
            guard[_DEBT100], guard[_IS_FALLBACK] = debt100, is_fallback
            if len(ledger):
                ledger[step, 0], ledger[step, 1] = num_reads, num_shadow_reads
            for expert in range(len(slot_of_expert)):
                if shadow_slot_of_expert[expert] < 0:
                    worth[0, 0, expert] -= outside
        if not guard[_IS_FALLBACK]:
            worth[0, 0] = keep[step - first, layer]
        _replay_layer(
            requests,
            step,
            step + 1,
            worth,
            0,
            num_staging,
            refetch_tokens,
            slot_of_expert,
            expert_of_slot,
            evicted_at,
            evicted_by,
            counts,
            victims,
        )
        if requests.is_prefill[step]:
            shadow_slot_of_expert[:] = slot_of_expert
            shadow_expert_of_slot[:] = expert_of_slot
