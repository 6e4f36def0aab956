"""The contract of an eviction policy: three pure functions over named state.

A policy sees expert ids, router logits and hidden states, never weights, and never evicts: it says how much each
expert of a layer is worth keeping. The caller gathers the residents, masks those that must stay, and takes the lowest.
Invariant: the same functions, jitted, run in the decode step, in prefill and in replay.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

ROUTER_LOGITS, HIDDEN = "router_logits", "hidden"


class PolicyShape(NamedTuple):
    """Sizes a policy's state is built for."""

    num_layers: int  # MoE layers
    num_experts: int
    top_k: int
    hidden_size: int = 0  # of the hidden states that `update` is shown


@dataclasses.dataclass(frozen=True)
class Policy:
    """One eviction policy.

    Attributes:
        name: as the user spells it.
        init: `init(shape) -> state`, a NamedTuple of arrays whose first axis is the MoE layer.
        update: `update(layer_params, state, layer, expert_ids, router_logits, hidden) -> state` after one step of one
            layer.
            expert_ids is int32 `[B, X]`, -1 for a sequence that takes no part; a step in which nobody takes part
            changes nothing. router_logits `[B, E]` and hidden `[B, D]` may be None.
        score: `score(layer_params, state, layer) -> keep_value`, float32 `[E]`, finite; the lowest leaves first.
        params: for both, one pytree of arrays per MoE layer; () for a policy that has none. Layers are kept apart
            because XLA's CPU backend copies a layer's part of a stacked array before it multiplies with it.
        is_learned: whether `params` were trained.
        inputs: what `update` needs beside the ids, of ROUTER_LOGITS and HIDDEN.
    """

    name: str
    init: Callable[[PolicyShape], Any]
    update: Callable[[Any, Any, Array, Array, Array | None, Array | None], Any]
    score: Callable[[Any, Any, Array], Array]
    # Not part of a policy's identity: programs are shared by policies that differ in parameters alone.
    params: tuple[Any, ...] = dataclasses.field(default=(), compare=False)
    is_learned: bool = False
    inputs: frozenset[str] = frozenset()

    def layer_params(self, layer: int) -> Any:
        """What `score` takes for a layer."""
        return self.params[layer] if self.params else ()
