"""The policy `shared`: one small network for the experts of every layer of every model, applied to each expert alone.

It knows no expert by name, so all that it can learn is how routing goes on in general. It sees how often an expert was
used, at several speeds, relative to the layer's mean; and, which is worth more, what followed in the past:
the layer's latest sets are kept, those that have experts in common with the set of this step are looked up, and the
experts that were chosen right after them are likely to be chosen next. A text that repeats itself is foreseen this way
without one trained weight per expert.

Owns the state, its update and the inputs. Invariant: all inputs are whole numbers made of whole numbers, each by one
division, root or product at a time, so that they are the same in every program.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import used_experts
from flashmoe_jax.policy.history import MAX_INPUT, SHIFTS, decayed_counts
from flashmoe_jax.policy.network import IntegerLayer, evaluate

# Sets of a layer that are remembered, this step's among them.
NUM_SETS = 64
# Experts that two sets have in common, at the most: of a larger number the sums below would not be exact.
_MAX_COMMON = 170
_LATER = (2, 3, 4)  # steps after a similar one that count together
# An expert at the layer's mean has this input.
_PER_MEAN = 32
NUM_RECALLS = 3
SHARED_WIDTH = len(SHIFTS) + NUM_RECALLS


class SharedState(NamedTuple):
    """What the steps so far asked for."""

    counts: Array  # [L, K, E] int32 decayed uses, as `history.History`
    sets: Array  # [L, NUM_SETS, E] int8: 1 = chosen, the latest step first


def shared_policy(network: tuple[IntegerLayer, ...], num_layers: int) -> Policy:
    """One network for all layers."""
    return Policy("shared", init_shared, update_shared, score_shared, (network,) * num_layers, is_learned=True)


def init_shared(shape: PolicyShape) -> SharedState:
    """No step seen."""
    L, E = shape.num_layers, shape.num_experts
    return SharedState(jnp.zeros((L, len(SHIFTS), E), jnp.int32), jnp.zeros((L, NUM_SETS, E), jnp.int8))


def update_shared(
    params: Any,
    state: SharedState,
    layer: Array,
    expert_ids: Array,
    router_logits: Array | None,
    hidden: Array | None,
) -> SharedState:
    """Counts one step of one layer; see `Policy.update`."""
    del params, router_logits, hidden
    used_E = used_experts(expert_ids, state.counts.shape[2])
    is_step = jnp.any(used_E)
    counts_KE, sets_WE = state.counts[layer], state.sets[layer]
    newer_WE = jnp.concatenate([used_E[None].astype(jnp.int8), sets_WE[:-1]])
    return SharedState(
        counts=state.counts.at[layer].set(jnp.where(is_step, decayed_counts(counts_KE, used_E), counts_KE)),
        sets=state.sets.at[layer].set(jnp.where(is_step, newer_WE, sets_WE)),
    )


def score_shared(params: tuple[IntegerLayer, ...], state: SharedState, layer: Array) -> Array:
    """The same network for every expert of every layer."""
    return shared_keep(params, shared_inputs(state.counts[layer], state.sets[layer]))


def shared_keep(params: tuple[IntegerLayer, ...], inputs: Array) -> Array:
    """Keep values `[..., E]` of inputs `[..., E, SHARED_WIDTH]`."""
    return evaluate(params, inputs)[..., 0]


def shared_inputs(counts_KE: Array, sets_WE: Array) -> Array:
    """What `shared` sees of every expert of a layer, float32 `[E, SHARED_WIDTH]` from 0 to MAX_INPUT.

    Roots of decayed counts and of what is recalled, each relative to its mean over the layer's experts: so a cold
    start, a sparse and a dense model look alike.
    """
    # In whole numbers of 8 bits of fraction a layer's sum is exact.
    coarse_KE = lax.shift_right_arithmetic(counts_KE, jnp.full_like(counts_KE, 8))
    recalled_CE = recalled(sets_WE.astype(jnp.float32)).astype(jnp.int32)
    # Nor may the sum over more than 128 experts overflow, which a large batch can all choose.
    recalled_CE = recalled_CE // max(counts_KE.shape[1] // 128, 1)
    value_FE = jnp.concatenate([coarse_KE, recalled_CE])
    total_F1 = jnp.maximum(jnp.sum(value_FE, axis=1, keepdims=True), 1).astype(jnp.float32)
    ratio_FE = value_FE.astype(jnp.float32) * value_FE.shape[1] / total_F1
    return jnp.clip(jnp.round(_PER_MEAN * jnp.sqrt(ratio_FE)), 0, MAX_INPUT).T


def recalled(sets_WE: Array) -> Array:
    """What followed the sets that are like this step's.

    A set of the past weighs the square of the number of experts in common. Three sums over the past are made of the
    sets that came right after; of the same with the step before compared, too; and of those two to four steps after.

    Args:
        sets_WE: the latest first, float32 0 or 1.

    Returns:
        Weights by which each expert followed, whole numbers below 2^24, float32 `[NUM_RECALLS, E]`.
    """
    # Row i: what the set of i steps ago has in common with this one, and with the one before this.
    common_W2 = jnp.minimum(lax.dot(sets_WE, sets_WE[:2].T, precision=lax.Precision.HIGHEST), _MAX_COMMON)
    common_W = common_W2[1:, 0]
    earlier_W = jnp.concatenate([common_W2[2:, 1], jnp.zeros(1)])
    weight_W = common_W * common_W
    both_W = 2 * common_W + earlier_W
    # A set i steps ago was followed by that of i - 1 steps ago.
    later_W = sum(_moved(weight_W, steps - 1) for steps in _LATER)
    weights_CW = jnp.stack([weight_W, both_W * both_W, later_W])
    return lax.dot(weights_CW, sets_WE[:-1], precision=lax.Precision.HIGHEST)


def _moved(weight_W: Array, steps: int) -> Array:
    """Weights of the sets so many steps later; those that are yet to come have none."""
    return jnp.concatenate([weight_W[steps:], jnp.zeros(steps)])
