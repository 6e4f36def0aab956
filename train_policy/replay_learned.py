"""Network inputs and keep values of learned policies, for every step of a trace at once.

The state is the policy's own, updated by its own `update` in a jitted scan, vmapped over the layers; the networks then
take thousands of steps in one product instead of one row each. Because their arithmetic is exact
(`flashmoe_jax/policy/network.py`), the keep values are those of the decode step, bit for bit. Invariant: as everywhere
in replay, values come from the trace alone, never from who is resident.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import Policy, PolicyShape
from flashmoe_jax.policy.base import HIDDEN, ROUTER_LOGITS
from flashmoe_jax.policy.context import context_keep
from flashmoe_jax.policy.heuristics import init_usage, update_usage
from flashmoe_jax.policy.history import init_history, own_inputs, update_history
from flashmoe_jax.policy.learned import keep_values, paper_inputs
from flashmoe_jax.policy.shared import init_shared, shared_inputs, update_shared
from train_policy.replay_steps import Steps

# Steps of one chunk: their state is in memory, of all layers.
_CHUNK_INTS = 1 << 24
_MIN_CHUNK, _MAX_CHUNK = 64, 2048


class StateChunk(NamedTuple):
    """State of a policy after each of the next n steps."""

    first: int  # step
    num_steps: int  # n; the arrays have more rows, so that few shapes are compiled
    rows: Any  # the policy's state, [rows, L, ...]
    is_cold: np.ndarray  # [n] bool: the state before this step does not count


class InputChunk(NamedTuple):
    """Network inputs at each of the next n steps."""

    inputs: list[np.ndarray]  # per layer: `own_inputs` [n, F], `shared_inputs` [n, E, F], `paper_inputs`
    used: np.ndarray  # uint8 [n, L, E] the sets that were chosen, for `context`


def check_inputs(policy: Policy, steps: Steps) -> None:
    """Refuses a trace without what the policy needs.

    Raises:
        ConfigError: router logits or hidden states are missing.
    """
    for name, column in ((ROUTER_LOGITS, steps.router_logits), (HIDDEN, steps.hidden)):
        if name in policy.inputs and column is None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"policy {policy.name} was trained with {name} and the trace has none; record one with {flag}"
            )


def untrained(kind: str, inputs: frozenset[str] = frozenset()) -> Policy:
    """A policy of a learned kind as training needs it: it keeps the state, and scores nothing."""
    if kind == "paper":
        return Policy(kind, init_usage, update_usage, _no_score, is_learned=True)
    if kind == "shared":
        return Policy(kind, init_shared, update_shared, _no_score, is_learned=True)
    return Policy(kind, _init_untrained(inputs), update_history, _no_score, is_learned=True, inputs=inputs)


def _no_score(params: Any, state: Any, layer: Array) -> Array:
    raise NotImplementedError


@functools.lru_cache(maxsize=8)
def _init_untrained(inputs: frozenset[str]) -> Callable[[PolicyShape], Any]:
    return functools.partial(init_history, vector_size=0, inputs=inputs)


def input_chunks(policy: Policy, steps: Steps, top_k: int) -> Iterator[InputChunk]:
    """What the networks of a learned policy see of their own layers at every step, and all layers' sets.

    Args:
        policy: whose state is wanted; see `untrained`.
        steps: of the trace.
        top_k: experts per token.

    Raises:
        ConfigError: as `check_inputs`.
    """
    make = _inputs(policy.name)
    for chunk in state_chunks(policy, steps, top_k):
        inputs = [np.asarray(make(_layer_of(chunk.rows, i)))[: chunk.num_steps] for i in range(steps.num_layers)]
        used = getattr(chunk.rows, "used", np.zeros((0, 0, 0)))
        yield InputChunk(inputs, np.asarray(used[: chunk.num_steps], np.uint8))


def learned_keep(policies: Sequence[Policy], steps: Steps, top_k: int) -> Iterator[np.ndarray]:
    """Keep values of learned policies that differ in their networks' last layers alone, one per number of slots.

    Yields:
        float32 `[n, policies, L, E]`, chunks that together have one row per step.
    """
    kind, params = policies[0].name, [policy.params for policy in policies]
    if kind == "shared":  # the same for every number of slots
        params = params[:1]
    make, network = _inputs(kind), _network(kind)
    vector_size = params[0][0].vectors.upward.shape[1] if kind == "context" else 0
    before = np.zeros((1, steps.num_layers, vector_size), np.float32)
    for chunk in state_chunks(policies[0], steps, top_k):
        sets: Any = np.zeros((steps.num_layers, 0))
        if vector_size:
            sets, before = _sets_around(chunk, before)
        keep = []
        for layer in range(steps.num_layers):
            inputs = make(_layer_of(chunk.rows, layer))
            of_policies = [network(networks[layer], inputs, sets[layer]) for networks in params]
            keep.append(np.stack([np.asarray(of_layer)[: chunk.num_steps] for of_layer in of_policies], axis=1))
        yield np.repeat(np.stack(keep, axis=2), len(policies) // len(params), axis=1)


def _sets_around(chunk: StateChunk, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`history.sets_around` of every layer and step, `[L, rows, H]`, and the last step's downward vectors.

    Layers up to the one that looks show this step's sets, those above it the sets of the step before.
    """
    upward, downward = np.asarray(chunk.rows.upward), np.asarray(chunk.rows.downward)
    earlier = np.concatenate([before, downward[:-1]])
    earlier[: chunk.num_steps][chunk.is_cold] = 0
    # Whole numbers below 2^24: the order of the sums does not matter.
    up_to = np.cumsum(upward, axis=1)
    above = np.sum(earlier, axis=1, keepdims=True) - np.cumsum(earlier, axis=1)
    return np.moveaxis(up_to + above, 1, 0), downward[chunk.num_steps - 1 : chunk.num_steps]


