"""The policy `shared`: one small network for the experts of every layer of every model, applied to each expert alone.

It knows no expert by name, so all that it can learn is how routing goes on in general. It sees how often an expert was
used, at several speeds, relative to the layer's mean; and, which is worth more, what followed in the past
(`recall.py`): the experts that were chosen right after sets like this step's are likely to be chosen next.

Owns the state, its update and the inputs. Invariant: as of `recall.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import used_experts
from flashmoe_jax.policy.history import SHIFTS, decayed_counts
from flashmoe_jax.policy.network import IntegerLayer, evaluate
from flashmoe_jax.policy.recall import NUM_RECALLS, NUM_SETS, recalled_counts, relative_levels, remembered

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
    return SharedState(
        counts=state.counts.at[layer].set(jnp.where(is_step, decayed_counts(counts_KE, used_E), counts_KE)),
        sets=state.sets.at[layer].set(jnp.where(is_step, remembered(sets_WE, used_E), sets_WE)),
    )


def score_shared(params: tuple[IntegerLayer, ...], state: SharedState, layer: Array) -> Array:
    """The same network for every expert of every layer."""
    return shared_keep(params, shared_inputs(state.counts[layer], state.sets[layer]))


def shared_keep(params: tuple[IntegerLayer, ...], inputs: Array) -> Array:
    """Keep values `[..., E]` of inputs `[..., E, SHARED_WIDTH]`."""
    return evaluate(params, inputs)[..., 0]


def shared_inputs(counts_KE: Array, sets_WE: Array) -> Array:
    """What `shared` sees of every expert of a layer, float32 `[E, SHARED_WIDTH]` from 0 to 255.

    Decayed counts and what is recalled, as `recall.relative_levels`.
    """
    # In whole numbers of 8 bits of fraction a layer's sum is exact.
    coarse_KE = lax.shift_right_arithmetic(counts_KE, jnp.full_like(counts_KE, 8))
    return relative_levels(jnp.concatenate([coarse_KE, recalled_counts(sets_WE)])).T
