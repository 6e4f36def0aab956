"""Prefill: the whole prompt, layer by layer; every expert it needs is read at most once.

Per MoE layer the union of the tokens' experts is known before the first read. Resident experts are used where they
are; missing ones fill free slots, best first, and the rest streams through spare rows; nothing is evicted to admit.
When a layer is done, records that still stand in spare rows replace residents that are worth less: rows change hands.
The next layer's reads begin before its attention does, as far as its router can be guessed (`prefetch.py`).
Experts compute in the order of their ids, so that the sum over a token's experts has one order whatever was resident.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.engine.budget import GROUP_SIZES
from flashmoe_jax.engine.capture import RouterCapture
from flashmoe_jax.engine.dense import DenseWeights
from flashmoe_jax.engine.expert_memory import ExpertMemory
from flashmoe_jax.engine.prefetch import of_prompt
from flashmoe_jax.engine.steps import PrefillOutput, PrefillPlan, add_group_sums, unpack_prefill
from flashmoe_jax.experts.fetcher import Read
from flashmoe_jax.experts.residency import replace
from flashmoe_jax.models.attention import KVCache


class _TokenGroup(NamedTuple):
    """Tokens of one expert, padded to one of GROUP_SIZES."""

    token: np.ndarray  # int32; the number of tokens marks padding
    rank: np.ndarray  # int32 place of the expert among the token's choices


def prefill_prompt(
    dense: DenseWeights,
    memory: ExpertMemory,
    caches: list[KVCache],
    token_BT: np.ndarray,
    position_BT: np.ndarray,
    valid_BT: np.ndarray,
    attend_length: int,
    capture: RouterCapture | None = None,
) -> tuple[Array, np.ndarray]:
    """Runs the prompts through all layers.

    Args:
        caches: per layer; donated, and replaced in the list.
        token_BT: int32 ids, padded on the right.
        position_BT: int32; the capacity or more where padded.
        valid_BT: bool, False where padded.
        attend_length: cache positions that the tokens may look at, those of earlier turns included.
        capture: gets what the routers were given and answered, or None.

    Returns:
        Logits `[B, V]` float32 after the last valid token of each prompt, and the chosen experts `[B, T, L, X]`
        int32, -1 where padded.
    """
    began = time.perf_counter()
    config, programs, counters = memory.config, memory.programs, memory.prefill_counters
    B, T = token_BT.shape
    chosen = np.full((B, T, config.num_moe_layers, config.experts_per_token), -1, np.int32)
    prefetcher = memory.prompt_prefetcher
    if memory.prefetcher is not None:
        memory.prefetcher.settle(must=True)
    if prefetcher is not None:
        prefetcher.begin()
    x_BTD = dense.embed(token_BT)
    moe_layer = 0
    for layer, (kind, leaves) in enumerate(zip(dense.kinds, dense.layers, strict=True)):
        if not kind.is_moe:
            x_BTD, caches[layer] = programs.dense[kind](
                leaves, x_BTD, caches[layer], position_BT, attend_length=attend_length
            )
            continue
        output, caches[layer], memory.state, packed = programs.prefill[kind](
            leaves,
            x_BTD,
            caches[layer],
            position_BT,
            valid_BT,
            memory.state,
            memory.policy_params[moe_layer],
            memory.layer_ids[moe_layer],
            None if prefetcher is None else memory.next_routers[moe_layer],
            attend_length=attend_length,
        )
        if capture is not None:
            capture.add(output.router_logits_TE, output.h_TD)
        waits_since = time.perf_counter()
        plan = unpack_prefill(np.asarray(packed), B, T, config.experts_per_token, config.num_experts)
        counters.compute_s += time.perf_counter() - waits_since
        x_BTD = _run_experts(memory, moe_layer, plan, output).reshape(B, T, -1)
        chosen[:, :, moe_layer] = plan.expert_BTX
        moe_layer += 1
    memory.prompt_is_done()
    lengths_B = valid_BT.sum(axis=1)
    memory.num_tokens += int(lengths_B.max())
    counters.tokens += int(lengths_B.sum())
    counters.check_identities()
    logits = dense.logits(_at_positions(x_BTD, np.maximum(lengths_B - 1, 0)))
    waits_since = time.perf_counter()
    logits.block_until_ready()
    counters.compute_s += time.perf_counter() - waits_since
    counters.wall_s += time.perf_counter() - began
    return logits, chosen


@jax.jit
def _at_positions(x_BTD: Array, position_B: Array) -> Array:
    """`[B, D]`: one token of each sequence."""
    return jnp.take_along_axis(x_BTD, position_B[:, None, None], axis=1)[:, 0]


def _run_experts(memory: ExpertMemory, layer: int, plan: PrefillPlan, output: PrefillOutput) -> Array:
    """Computes every needed expert of a layer, in the order of their ids, and returns the residual `[T, D]`."""
    ids_TX = plan.expert_BTX.reshape(-1, plan.expert_BTX.shape[-1])
    groups = _group_tokens(ids_TX)
    needed = sorted(groups)
    missing = [e for e in needed if plan.slot_before[e] < 0]
    prefetcher, counters = memory.prompt_prefetcher, memory.prefill_counters
    early = {} if prefetcher is None else prefetcher.adopt(missing)
    memory.free_slots_taken(layer, int(np.count_nonzero((plan.slot_before < 0) & (plan.slot_after >= 0))))
    ring = _Ring(memory, layer, missing, plan.slot_after, early)
    weight_TX = np.asarray(output.weight_TX)
    # Committed to the device, as the sums that come back are: jit compiles once for each kind.
    y_TD = jnp.zeros(output.x_TD.shape, jnp.float32, device=memory.device)
    for expert in needed:
        row = ring.row_of(expert)
        done = None
        for group in groups[expert]:
            weight_G = weight_TX[np.minimum(group.token, len(weight_TX) - 1), group.rank]
            y_TD, done = memory.programs.expert_ffn_group(
                y_TD, output.h_TD, memory.slots.array, np.int32(row), group.token, weight_G
            )
        ring.computing(expert, done)
    if prefetcher is not None:
        prefetcher.demand_is_served()
    _count(memory, layer, len(needed), missing, plan.expert_BTX)
    x_TD = add_group_sums(output.x_TD, y_TD, output.dense_TD)
    # Every group adds to the sums of the one before it: when the sums are there, no row is being read, neither of
    # the ring nor of the residents, which may be overwritten now.
    waits_since = time.perf_counter()
    y_TD.block_until_ready()
    counters.compute_s += time.perf_counter() - waits_since
    _replace_lower_scored(memory, layer, plan, ring.held())
    if prefetcher is not None and layer + 1 < memory.config.num_moe_layers:
        predicted = memory.not_at_hand(layer + 1, of_prompt(plan.predicted, prefetcher.num_grades))
        # What is not among them needs a row to pass through.
        prefetcher.look_ahead(layer + 1, predicted, num_left=1)
    return x_TD


def _group_tokens(ids_TX: np.ndarray) -> dict[int, list[_TokenGroup]]:
    """Tokens per expert. Sizes follow from the routing alone, so a result never depends on what was resident."""
    num_tokens = len(ids_TX)
    flat = ids_TX.reshape(-1)
    order = np.argsort(flat, kind="stable")
    order = order[np.searchsorted(flat[order], 0) :]  # -1, padding, comes first
    token, rank = np.divmod(order, ids_TX.shape[1])
    experts, starts = np.unique(flat[order], return_index=True)
    groups: dict[int, list[_TokenGroup]] = {}
    for expert, start, end in zip(experts, starts, [*starts[1:], len(order)], strict=True):
        parts = []
        for first in range(start, end, GROUP_SIZES[-1]):
            last = min(first + GROUP_SIZES[-1], end)
            size = next(s for s in GROUP_SIZES if s >= last - first)
            # Padding counts up from num_tokens: token indices of a group are all different, and these are dropped.
            padded = np.arange(num_tokens, num_tokens + size, dtype=np.int32)
            padded[: last - first] = token[first:last]
            ranks = np.zeros(size, np.int32)
            ranks[: last - first] = rank[first:last]
            parts.append(_TokenGroup(padded, ranks))
        groups[int(expert)] = parts
    return groups


class _Ring:
    """The missing experts of one layer on their way: into free slots, or through spare rows, first computed first.

    Reads go out in the order in which the experts will compute, as far ahead as there are rows. Those that were read
    ahead come in by `early`. Which experts stand in spare rows at the end does not depend on what was read ahead.
    """

    def __init__(
        self, memory: ExpertMemory, layer: int, missing: list[int], slot_after: np.ndarray, early: dict[int, Read]
    ):
        self._memory, self._layer = memory, layer
        self._slot_after = slot_after
        self._waiting = [e for e in reversed(missing) if e not in early]  # not begun, next one last
        self._reads = dict(early)
        self._row_of_staged: dict[int, int] = {}
        self._computing: dict[int, Array] = {}  # staged expert -> ready when its row was read; in this order
        for expert, read in early.items():
            if (slot := int(slot_after[expert])) >= 0:
                memory.rows.exchange(layer, slot, read.row)
            else:
                self._row_of_staged[expert] = read.row
        self._begin_reads()

    def row_of(self, expert: int) -> int:
        """The row of an expert whose record is in place; waits for its read."""
        slot = int(self._slot_after[expert])
        if expert in self._waiting:
            self._begin_reads(until=expert)
        if expert in self._reads:
            memory = self._memory
            with jax.profiler.TraceAnnotation("wait for reads"):
                memory.prefill_counters.stall_s += memory.fetcher.wait([self._reads.pop(expert)])
        return self._memory.rows.row(self._layer, slot) if slot >= 0 else self._row_of_staged[expert]

    def computing(self, expert: int, done: Array | None) -> None:
        """The expert's computation was dispatched; `done` is ready when it no longer reads the row."""
        if expert in self._row_of_staged and done is not None:
            self._computing[expert] = done
        self._begin_reads()

    def held(self) -> dict[int, int]:
        """Experts that stand in spare rows, and those rows, which are taken; all computations are done."""
        return self._row_of_staged

    def _begin_reads(self, until: int | None = None) -> None:
        """Begins reads while rows are free; up to and with `until` also at the price of waiting for a row."""
        placements = []
        while self._waiting:
            expert = self._waiting[-1]
            slot = int(self._slot_after[expert])
            if slot >= 0:
                row = self._memory.rows.row(self._layer, slot)
            else:
                free_row = self._take_row(must=until is not None)
                if free_row is None:
                    break
                row = self._row_of_staged[expert] = free_row
            self._waiting.pop()
            tier, counters = self._memory.tier, self._memory.prefill_counters
            if tier is not None and tier.insert(self._layer, expert, row):
                counters.host_hits += 1
            else:
                counters.demand_reads += 1
                placements.append((expert, row))
            if expert == until:
                until = None
        for read in self._memory.fetcher.start(self._layer, placements):
            self._reads[read.expert] = read

    def _take_row(self, must: bool) -> int | None:
        rows, prefetcher = self._memory.rows, self._memory.prompt_prefetcher
        row = rows.take()
        if row is None and prefetcher is not None and prefetcher.is_draining:
            prefetcher.settle(must=must)
            row = rows.take()
            if prefetcher.is_draining:
                return row
        if row is not None or not self._computing:
            return row
        first = next(iter(self._computing))
        done = self._computing[first]
        if not must and not done.is_ready():  # type: ignore[attr-defined]
            return None
        done.block_until_ready()
        del self._computing[first]
        row = self._row_of_staged.pop(first)
        if self._memory.tier is not None:
            self._memory.tier.take_back(self._layer, first, row)
        return row


