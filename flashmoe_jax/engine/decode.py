"""Decode: one token per sequence through all layers, experts computed where they are and read where they are not.

Per MoE layer: one jitted step up to the routed experts; the resident ones compute at once, while the host learns from
one packed array which are missing and has them read; those compute as they arrive, and all outputs are added in rank
order. What the next layer may miss is read ahead behind them (`prefetch.py`). A step that needs more experts than
there are slots streams the surplus through spare rows. Of a layer whose experts are all resident the host looks at
nothing until the whole token is dispatched.
"""

import time

import jax
import numpy as np
from jax import Array

from flashmoe_jax.engine.capture import RouterCapture
from flashmoe_jax.engine.dense import DenseWeights
from flashmoe_jax.engine.expert_memory import ExpertMemory
from flashmoe_jax.engine.prefetch import of_tokens
from flashmoe_jax.engine.steps import DecodeOutput, DecodePlan, add_experts, unpack_decode
from flashmoe_jax.experts.fetcher import Read
from flashmoe_jax.models.attention import KVCache


def decode_token(
    dense: DenseWeights,
    memory: ExpertMemory,
    caches: list[KVCache],
    token_B: np.ndarray,
    position_B: np.ndarray,
    active_B: np.ndarray,
    capture: RouterCapture | None = None,
) -> tuple[Array, np.ndarray]:
    """Runs one decode step.

    Args:
        caches: per layer; donated, and replaced in the list.
        token_B: int32 ids.
        position_B: int32, of each token; the capacity or more where a sequence takes no part.
        active_B: bool; a sequence that takes no part asks for no expert.
        capture: gets what the routers were given and answered, or None.

    Returns:
        Logits `[B, V]` float32 and the chosen experts `[B, L, X]` int32, -1 for sequences that took no part.
    """
    began = since = time.perf_counter()
    config, programs, counters = memory.config, memory.programs, memory.decode_counters
    batch = len(token_B)
    no_outputs = memory.no_outputs(batch)
    chosen = np.full((batch, config.num_moe_layers, config.experts_per_token), -1, np.int32)
    x_BD = dense.embed(token_B)
    on_device = jax.device_put((position_B, active_B), memory.device)
    plans: list[DecodePlan | Array] = []  # of every layer; packed still where nobody has looked
    takes_part = bool(active_B.any())
    if takes_part:
        memory.regret.begin_step(memory.copy_of_residents)
    moe_layer = 0
    for layer, (kind, leaves) in enumerate(zip(dense.kinds, dense.layers, strict=True)):
        if not kind.is_moe:
            x_B1D, caches[layer] = programs.dense[kind](
                leaves, x_BD[:, None], caches[layer], position_B[:, None], attend_length=caches[layer].k.shape[1]
            )
            x_BD = x_B1D[:, 0]
            continue
        output, caches[layer], memory.state, packed = programs.decode[kind](
            leaves,
            x_BD,
            caches[layer],
            *on_device,
            memory.state,
            memory.policy_params[moe_layer],
            memory.layer_ids[moe_layer],
            memory.rows.rows_of(moe_layer),
            None if memory.prefetcher is None else memory.next_routers[moe_layer],
        )
        if capture is not None:
            capture.add(output.router_logits_BE, output.h_BD)
        # Dispatched before the host looks at the plan: resident experts compute while the missing ones are read.
        out_BXD = programs.expert_ffn(no_outputs, output.h_BD, memory.slots.array, output.row_BX, output.hit_BX)
        now = time.perf_counter()
        if not x_BD.is_ready():  # type: ignore[attr-defined]
            # The device was busy with what came before this layer: dispatching took none of the step's time.
            counters.compute_s += now - since
        since = now
        if memory.prefetcher is None and memory.holds_all(moe_layer):
            plans.append(packed)
        else:
            plan = _look(memory, packed, batch)
            since = time.perf_counter()
            # What was dispatched before this layer's step is done.
            memory.give_back_rows()
            out_BXD = _compute_missing(memory, moe_layer, plan, output, out_BXD)
            plans.append(plan)
            if len(plan.miss_expert):
                since = time.perf_counter()
        x_BD = add_experts(output.x_BD, out_BXD, output.weight_BX, output.dense_BD)
        moe_layer += 1
    memory.last_reader = x_BD
    logits = dense.logits(x_BD)
    if not x_BD.is_ready():  # type: ignore[attr-defined]
        counters.compute_s += time.perf_counter() - since
    is_fallback, num_missed = [], []
    for moe_layer, seen in enumerate(plans):
        plan = seen if isinstance(seen, DecodePlan) else _look(memory, seen, batch)
        _count(memory, moe_layer, plan)
        chosen[:, moe_layer] = plan.expert_BX
        is_fallback.append(plan.is_fallback)
        num_missed.append(len(plan.miss_expert))
    memory.num_tokens += 1
    counters.tokens += int(np.count_nonzero(active_B))
    counters.check_identities()
    if takes_part:
        memory.regret.end_step(chosen, num_missed)
        if memory.guard_watch is not None:
            memory.guard_watch.add_step(is_fallback)
    waits_since = time.perf_counter()
    logits.block_until_ready()
    counters.compute_s += time.perf_counter() - waits_since
    counters.wall_s += time.perf_counter() - began
    return logits, chosen


def _look(memory: ExpertMemory, packed: Array, batch: int) -> DecodePlan:
    """Waits for a layer's step and unpacks what it planned."""
    waits_since = time.perf_counter()
    on_host = np.asarray(packed)
    memory.decode_counters.compute_s += time.perf_counter() - waits_since
    return unpack_decode(on_host, batch, memory.config.experts_per_token, memory.config.num_experts)


