"""Decode: one token per sequence through all layers, experts computed where they are and read where they are not.

Per MoE layer: one jitted step up to the routed experts; the resident ones compute at once, while the host learns from
one packed array which are missing and has them read; then those compute, and all outputs are added in rank order.
A step that needs more experts than there are slots streams the surplus through the staging ring.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.engine.capture import RouterCapture
from flashmoe_jax.engine.dense import DenseWeights
from flashmoe_jax.engine.expert_memory import ExpertMemory
from flashmoe_jax.engine.steps import DecodeOutput, DecodePlan, add_experts, unpack_decode
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
    config, programs = memory.config, memory.programs
    batch = len(token_B)
    # Committed, as the outputs that the missing experts are added to: hits and misses share one compiled program.
    no_outputs = jnp.zeros((batch, config.experts_per_token, config.hidden_size), jnp.float32, device=memory.device)
    chosen = np.full((batch, config.num_moe_layers, config.experts_per_token), -1, np.int32)
    x_BD = dense.embed(token_B)
    is_fallback: list[bool] = []
    num_missed: list[int] = []
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
            position_B,
            active_B,
            memory.state,
            memory.policy_params[moe_layer],
            np.int32(moe_layer),
        )
        if capture is not None:
            capture.add(output.router_logits_BE, output.h_BD)
        # Dispatched before the host looks at the plan: resident experts compute while the missing ones are read.
        out_BXD = programs.expert_ffn(no_outputs, output.h_BD, memory.slots.array, output.row_BX, output.hit_BX)
        plan = unpack_decode(np.asarray(packed), batch, config.experts_per_token, config.num_experts)
        _count(memory, moe_layer, plan)
        if len(plan.miss_expert):
            out_BXD = _compute_missing(memory, moe_layer, plan, output, out_BXD)
        x_BD = add_experts(output.x_BD, out_BXD, output.weight_BX, output.dense_BD)
        chosen[:, moe_layer] = plan.expert_BX
        is_fallback.append(plan.is_fallback)
        num_missed.append(len(plan.miss_expert))
        moe_layer += 1
    memory.last_reader = x_BD
    memory.num_tokens += 1
    memory.decode_counters.tokens += int(np.count_nonzero(active_B))
    memory.decode_counters.check_identities()
    if takes_part:
        memory.regret.end_step(chosen, num_missed)
        if memory.guard_watch is not None:
            memory.guard_watch.add_step(is_fallback)
    return dense.logits(x_BD), chosen


def _compute_missing(memory: ExpertMemory, layer: int, plan: DecodePlan, output: DecodeOutput, out_BXD: Array) -> Array:
    """Reads what is missing and computes it: the admitted with as much surplus as the ring holds, then the rest."""
    rows = memory.rows
    is_admitted = plan.miss_slot < rows.num_slots
    surplus_place = plan.miss_slot - rows.num_slots
    num_rounds = 1 + max(0, int(surplus_place.max(initial=0)) // rows.num_staging)
    for round_id in range(num_rounds):
        in_round = (surplus_place // rows.num_staging == round_id) & ~is_admitted
        if round_id == 0:
            in_round |= is_admitted
        placements = [
            (int(e), rows.slot_row(layer, int(s)) if s < rows.num_slots else rows.staging_row(int(s - rows.num_slots)))
            for e, s in zip(plan.miss_expert[in_round], plan.miss_slot[in_round], strict=True)
        ]
        if round_id:
            out_BXD.block_until_ready()  # it still reads the ring's rows, which are overwritten now
        memory.decode_counters.stall_s += memory.fetcher.wait(memory.fetcher.start(layer, placements))
        active = output.miss_BX
        if num_rounds > 1:
            active = jax.device_put(np.isin(plan.expert_BX, plan.miss_expert[in_round]), memory.device)
        out_BXD = memory.programs.expert_ffn(out_BXD, output.h_BD, memory.slots.array, output.row_BX, active)
    return out_BXD


def _count(memory: ExpertMemory, layer: int, plan: DecodePlan) -> None:
    counters, num_misses = memory.decode_counters, len(plan.miss_expert)
    hits = len(np.unique(plan.expert_BX[plan.hit_BX]))
    counters.accesses += hits + num_misses
    counters.hits += hits
    counters.misses += num_misses
    counters.demand_reads += num_misses
    if num_misses:
        memory.refetch.missed(layer, plan.miss_expert, memory.num_tokens)
        memory.refetch.evicted(layer, plan.evicted[plan.evicted >= 0], memory.num_tokens, counters)
