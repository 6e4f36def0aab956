"""The `context` policy: one network per layer that sees the whole layer, and through set vectors all other layers.

    h1 = relu(A seen + sets + a)     seen: decayed counts of all experts, router logits, hidden state
    h2 = relu(B h1 + b)              sets: sum of the set vectors of all layers (`history.sets_around`)
    keep = C h2 + c + v f + w relu(U f + u)      f: an expert's own counts and recall; alike for every expert

Owns the network in whole numbers and how trained floats become it. Invariant: no sum reaches `network.EXACT`, so keep
values are the same bits in every program.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.policy.base import HIDDEN, Policy, PolicyShape
from flashmoe_jax.policy.history import (
    MAX_HIDDEN,
    MAX_INPUT,
    OWN_FEATURES,
    History,
    SetVectors,
    init_history,
    own_inputs,
    own_width,
    sets_around,
    update_history,
)
from flashmoe_jax.policy.network import (
    EXACT,
    MAX_ACTIVATION,
    MAX_WEIGHT,
    IntegerLayer,
    activate,
    affine,
)

# Of the counts at several speeds those that the network over the layer sees, as places in SHIFTS: half-lives of 2.4, 22
# and 177 steps. They are highly correlated, and more of them gain nothing.
SEEN_SHIFTS = (1, 4, 7)


class ContextNetwork(NamedTuple):
    """Parameters of one layer, whole numbers in float32."""

    vectors: SetVectors
    first: IntegerLayer  # [H, seen inputs]
    second: IntegerLayer  # [H2, H]
    last: IntegerLayer  # [E, H2]
    own: Array  # [K] weight of an expert's own features in its keep value, OWN_FEATURES of them
    own_first: IntegerLayer  # [J, K] of an expert's own features
    own_last: Array  # [J] weight of these in its keep value


class TrainedContext(NamedTuple):
    """The same as trained, float32, stacked over L layers; inputs and set bits count from 0 to 1."""

    upward: np.ndarray  # [L, E, H]
    downward: np.ndarray  # [L, E, H]
    first_kernel: np.ndarray  # [L, H, seen inputs]
    first_bias: np.ndarray  # [L, H]
    second_kernel: np.ndarray  # [L, H2, H], or [1, H2, H] where all layers share it
    second_bias: np.ndarray  # [L, H2]
    last_kernel: np.ndarray  # [L, M, E, H2], M heads
    last_bias: np.ndarray  # [L, M, E]
    own: np.ndarray  # [L, M, K]
    own_kernel: np.ndarray  # [L, J, K]
    own_bias: np.ndarray  # [L, J]
    own_last: np.ndarray  # [L, M, J]
    first_peak: np.ndarray  # [L] activations beyond it are cut off, see `network.to_integers`
    second_peak: np.ndarray  # [L]
    own_peak: np.ndarray  # [L]


def context_policy(networks: tuple[ContextNetwork, ...], inputs: frozenset[str]) -> Policy:
    """The policy with one network per MoE layer."""
    init = _init(networks[0].vectors.upward.shape[1], inputs)
    return Policy("context", init, update_context, score_context, networks, is_learned=True, inputs=inputs)


@functools.lru_cache(maxsize=16)
def _init(vector_size: int, inputs: frozenset[str]) -> Any:
    # The same object for the same sizes, so that policies are equal and share compiled steps.
    return functools.partial(init_history, vector_size=vector_size, inputs=inputs)


def update_context(
    params: ContextNetwork,
    state: History,
    layer: Array,
    expert_ids: Array,
    router_logits: Array | None,
    hidden: Array | None,
) -> History:
    """See `Policy.update`."""
    return update_history(params.vectors, state, layer, expert_ids, router_logits, hidden)


def score_context(params: ContextNetwork, state: History, layer: Array) -> Array:
    """Keep values of a layer's experts, float32 `[E]`."""
    row = History(*(a[layer] for a in state))
    return context_keep(params, own_inputs(row), sets_around(state, layer))


def context_keep(params: ContextNetwork, own: Array, sets: Array) -> Array:
    """The network: own inputs `[..., F]` and set vectors `[..., H]` to keep values `[..., E]`."""
    num_own = OWN_FEATURES * params.last.kernel.shape[0]
    level = own[..., :num_own].reshape(*own.shape[:-1], OWN_FEATURES, -1)
    seen = jnp.concatenate([*(level[..., k, :] for k in SEEN_SHIFTS), own[..., num_own:]], axis=-1)
    h1 = activate(params.first, affine(params.first, seen) + sets)
    h2 = activate(params.second, affine(params.second, h1))
    of_own = activate(params.own_first, affine(params.own_first, jnp.swapaxes(level, -1, -2)))
    alike = jnp.sum(level * params.own[:, None], axis=-2) + jnp.sum(of_own * params.own_last, axis=-1)
    return affine(params.last, h2) + alike