def _compute_missing(memory: ExpertMemory, layer: int, plan: DecodePlan, output: DecodeOutput, out_BXD: Array) -> Array:
    """Has the missing experts of a layer read, looks ahead, and computes the missing ones as they arrive."""
    rows, prefetcher, config = memory.rows, memory.prefetcher, memory.config
    early = {} if prefetcher is None else prefetcher.adopt(plan.miss_expert)
    row_of_expert = np.zeros(config.num_experts, np.int32)
    placements: list[tuple[int, int]] = []
    surplus: list[int] = []
    in_place: list[int] = []  # by the host tier
    _feed_tier(memory, layer, plan)
    for expert, slot in zip(plan.miss_expert.tolist(), plan.miss_slot.tolist(), strict=True):
        is_admitted = slot < rows.num_slots
        if is_admitted and expert in early:
            rows.exchange(layer, slot, early[expert].row)
        if is_admitted:
            row_of_expert[expert] = rows.row(layer, slot)
        elif expert in early:
            row_of_expert[expert] = early[expert].row
            memory.rows_in_use.append((layer, expert, early[expert].row))
        else:
            surplus.append(expert)
            continue
        if expert not in early:
            row = int(row_of_expert[expert])
            if memory.tier is not None and memory.tier.insert(layer, expert, row):
                in_place.append(expert)
            else:
                placements.append((expert, row))
    waiting = [*early.values(), *memory.fetcher.start(layer, placements)]
    waiting += _start_surplus(memory, layer, surplus, row_of_expert, in_place)
    if prefetcher is not None and layer + 1 < config.num_moe_layers and not surplus:
        prefetcher.look_ahead(layer + 1, memory.not_at_hand(layer + 1, of_tokens(plan.predicted_BX)))
    num_in_place = len(in_place)
    while waiting or surplus or in_place:
        if in_place:
            out_BXD = _compute(memory, plan, output, out_BXD, in_place, row_of_expert)
            in_place = []
            continue
        if not waiting:
            # Every spare row is in use, by computations that go on or by reads ahead that nobody needs.
            out_BXD.block_until_ready()
            memory.give_back_rows()
            if prefetcher is not None:
                prefetcher.settle(must=True)
            waiting = _start_surplus(memory, layer, surplus, row_of_expert, in_place)
            num_in_place += len(in_place)
            continue
        with jax.profiler.TraceAnnotation("wait for reads"):
            arrived, waiting, waited_s = memory.fetcher.wait_for_some(waiting)
        memory.decode_counters.stall_s += waited_s
        out_BXD = _compute(memory, plan, output, out_BXD, [read.expert for read in arrived], row_of_expert)
    if prefetcher is not None:
        prefetcher.demand_is_served()
    memory.decode_counters.demand_reads += len(plan.miss_expert) - len(early) - num_in_place
    memory.decode_counters.host_hits += num_in_place
    return out_BXD


def _compute(
    memory: ExpertMemory,
    plan: DecodePlan,
    output: DecodeOutput,
    out_BXD: Array,
    experts: list[int],
    row_of_expert: np.ndarray,
) -> Array:
    """Computes missing experts whose records are in place."""
    is_in_place = np.zeros(len(row_of_expert), bool)
    is_in_place[experts] = True
    index_BX = np.maximum(plan.expert_BX, 0)
    active_BX, row_BX = is_in_place[index_BX] & (plan.expert_BX >= 0), row_of_expert[index_BX]
    # On the CPU a call whose inputs are ready is computed before it returns.
    computes_since = time.perf_counter()
    out_BXD = memory.programs.expert_ffn(out_BXD, output.h_BD, memory.slots.array, row_BX, active_BX)
    memory.decode_counters.compute_s += time.perf_counter() - computes_since
    return out_BXD


def _feed_tier(memory: ExpertMemory, layer: int, plan: DecodePlan) -> None:
    """Gives the host tier the residents that leave, before their rows are overwritten."""
    if memory.tier is None:
        return
    memory.tier.settle()
    for expert, slot in zip(plan.evicted.tolist(), plan.miss_slot.tolist(), strict=True):
        if expert >= 0:
            memory.tier.take_back(layer, expert, memory.rows.row(layer, slot))


def _start_surplus(
    memory: ExpertMemory, layer: int, surplus: list[int], row_of_expert: np.ndarray, in_place: list[int]
) -> list[Read]:
    """Begins reading surplus experts into spare rows while there are any; removes them from `surplus`.

    Those that the host tier holds are put there at once, and added to `in_place`.
    """
    placements = []
    while surplus and (row := memory.rows.take()) is not None:
        expert = surplus.pop(0)
        row_of_expert[expert] = row
        memory.rows_in_use.append((layer, expert, row))
        if memory.tier is not None and memory.tier.insert(layer, expert, row):
            in_place.append(expert)
        else:
            placements.append((expert, row))
    return memory.fetcher.start(layer, placements)


def _count(memory: ExpertMemory, layer: int, plan: DecodePlan) -> None:
    """Counts the accesses of a layer; what was read, and what came from the host tier, was counted as it came."""
    counters, num_misses = memory.decode_counters, len(plan.miss_expert)
    counters.accesses += len(set(plan.expert_BX[plan.hit_BX].tolist())) + num_misses
    # A read ahead that was in place made a hit of what the policy counts as a miss.
    counters.misses = counters.demand_reads + counters.prefetch_late + counters.host_hits
    counters.hits = counters.accesses - counters.misses
    if num_misses:
        is_first_there = (plan.evicted < 0) & (plan.miss_slot < memory.rows.num_slots)
        memory.free_slots_taken(layer, int(np.count_nonzero(is_first_there)))
        memory.refetch.missed(layer, plan.miss_expert, memory.num_tokens)
        memory.refetch.evicted(layer, plan.evicted[plan.evicted >= 0], memory.num_tokens, counters)
