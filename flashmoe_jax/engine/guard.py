"""The guard of a learned policy: what `decayed` would have read, and the way back to it when too much was lost.

Per MoE layer a shadow, slots without records, lives through the same decode steps under `decayed`. The debt is 100 x
the reads of the engine less 101 x those of the shadow; credit is kept up to the allowance, window x top_k reads. While
the debt is within the allowance the learned policy chooses who leaves. Beyond it the layer falls back until half is
paid: it keeps whoever the shadow holds, the rest by `decayed`. After a prompt, which admits by a rule of its own, the
shadow starts again from the engine's residents.

Invariant: in each layer, after every decode step, reads <= 1.01 x the shadow's reads + slots + window x top_k. Proof:
let d <= R be how many experts the shadow holds and the engine does not; P those of a step that the shadow hits and
the engine misses, G the reverse; the step costs P - G reads more than the shadow's. If the layer is in fallback when
victims are chosen, d becomes at most d - P + G:
- The step's experts fit. Both hold them afterwards, and of what both held besides, the engine keeps all that the shadow
  keeps. The shadow gives up no more than it missed, so d grows by no more than d's own loss to P covers: d - P.
- They do not fit. Both hold some of them and no others. The engine admits the shadow's first, so it lacks at most as
  many as it holds hits that the shadow missed: G; and P is at most d.
- A shadow or an engine with free slots: then both hold the same, and d is 0.
So the steps after the last learned choice cost at most R reads more than the shadow's, and that choice was made with
its own step in the ledger, within the allowance. A prompt makes d 0, and cutting credit off only raises the debt.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flashmoe_jax.experts.residency import Residency, init_residency, plan_step
from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.heuristics import decay, used_experts

# Steps whose every choice may be a miss before a layer falls back.
WINDOW_STEPS = 64
# More than any two scores of `decayed` differ, whose counts stay below 1 / (1 - 2**(-1/16)) = 23.6.
OUTSIDE = 64.0
_DEBT100, _IS_FALLBACK = 0, 1


class GuardState(NamedTuple):
    """State of all MoE layers; donated with the rest of a step's state. Few arrays: each costs a call some time."""

    shadow: Residency
    decayed: Array  # [L, E] float32, the score of `decayed`
    ledger: Array  # [L, 2] int32: 100 * reads - 101 * the shadow's reads, cut off below; 1 in fallback, 0 else


def init_guard(shape: PolicyShape, num_slots: int) -> GuardState:
    """No debt, an empty shadow."""
    return GuardState(
        shadow=init_residency(shape.num_layers, shape.num_experts, num_slots),
        decayed=jnp.zeros((shape.num_layers, shape.num_experts), jnp.float32),
        ledger=jnp.zeros((shape.num_layers, 2), jnp.int32),
    )


def is_in_fallback(state: GuardState, layer: Array) -> Array:
    """Bool scalar: whether `decayed` chooses who leaves."""
    return state.ledger[layer, _IS_FALLBACK] > 0


def see_token(state: GuardState, layer: Array, expert_ids: Array) -> GuardState:
    """Counts one position of a prompt: int32 ids of any shape, -1 for none."""
    used_E = used_experts(expert_ids, state.decayed.shape[1])
    return state._replace(decayed=state.decayed.at[layer].set(decay(state.decayed[layer], used_E)))


def guard_step(
    state: GuardState, residency: Residency, layer: Array, expert_id_BX: Array, window_steps: int
) -> GuardState:
    """Moves the shadow one decode step on, enters both reads and decides who chooses the victims of this step.

    Args:
        state: before the step.
        residency: the engine's, before the step.
        layer: MoE layer id, int32 scalar.
        expert_id_BX: int32 ids, -1 for a sequence that takes no part.
        window_steps: static.
    """
    state = see_token(state, layer, expert_id_BX)
    worth_E = state.decayed[layer]
    shadow, plan = plan_step(state.shadow, layer, expert_id_BX, lambda: worth_E)
    needed_E = used_experts(expert_id_BX, len(worth_E))
    num_reads = jnp.sum(needed_E & (residency.slot_of_expert[layer] < 0), dtype=jnp.int32)
    num_shadow_reads = jnp.sum(plan.miss_expert >= 0, dtype=jnp.int32)
    allowance100 = 100 * window_steps * expert_id_BX.shape[1]
    before = state.ledger[layer]
    debt100 = jnp.maximum(before[_DEBT100] + 100 * num_reads - 101 * num_shadow_reads, -allowance100)
    is_fallback = debt100 > jnp.where(before[_IS_FALLBACK] > 0, allowance100 // 2, allowance100)
    row = jnp.stack([debt100, is_fallback.astype(jnp.int32)])
    return state._replace(shadow=shadow, ledger=state.ledger.at[layer].set(row))


def guarded_keep(state: GuardState, layer: Array, learned: Callable[[], Array]) -> Array:
    """Keep values `[E]` float32 for the victims of a decode step, after `guard_step`; `learned` gives the policy's."""
    worth_E, is_outside_E = state.decayed[layer], state.shadow.slot_of_expert[layer] < 0
    fallback_E = jnp.where(is_outside_E, worth_E - OUTSIDE, worth_E)
    return lax.cond(is_in_fallback(state, layer), lambda: fallback_E, learned)


def guarded_prompt_keep(state: GuardState, layer: Array, learned: Callable[[], Array]) -> Array:
    """Keep values `[E]` float32 after a prompt, whose residents the shadow takes over."""
    worth_E = state.decayed[layer]
    return lax.cond(is_in_fallback(state, layer), lambda: worth_E, learned)


@functools.partial(jax.jit, donate_argnums=0)
def start_shadow(state: GuardState, residency: Residency) -> GuardState:
    """The shadow of every layer starts from the engine's residents; `state` is donated."""
    # Copies: the two are donated side by side.
    return state._replace(shadow=jax.tree.map(jnp.copy, residency))
