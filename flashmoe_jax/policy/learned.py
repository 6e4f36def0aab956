"""Learned policies: how the kinds `context`, `paper` and `shared` turn state into network inputs, and into keep values.

`context` has a network per layer that sees the whole layer: decayed counts of all experts, the sets that the layers
around it chose, and on request the router's logits and hidden states. `paper` is FlashMoE's (arXiv 2601.17063): 1 /
recency and frequency ÷ the largest, per layer; either a network per expert (2 → 128 → 128 → 1) or one over the layer
(2E → 64 → 64 → E), as the two readings of the paper have it. `shared` is one network for every layer of every model,
applied to each expert alone. Training is in `train_policy`; files are `saved.py`'s.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import UsageState, init_usage, update_usage
from flashmoe_jax.policy.history import (
    MAX_INPUT,
    SHIFTS,
    History,
    context_inputs,
    context_width,
    count_levels,
    history_functions,
    neighbour_window,
)
from flashmoe_jax.policy.network import IntegerLayer, evaluate

LEARNED = ("context", "paper", "shared")
# The paper's two inputs fall off quickly with recency: they get finer steps.
PAPER_MAX_INPUT = 1023
# Decayed counts by which `shared` ranks the experts of a layer, as places in SHIFTS.
_RANKED = (1, 3, 5, 7)
SHARED_WIDTH = len(SHIFTS) + len(_RANKED) + 1


def learned_policy(kind: str, shape: str, inputs: frozenset[str], params: tuple[Any, ...]) -> Policy:
    """A learned policy.

    Args:
        kind: one of LEARNED.
        shape: "layer" for a network over a layer, "expert" for one per expert.
        inputs: that `context` was trained with.
        params: the network of every MoE layer, as `network.to_integers` gives it.
    """
    if kind == "paper":
        return Policy(kind, init_usage, update_usage, _PAPER_SCORES[shape], params, is_learned=True)
    init, update = history_functions(inputs)
    score = score_context if kind == "context" else score_shared
    return Policy(kind, init, update, score, params, is_learned=True, inputs=inputs)


def input_width(kind: str, shape: str, model: PolicyShape, inputs: frozenset[str]) -> int:
    """How many inputs the network of a kind has, for a model."""
    if kind == "paper":
        return 2 if shape == "expert" else 2 * model.num_experts
    return SHARED_WIDTH if kind == "shared" else context_width(model, inputs)


def score_context(params: tuple[IntegerLayer, ...], state: History, layer: Array) -> Array:
    """The network over the layer gives the keep values of all experts."""
    row = History(*(a[layer] for a in state))
    return evaluate(params, context_inputs(row, neighbour_window(state.used, layer)))


def score_shared(params: tuple[IntegerLayer, ...], state: History, layer: Array) -> Array:
    """The same network for every expert."""
    return evaluate(params, shared_inputs(state.counts[layer]))[:, 0]


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


def score_paper_experts(params: tuple[IntegerLayer, ...], state: UsageState, layer: Array) -> Array:
    """The network says how far away an expert's next use is."""
    return -evaluate(params, paper_inputs(state, layer).T)[:, 0]


def score_paper_layer(params: tuple[IntegerLayer, ...], state: UsageState, layer: Array) -> Array:
    """The same, from all experts of the layer together."""
    return -evaluate(params, paper_inputs(state, layer).reshape(-1))


def paper_inputs(state: UsageState, layer: Array) -> Array:
    """1 / recency (1 for the step itself) and uses ÷ the most used expert's, float32 `[2, E]` up to PAPER_MAX_INPUT."""
    age_E = (state.clock[layer] - state.last_use[layer]).astype(jnp.float32)
    uses_E = state.uses[layer]
    recency_E = jnp.round(PAPER_MAX_INPUT / (age_E + 1))
    frequency_E = jnp.round(PAPER_MAX_INPUT * (uses_E / jnp.maximum(jnp.max(uses_E), 1)))
    return jnp.stack([recency_E, frequency_E])


_PAPER_SCORES = {"expert": score_paper_experts, "layer": score_paper_layer}
