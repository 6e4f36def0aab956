"""Which expert sits in which slot, and which leave: pure functions over `Residency`.

Knows slots by number only; their bytes are `slots.py`'s. Invariant: `slot_of_expert` and `expert_of_slot` are inverse
to each other, and an expert needed in a step is never evicted in that step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Residency(NamedTuple):
    """Tables of all MoE layers, int32; donated and updated in place."""

    slot_of_expert: Array  # [L, E]; -1 = not resident
    expert_of_slot: Array  # [L, R]; -1 = free


class StepPlan(NamedTuple):
    """What one step of one layer does; `M` = most experts a step can miss.

    A slot number `R + i` is place i of the surplus: a missed expert for which every slot was needed, which is
    streamed and not admitted.
    """

    slot: Array  # [B, X] int32 slot of each chosen expert after the step; -1 for a sequence that takes no part
    is_hit: Array  # [B, X] bool: resident before the step
    miss_expert: Array  # [M] int32 the missed experts, best first; -1 beyond them
    miss_slot: Array  # [M] int32 where each goes
    evicted: Array  # [M] int32 the expert that left for it; -1 = none


def init_residency(num_layers: int, num_experts: int, num_slots: int) -> Residency:
    """All slots free."""
    return Residency(
        slot_of_expert=jnp.full((num_layers, num_experts), -1, jnp.int32),
        expert_of_slot=jnp.full((num_layers, num_slots), -1, jnp.int32),
    )


def plan_step(
    residency: Residency, layer: Array, expert_id_BX: Array, keep_value: Callable[[], Array]
) -> tuple[Residency, StepPlan]:
    """Looks the chosen experts up and gives every missed one a slot.

    Free slots are taken first, then those of the residents with the lowest keep value that this step does not need;
    ties go to the lower slot number. The better of the missed experts are admitted where not all can be.

    Args:
        residency: before the step.
        layer: MoE layer id, int32 scalar.
        expert_id_BX: int32 ids, -1 for a sequence that takes no part.
        keep_value: gives float32 `[E]`; called inside the branch that runs only when something is missed.

    Returns:
        The residency after the step, with every admitted expert in place, and the plan.
    """
    E, R = residency.slot_of_expert.shape[1], residency.expert_of_slot.shape[1]
    M = min(expert_id_BX.size, E)
    # Only rows go through the branch: XLA may copy whatever does.
    slot_E, expert_R = residency.slot_of_expert[layer], residency.expert_of_slot[layer]
    takes_part_BX = expert_id_BX >= 0
    index_BX = jnp.where(takes_part_BX, expert_id_BX, E)
    needed_E = jnp.zeros((E,), bool).at[index_BX.reshape(-1)].set(True, mode="drop")
    missed_E = needed_E & (slot_E < 0)

    def admit(_: None) -> tuple[Array, ...]:
        keep_E = keep_value()
        is_free_R = expert_R < 0
        occupant_R = jnp.where(is_free_R, 0, expert_R)
        value_R = jnp.where(needed_E[occupant_R], jnp.inf, keep_E[occupant_R])
        value_R = jnp.where(is_free_R, -jnp.inf, value_R)
        num_available = jnp.sum(value_R < jnp.inf)
        place_M = jnp.arange(M)
        best_first_M = lowest(jnp.where(missed_E, -keep_E, jnp.inf), M)
        is_miss_M = place_M < jnp.sum(missed_E)
        miss_expert_M = jnp.where(is_miss_M, best_first_M, -1)
        admitted_M = is_miss_M & (place_M < num_available)
        first_slots = lowest(value_R, min(M, R))
        admitted_slot_M = first_slots[jnp.minimum(place_M, len(first_slots) - 1)]
        miss_slot_M = jnp.where(admitted_M, admitted_slot_M, R + place_M - num_available).astype(jnp.int32)
        miss_slot_M = jnp.where(is_miss_M, miss_slot_M, -1)
        evicted_M = jnp.where(admitted_M, expert_R[admitted_slot_M], -1)
        # Index E (or R) is out of range: the update is dropped.
        arriving_M = jnp.where(admitted_M, miss_expert_M, E)
        new_slot_E = slot_E.at[jnp.where(evicted_M < 0, E, evicted_M)].set(-1, mode="drop")
        new_slot_E = new_slot_E.at[arriving_M].set(miss_slot_M, mode="drop")
        new_expert_R = expert_R.at[jnp.where(admitted_M, miss_slot_M, R)].set(miss_expert_M, mode="drop")
        streamed_E = new_slot_E.at[jnp.where(is_miss_M, miss_expert_M, E)].set(miss_slot_M, mode="drop")
        return new_slot_E, new_expert_R, streamed_E, miss_expert_M, miss_slot_M, evicted_M

    def nothing(_: None) -> tuple[Array, ...]:
        none_M = jnp.full((M,), -1, jnp.int32)
        return slot_E, expert_R, slot_E, none_M, none_M, none_M

    after_E, after_R, place_E, miss_expert, miss_slot, evicted = lax.cond(jnp.any(missed_E), admit, nothing, None)
    after = Residency(residency.slot_of_expert.at[layer].set(after_E), residency.expert_of_slot.at[layer].set(after_R))
    slot_BX = jnp.where(takes_part_BX, place_E[jnp.maximum(expert_id_BX, 0)], -1)
    is_hit_BX = takes_part_BX & (slot_E[jnp.maximum(expert_id_BX, 0)] >= 0)
    return after, StepPlan(slot_BX, is_hit_BX, miss_expert, miss_slot, evicted)


def fill_free_slots(residency: Residency, layer: Array, needed_E: Array, keep_E: Array) -> Residency:
    """Admits needed experts that are not resident to free slots, best first, evicting nothing (prefill's rule)."""
    E, R = residency.slot_of_expert.shape[1], residency.expert_of_slot.shape[1]
    slot_E, expert_R = residency.slot_of_expert[layer], residency.expert_of_slot[layer]
    missed_E = needed_E & (slot_E < 0)
    M = min(E, R)
    place_M = jnp.arange(M)
    best_first_M = lowest(jnp.where(missed_E, -keep_E, jnp.inf), M)
    free_first_M = lowest((expert_R >= 0).astype(jnp.float32), M)
    admitted_M = place_M < jnp.minimum(jnp.sum(missed_E), jnp.sum(expert_R < 0))
    new_slot_E = slot_E.at[jnp.where(admitted_M, best_first_M, E)].set(free_first_M, mode="drop")
    new_expert_R = expert_R.at[jnp.where(admitted_M, free_first_M, R)].set(best_first_M, mode="drop")
    return Residency(
        residency.slot_of_expert.at[layer].set(new_slot_E),
        residency.expert_of_slot.at[layer].set(new_expert_R),
    )


def lowest(key: Array, count: int) -> Array:
    """Indices of the `count` lowest of `key` `[n]`, ascending, ties by index; int32."""
    # top_k puts -0 below 0.
    return lax.top_k(-jnp.where(key == 0, 0.0, key), count)[1]


@jax.jit
def replace(residency: Residency, layer: Array, slot: Array, expert: Array) -> Residency:
    """Puts `expert` into `slot`, whoever was there leaves."""
    leaving = residency.expert_of_slot[layer, slot]
    slot_of_expert = residency.slot_of_expert.at[layer, leaving].set(-1).at[layer, expert].set(slot)
    return Residency(slot_of_expert, residency.expert_of_slot.at[layer, slot].set(expert))