def seen_columns(model: PolicyShape, inputs: frozenset[str]) -> np.ndarray:
    """Places in `history.own_inputs` of what the network over a layer sees, ascending."""
    num_own = OWN_FEATURES * model.num_experts
    counts = np.arange(num_own).reshape(OWN_FEATURES, -1)[list(SEEN_SHIFTS)]
    return np.concatenate([counts.reshape(-1), np.arange(num_own, own_width(model, inputs))])


def round_context(
    trained: TrainedContext, head_weight: np.ndarray, model: PolicyShape, inputs: frozenset[str]
) -> tuple[ContextNetwork, ...]:
    """Rounds a trained network to whole numbers, one head mixed by `head_weight` `[M]`.

    All layers' first sums share one grid, because every layer adds the same set vectors.
    """
    t = TrainedContext(*(a.astype(np.float64) for a in trained))
    L = len(t.first_kernel)
    unit, bound = np.full(t.first_kernel.shape[2], 1 / MAX_INPUT), np.full(t.first_kernel.shape[2], float(MAX_INPUT))
    if HIDDEN in inputs:
        bound[-model.hidden_size :] = MAX_HIDDEN
    first = t.first_kernel * unit
    # Of a layer's set at most top_k vectors add up, in a batch as much as one sequence could reach.
    up_LH, down_LH = (np.sort(np.abs(v), axis=1)[:, -model.top_k :].sum(axis=1) for v in (t.upward, t.downward))
    reach_LH = np.abs(first) @ bound + np.abs(t.first_bias) + np.maximum(up_LH, down_LH).sum(axis=0)
    rounding = (bound.sum() + 1 + L * model.top_k) / 2
    steps = min((EXACT - 1 - rounding) / reach_LH.max(), MAX_WEIGHT / np.abs(first).max())
    heads_LE = np.tensordot(t.last_bias, head_weight, ((1,), (0,)))
    kernel_LEH = np.tensordot(t.last_kernel, head_weight, ((1,), (0,)))
    own_LK = np.tensordot(t.own, head_weight, ((1,), (0,)))
    own_LJ = np.tensordot(t.own_last, head_weight, ((1,), (0,)))
    networks = []
    for layer in range(L):
        units = [peak[layer] / MAX_ACTIVATION for peak in (t.first_peak, t.second_peak, t.own_peak)]
        vectors = SetVectors(
            _whole(t.upward[layer] * steps),
            _whole(t.downward[layer] * steps),
            _whole(np.floor(up_LH[layer] * steps) + model.top_k),
            _whole(np.floor(down_LH[layer] * steps) + model.top_k),
        )
        second = t.second_kernel[layer % len(t.second_kernel)] * units[0]
        second_steps = _grid(np.abs(second).sum(axis=1) * MAX_ACTIVATION + np.abs(t.second_bias[layer]), second)
        of_own = t.own_kernel[layer] / MAX_INPUT
        count_steps = _grid(np.abs(of_own).sum(axis=1) * MAX_INPUT + np.abs(t.own_bias[layer]), of_own)
        last, own, own_last = kernel_LEH[layer] * units[1], own_LK[layer] / MAX_INPUT, own_LJ[layer] * units[2]
        alike_reach = np.abs(own).sum() * MAX_INPUT + np.abs(own_last).sum() * MAX_ACTIVATION
        last_reach = np.abs(last).sum(axis=1) * MAX_ACTIVATION + np.abs(heads_LE[layer]) + alike_reach
        last_steps = _grid(last_reach, last, own, own_last)
        networks.append(
            ContextNetwork(
                vectors=vectors,
                first=_layer(first[layer], t.first_bias[layer], steps, 1 / (steps * units[0])),
                second=_layer(second, t.second_bias[layer], second_steps, 1 / (second_steps * units[1])),
                last=_layer(last, heads_LE[layer], last_steps, 0.0),
                own=_whole(own * last_steps),
                own_first=_layer(of_own, t.own_bias[layer], count_steps, 1 / (count_steps * units[2])),
                own_last=_whole(own_last * last_steps),
            )
        )
    return tuple(networks)


def _grid(reach: np.ndarray, *weights: np.ndarray) -> float:
    """Steps per 1 that keep every sum exact, whatever rounding adds, and every weight small."""
    # Half a step for every weight that one sum meets: a row of a matrix, all of a vector.
    rounding = (sum(w.shape[-1] for w in weights) + 1) * MAX_ACTIVATION / 2
    largest = max(float(np.abs(w).max(initial=1e-30)) for w in weights)
    return min((EXACT - 1 - rounding) / float(reach.max(initial=1e-30)), MAX_WEIGHT / largest)


def _whole(a: np.ndarray) -> Any:
    return np.round(a).astype(np.float32)


def _layer(kernel: np.ndarray, bias: np.ndarray, steps: float, scale: float) -> IntegerLayer:
    return IntegerLayer(_whole(kernel * steps), _whole(bias * steps), np.float32(scale), np.zeros(0, np.float32))  # type: ignore[arg-type]