def state_chunks(policy: Policy, steps: Steps, top_k: int) -> Iterator[StateChunk]:
    """The state of a policy when it scores, step after step.

    Raises:
        ConfigError: as `check_inputs`.
    """
    check_inputs(policy, steps)
    hidden_size = steps.hidden.shape[2] if HIDDEN in policy.inputs and steps.hidden is not None else 0
    start = policy.init(PolicyShape(steps.num_layers, steps.num_experts, top_k, hidden_size))
    per_layer = [policy.layer_params(layer) for layer in range(steps.num_layers)]
    params = jax.tree.map(lambda *of_layers: np.stack(of_layers), *per_layer)
    blank = jax.tree.map(lambda a: np.asarray(a)[:, None], start)
    params, blank = jax.device_put((params, blank), jax.local_devices(backend="cpu")[0])
    scan, state, size = _scan(policy), blank, _chunk_size(start, len(steps.updates))
    for first in range(0, len(steps.updates), size):
        span = slice(first, min(first + size, len(steps.updates)))
        state, rows = scan(params, blank, state, *_shown(policy, steps, span, size, top_k))
        inside = np.searchsorted(steps.last_update, [span.start, span.stop])
        at = steps.last_update[inside[0] : inside[1]] - first
        if not len(at):
            continue
        if len(at) < size:  # several updates per step, or the last chunk
            padded = np.concatenate([at, np.full(size - len(at), at[-1])])
            rows = jax.tree.map(lambda a, padded=padded: a[padded], rows)
        yield StateChunk(int(inside[0]), len(at), rows, steps.is_cold[inside[0] : inside[1]])


def _layer_of(rows: Any, layer: int) -> Any:
    return jax.tree.map(lambda a: a[:, layer], rows)


def _shown(policy: Policy, steps: Steps, span: slice, size: int, top_k: int) -> tuple[Any, ...]:
    """ids `[size, L, B, X]`, is_fresh `[size]`, router logits and hidden of the updates in `span`, or None."""
    count = span.stop - span.start
    rows = steps.updates[span]
    width = rows.shape[2] if rows.shape[2] % top_k else top_k  # per access a row is one id
    ids = np.full((size, *rows.shape[1:]), -1, np.int32)
    ids[:count] = rows
    is_fresh = np.zeros(size, bool)
    is_fresh[:count] = steps.is_fresh[span]

    def wide(name: str, column: np.ndarray | None) -> np.ndarray | None:
        if name not in policy.inputs or column is None:
            return None
        of_update = np.zeros((size, *steps.row_of_update.shape[1:]), np.int64)
        of_update[:count] = np.maximum(steps.row_of_update[span], 0)
        return np.moveaxis(column[of_update], 1, 2)  # [size, L, B, ...]

    logits, hidden = wide(ROUTER_LOGITS, steps.router_logits), wide(HIDDEN, steps.hidden)
    return ids.reshape(size, steps.num_layers, -1, width), is_fresh, logits, hidden


def _chunk_size(state: Any, num_updates: int) -> int:
    ints = sum(a.nbytes for a in jax.tree.leaves(state)) // 4
    fitting = max(_CHUNK_INTS // ints, 1)
    largest = min(max(1 << (fitting.bit_length() - 1), _MIN_CHUNK), _MAX_CHUNK)
    return min(largest, max(1 << max(num_updates - 1, 1).bit_length(), _MIN_CHUNK))


@functools.lru_cache(maxsize=64)
def _scan(policy: Policy) -> Callable[..., tuple[Any, Any]]:
    """Jitted `(params, blank, state, ids, is_fresh, logits, hidden) -> (state, states after every update)`."""

    def one_layer(params: Any, state: Any, ids_BX: Array, logits: Array | None, hidden: Array | None) -> Any:
        return policy.update(params, state, jnp.int32(0), ids_BX, logits, hidden)

    def scan(params: Any, blank: Any, state: Any, *shown: Any) -> tuple[Any, Any]:
        def one_update(state: Any, update: tuple[Any, ...]) -> tuple[Any, Any]:
            ids_LBX, starts_anew, logits_LBE, hidden_LBD = update
            state = jax.tree.map(lambda new, old: jnp.where(starts_anew, new, old), blank, state)
            state = jax.vmap(one_layer)(params, state, ids_LBX, logits_LBE, hidden_LBD)
            return state, jax.tree.map(lambda a: a[:, 0], state)

        return lax.scan(one_update, state, shown)

    return jax.jit(scan)


@functools.lru_cache(maxsize=8)
def _inputs(kind: str) -> Callable[..., Array]:
    """Jitted: states of one layer `[n, ...]` to inputs of its network."""

    def make(row: Any) -> Array:
        if kind == "paper":
            return paper_inputs(jax.tree.map(lambda a: a[None], row), jnp.int32(0))
        return shared_inputs(row.counts, row.sets) if kind == "shared" else own_inputs(row)

    return jax.jit(jax.vmap(make))


@functools.lru_cache(maxsize=8)
def _network(kind: str) -> Callable[..., Array]:
    """Jitted `(network of one layer, inputs, set vectors) -> keep values [n, E]`."""
    if kind == "context":
        return jax.jit(context_keep)
    return jax.jit(lambda params, inputs, sets: keep_values(kind, params, inputs))
