"""Learned policies `paper` and `shared`, and what the learned kinds have in common.

`paper` is FlashMoE's (arXiv 2601.17063): 1 / recency and frequency ÷ the largest, per layer; either a network per
expert (2 → 128 → 128 → 1) or one over the layer (2E → 64 → 64 → E), as the two readings of the paper have it. `shared`
is one network for every layer of every model, applied to each expert alone. `context`, a network per layer that sees
the whole layer, is in `context.py`. Training is in `train_policy`; files are `saved.py`'s.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import UsageState, init_usage, update_usage
from flashmoe_jax.policy.history import (
    MAX_INPUT,
    SHIFTS,
    History,
    count_levels,
    init_history,
    update_history,
)
from flashmoe_jax.policy.network import IntegerLayer, evaluate

LEARNED = ("context", "paper", "shared")
# The paper's two inputs fall off quickly with recency: they get finer steps.
PAPER_MAX_INPUT = 1023
# Decayed counts by which `shared` ranks the experts of a layer, as places in SHIFTS.
_RANKED = (1, 3, 5, 7)
SHARED_WIDTH = len(SHIFTS) + len(_RANKED) + 1

_init_shared = functools.partial(init_history, vector_size=0, inputs=frozenset())


def paper_policy(networks: tuple[tuple[IntegerLayer, ...], ...]) -> Policy:
    """FlashMoE's policy, with one network per MoE layer."""
    return Policy("paper", init_usage, update_usage, score_paper, networks, is_learned=True)


def shared_policy(network: tuple[IntegerLayer, ...], num_layers: int) -> Policy:
    """One network for all layers."""
    return Policy("shared", _init_shared, _update_shared, score_shared, (network,) * num_layers, is_learned=True)


def _update_shared(params: Any, state: History, *step: Any) -> History:
    return update_history(None, state, *step)


def paper_width(shape: str, model: PolicyShape) -> int:
    """How many inputs a network of the paper has: "expert" is one per expert, "layer" one over the layer."""
    return 2 if shape == "expert" else 2 * model.num_experts


def keep_values(kind: str, params: tuple[IntegerLayer, ...], inputs: Array) -> Array:
    """What the network of a layer makes of its inputs: keep values, float32 `[..., E]`.

    Args:
        kind: "paper" or "shared".
        params: the layer's network.
        inputs: of any number of steps: `[..., E, F]` for `shared`, `[..., 2, E]` for `paper`.
    """
    if kind == "shared":
        return evaluate(params, inputs)[..., 0]
    # The paper's network says how far away the next use is.
    if params[0].kernel.shape[1] == 2:
        return -evaluate(params, jnp.swapaxes(inputs, -1, -2))[..., 0]
    return -evaluate(params, inputs.reshape(*inputs.shape[:-2], -1))


def score_shared(params: tuple[IntegerLayer, ...], state: History, layer: Array) -> Array:
    """The same network for every expert of every layer."""
    return keep_values("shared", params, shared_inputs(state.counts[layer]))


def score_paper(params: tuple[IntegerLayer, ...], state: UsageState, layer: Array) -> Array:
    """The farthest predicted next use leaves first."""
    return keep_values("paper", params, paper_inputs(state, layer))


def shared_inputs(counts_KE: Array) -> Array:
    """What `shared` sees of every expert of a layer: its decayed counts, its ranks by some of them, and how many of the
    layer's experts a step uses on average; float32 `[E, SHARED_WIDTH]`."""
    level_KE = count_levels(counts_KE)
    num_experts = counts_KE.shape[1]
    ranked_JE = counts_KE[jnp.array(_RANKED)]
    larger_JE = jnp.sum((ranked_JE[:, None, :] > ranked_JE[:, :, None]).astype(jnp.float32), axis=2)
    rank_JE = jnp.round(larger_JE * (MAX_INPUT / num_experts))
    load_1 = jnp.sum(counts_KE[_RANKED[2]]) // num_experts
    load_1E = jnp.broadcast_to(count_levels(jnp.full((len(SHIFTS), 1), load_1))[_RANKED[2]], (1, num_experts))
    return jnp.concatenate([level_KE, rank_JE, load_1E]).T


def paper_inputs(state: UsageState, layer: Array) -> Array:
    """1 / recency (1 for the step itself) and uses ÷ the most used expert's, float32 `[2, E]` up to PAPER_MAX_INPUT."""
    age_E = (state.clock[layer] - state.last_use[layer]).astype(jnp.float32)
    uses_E = state.uses[layer]
    recency_E = jnp.round(PAPER_MAX_INPUT / (age_E + 1))
    frequency_E = jnp.round(PAPER_MAX_INPUT * (uses_E / jnp.maximum(jnp.max(uses_E), 1)))
    return jnp.stack([recency_E, frequency_E])
