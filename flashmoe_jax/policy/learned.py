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


def learned_policy(kind: str, inputs: frozenset[str], params: tuple[Any, ...]) -> Policy:
    """A learned policy.

    Args:
        kind: one of LEARNED.
        inputs: that `context` was trained with.
        params: the network of every MoE layer, as `network.to_integers` gives it.
    """
    if kind == "paper":
        return Policy(kind, init_usage, update_usage, score_paper, params, is_learned=True)
    init, update = history_functions(inputs)
    score = score_context if kind == "context" else score_shared
    return Policy(kind, init, update, score, params, is_learned=True, inputs=inputs)


def input_width(kind: str, shape: str, model: PolicyShape, inputs: frozenset[str]) -> int:
    """How many inputs the network of a kind has, for a model."""
    if kind == "paper":
        return 2 if shape == "expert" else 2 * model.num_experts
    return SHARED_WIDTH if kind == "shared" else context_width(model, inputs)


def keep_values(kind: str, params: tuple[IntegerLayer, ...], inputs: Array) -> Array:
    """What the network of a layer makes of its inputs: keep values, float32 `[..., E]`.

    Args:
        kind: one of LEARNED.
        params: the layer's network.
        inputs: of any number of steps: `[..., F]` for `context`, `[..., E, F]` for `shared`, `[..., 2, E]` for `paper`.
    """
    if kind == "context":
        return evaluate(params, inputs)
    if kind == "shared":
        return evaluate(params, inputs)[..., 0]
    # The paper's network says how far away the next use is.
    if params[0].kernel.shape[1] == 2:
        return -evaluate(params, jnp.swapaxes(inputs, -1, -2))[..., 0]
    return -evaluate(params, inputs.reshape(*inputs.shape[:-2], -1))


def score_context(params: tuple[IntegerLayer, ...], state: History, layer: Array) -> Array:
    """The network over the layer gives the keep values of all experts."""
    row = History(*(a[layer] for a in state))
    return keep_values("context", params, context_inputs(row, neighbour_window(state.used, layer)))


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