def _replace_lower_scored(memory: ExpertMemory, layer: int, plan: PrefillPlan, row_of_staged: dict[int, int]) -> None:
    """Lets the records that still stand in spare rows take the slots of residents that are worth less.

    The best of them meets the worst resident first; one that is not strictly better stays out. Neither rows nor slots
    are being read: the layer's computations are done.
    """
    rows = memory.rows
    last_token = memory.num_tokens + int(np.count_nonzero((plan.expert_BTX[..., 0] >= 0).any(axis=0))) - 1
    residents = sorted((float(plan.keep[e]), int(s), e) for e, s in enumerate(plan.slot_after) if s >= 0)
    best_first = sorted(row_of_staged, key=lambda e: (-float(plan.keep[e]), e))
    for i, expert in enumerate(best_first):
        if i >= len(residents) or not float(plan.keep[expert]) > residents[i][0]:
            if memory.tier is not None:
                memory.tier.take_back(layer, expert, row_of_staged[expert])
            rows.give_back(row_of_staged[expert])
            continue
        _, slot, leaving = residents[i]
        if memory.tier is not None:
            memory.tier.take_back(layer, leaving, rows.row(layer, slot))
        rows.exchange(layer, slot, row_of_staged[expert])
        residency = replace(memory.state.residency, np.int32(layer), np.int32(slot), np.int32(expert))
        memory.state = memory.state._replace(residency=residency)
        memory.refetch.evicted(layer, [leaving], last_token, memory.prefill_counters)


def _count(memory: ExpertMemory, layer: int, num_needed: int, missing: list[int], expert_BTX: np.ndarray) -> None:
    """Counts the accesses of a layer; reads and what the host tier served were counted as they came."""
    counters = memory.prefill_counters
    counters.accesses += num_needed
    # A read ahead that was in place made a hit of what the policy counts as a miss.
    counters.misses = counters.demand_reads + counters.prefetch_late + counters.host_hits
    counters.hits = counters.accesses - counters.misses
    if missing:
        # Position by position, as decode would have asked for them.
        experts, first = np.unique(expert_BTX.swapaxes(0, 1), return_index=True)
        position = first[np.searchsorted(experts, missing)] // (expert_BTX.shape[0] * expert_BTX.shape[2])
        memory.refetch.missed(layer, missing, memory.num_tokens + position)
