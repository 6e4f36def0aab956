"""Eviction heuristics: lru, lfu, lfru, decayed and static.

All but `static` share one state, `UsageState`, and differ in the score alone. An expert counts once per step however
many sequences chose it. Ties between equal scores are the caller's to break.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.policy.base import Policy, PolicyShape

# Steps after which an unused expert's decayed count has halved.
HALF_LIFE_STEPS = 16


class UsageState(NamedTuple):
    """What the steps so far asked for. `[L]` int32, `[L, E]` int32, `[L, E]` float32, `[L, E]` float32."""

    clock: Array  # steps seen
    last_use: Array  # clock of the last use; 0 = never
    uses: Array  # so far
    decayed: Array  # uses so far, each halved every HALF_LIFE_STEPS steps


def init_usage(shape: PolicyShape) -> UsageState:
    """No step seen."""
    per_expert = (shape.num_layers, shape.num_experts)
    return UsageState(
        clock=jnp.zeros((shape.num_layers,), jnp.int32),
        last_use=jnp.zeros(per_expert, jnp.int32),
        uses=jnp.zeros(per_expert, jnp.float32),
        decayed=jnp.zeros(per_expert, jnp.float32),
    )


def used_experts(expert_ids: Array, num_experts: int) -> Array:
    """Bool `[E]`: the experts named in `expert_ids` of any shape; -1 names none."""
    slots = jnp.where(expert_ids < 0, num_experts, expert_ids).reshape(-1)
    return jnp.zeros((num_experts,), bool).at[slots].set(True, mode="drop")


def update_usage(
    params: Any,
    state: UsageState,
    layer: Array,
    expert_ids: Array,
    router_logits: Array | None,
    hidden: Array | None,
) -> UsageState:
    """Counts one step of one layer."""
    del params, router_logits, hidden
    used_E = used_experts(expert_ids, state.last_use.shape[1])
    took_part = jnp.any(used_E)
    clock = state.clock[layer] + took_part.astype(jnp.int32)
    return UsageState(
        clock=state.clock.at[layer].set(clock),
        last_use=state.last_use.at[layer].set(jnp.where(used_E, clock, state.last_use[layer])),
        uses=state.uses.at[layer].add(used_E.astype(jnp.float32)),
        decayed=state.decayed.at[layer].set(decay(state.decayed[layer], used_E)),
    )


def decay(decayed_E: Array, used_E: Array) -> Array:
    """Decayed counts of a layer `[E]` after a step that used `used_E`; one that used nobody changes nothing."""
    factor = jnp.where(jnp.any(used_E), jnp.float32(0.5 ** (1.0 / HALF_LIFE_STEPS)), 1.0)
    return decayed_E * factor + used_E


def _age(state: UsageState, layer: Array) -> Array:
    """Steps since the last use, `[E]` float32; the clock for an expert never used."""
    return (state.clock[layer] - state.last_use[layer]).astype(jnp.float32)


def score_lru(params: tuple[()], state: UsageState, layer: Array) -> Array:
    """Least recently used leaves first."""
    return -_age(state, layer)


def score_lfu(params: tuple[()], state: UsageState, layer: Array) -> Array:
    """Least often used leaves first; among equals the least recently used."""
    recency = _age(state, layer) / (state.clock[layer] + 1).astype(jnp.float32)
    return state.uses[layer] - recency


def score_lfru(params: tuple[()], state: UsageState, layer: Array) -> Array:
    """Uses per step of age: frequency weighed by recency (the LFRU of llama.cpp#21609 and vLLM#37190)."""
    return state.uses[layer] / (1.0 + _age(state, layer))


def score_decayed(params: tuple[()], state: UsageState, layer: Array) -> Array:
    """Exponentially decayed frequency, half-life HALF_LIFE_STEPS."""
    return state.decayed[layer]


def score_static(params: Array, state: UsageState, layer: Array) -> Array:
    """Popularity in a recorded trace, `params` float32 `[E]` of the layer, whatever is asked for now."""
    return params


def static_policy(popularity: np.ndarray) -> Policy:
    """Popular experts stay: `popularity` `[L, E]` counts of a trace.

    Once loaded, the most popular experts never leave; one that is less popular than every resident passes through
    the slot it needs and is the first to go.
    """
    return Policy("static", init_usage, update_usage, score_static, params=tuple(jnp.asarray(popularity, jnp.float32)))


_SCORES: dict[str, Callable[[tuple[()], UsageState, Array], Array]] = {
    "lru": score_lru,
    "lfu": score_lfu,
    "lfru": score_lfru,
    "decayed": score_decayed,
}
HEURISTICS = tuple(_SCORES)


def heuristic(name: str) -> Policy:
    """The policy called `name`, one of HEURISTICS."""
    return Policy(name, init_usage, update_usage, _SCORES[name])
