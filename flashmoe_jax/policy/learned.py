"""The learned policy `paper`, and what the learned kinds have in common.

`paper` is FlashMoE's (arXiv 2601.17063): 1 / recency and frequency ÷ the largest, per layer; either a network per
expert (2 → 128 → 128 → 1) or one over the layer (2E → 64 → 64 → E), as the two readings of the paper have it.
`context`, a network per layer that sees the whole layer, is in `context.py`, `shared`, one network for every layer of
every model, in `shared.py`. Training is in `train_policy`; files are `saved.py`'s.
"""

import jax.numpy as jnp
from jax import Array

from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import UsageState, init_usage, update_usage
from flashmoe_jax.policy.network import IntegerLayer, evaluate
from flashmoe_jax.policy.shared import shared_keep

LEARNED = ("context", "paper", "shared")
# The paper's two inputs fall off quickly with recency: they get finer steps.
PAPER_MAX_INPUT = 1023


def paper_policy(networks: tuple[tuple[IntegerLayer, ...], ...]) -> Policy:
    """FlashMoE's policy, with one network per MoE layer."""
    return Policy("paper", init_usage, update_usage, score_paper, networks, is_learned=True)


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
        return shared_keep(params, inputs)
    # The paper's network says how far away the next use is.
    if params[0].kernel.shape[1] == 2:
        return -evaluate(params, jnp.swapaxes(inputs, -1, -2))[..., 0]
    return -evaluate(params, inputs.reshape(*inputs.shape[:-2], -1))


def score_paper(params: tuple[IntegerLayer, ...], state: UsageState, layer: Array) -> Array:
    """The farthest predicted next use leaves first."""
    return keep_values("paper", params, paper_inputs(state, layer))


def paper_inputs(state: UsageState, layer: Array) -> Array:
    """1 / recency (1 for the step itself) and uses ÷ the most used expert's, float32 `[2, E]` up to PAPER_MAX_INPUT."""
    age_E = (state.clock[layer] - state.last_use[layer]).astype(jnp.float32)
    uses_E = state.uses[layer]
    recency_E = jnp.round(PAPER_MAX_INPUT / (age_E + 1))
    frequency_E = jnp.round(PAPER_MAX_INPUT * (uses_E / jnp.maximum(jnp.max(uses_E), 1)))
    return jnp.stack([recency_E, frequency_E])
