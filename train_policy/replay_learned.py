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
from flashmoe_jax.policy.heuristics import UsageState
from flashmoe_jax.policy.history import NEIGHBOURS, History, context_inputs
from flashmoe_jax.policy.learned import keep_values, paper_inputs, shared_inputs
from train_policy.replay_steps import Steps

# Steps of one chunk: their state is in memory, of all layers.
_CHUNK_INTS = 1 << 24
_MIN_CHUNK, _MAX_CHUNK = 64, 2048


class InputChunk(NamedTuple):
    """Network inputs of the next n steps."""

    first: int  # step
    inputs: list[np.ndarray]  # per layer asked for; float32 [n, F], [n, E, F] for a network per expert


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


def learned_keep(policy: Policy, steps: Steps, top_k: int) -> Iterator[np.ndarray]:
    """Keep values of a learned policy, float32 `[n, L, E]` in chunks that together have one row per step."""
    score = _network(policy.name)
    for chunk in input_chunks(policy, steps, top_k):
        keep = [score(params, x) for params, x in zip(policy.params, chunk.inputs, strict=True)]
        yield np.stack([np.asarray(of_layer) for of_layer in keep], axis=1)


def input_chunks(policy: Policy, steps: Steps, top_k: int, layers: Sequence[int] | None = None) -> Iterator[InputChunk]:
    """What the networks of a learned policy see at every step.

    Args:
        policy: whose `update` and inputs are wanted; its params are not used.
        steps: of the trace.
        top_k: experts per token.
        layers: MoE layers to make inputs for; None for all.

    Raises:
        ConfigError: as `check_inputs`.
    """
    check_inputs(policy, steps)
    wanted = tuple(range(steps.num_layers)) if layers is None else tuple(layers)
    hidden_size = steps.hidden.shape[2] if HIDDEN in policy.inputs and steps.hidden is not None else 0
    scan = _scan(policy)
    start = policy.init(PolicyShape(steps.num_layers, steps.num_experts, top_k, hidden_size))
    blank = jax.device_put(jax.tree.map(lambda a: np.asarray(a)[:, None], start), jax.local_devices(backend="cpu")[0])
    state = blank
    size = _chunk_size(start, len(steps.updates))
    previous = np.zeros((1, steps.num_layers, steps.num_experts), np.int32)
    for first in range(0, len(steps.updates), size):
        span = slice(first, min(first + size, len(steps.updates)))
        state, rows = scan(blank, state, *_shown(policy, steps, span, size, top_k))
        inside = np.searchsorted(steps.last_update, [span.start, span.stop])
        at = steps.last_update[inside[0] : inside[1]] - first
        if not len(at):
            continue
        # A compiled shape per chunk length: all but the last have one step per update or go through `at` padded.
        padded = np.concatenate([at, np.full(size - len(at), at[-1])])
        rows = jax.tree.map(lambda a, padded=padded: a[padded], rows)
        if isinstance(rows, History):
            used = np.asarray(rows.used)
            before = np.concatenate([previous, used[: len(at) - 1]])
            before[steps.is_cold[inside[0] : inside[1]]] = 0
            before = np.concatenate([before, np.zeros((size - len(at), *before.shape[1:]), before.dtype)])
            previous = used[len(at) - 1 : len(at)]
            windows: Any = _windows(used, before, wanted)
        else:
            windows = [None] * len(wanted)
        make = _inputs(policy.name)
        inputs = [
            np.asarray(make(jax.tree.map(lambda a, layer=layer: a[:, layer], rows), window))[: len(at)]
            for layer, window in zip(wanted, windows, strict=True)
        ]
        yield InputChunk(int(inside[0]), inputs)


def _windows(used: np.ndarray, before: np.ndarray, wanted: Sequence[int]) -> list[np.ndarray]:
    """Sets around each layer: of the layers up to it in this step, of those above in the step before."""
    edge = ((0, 0), (NEIGHBOURS, NEIGHBOURS), (0, 0))
    now, then = np.pad(used, edge), np.pad(before, edge)
    return [
        np.concatenate([now[:, l : l + NEIGHBOURS + 1], then[:, l + NEIGHBOURS + 1 : l + 2 * NEIGHBOURS + 1]], axis=1)
        for l in wanted  # noqa: E741
    ]


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
    ints = sum(a.size for a in jax.tree.leaves(state))
    fitting = max(_CHUNK_INTS // ints, 1)
    largest = min(max(1 << (fitting.bit_length() - 1), _MIN_CHUNK), _MAX_CHUNK)
    return min(largest, max(1 << max(num_updates - 1, 1).bit_length(), _MIN_CHUNK))


@functools.lru_cache(maxsize=64)
def _scan(policy: Policy) -> Callable[..., tuple[Any, Any]]:
    """Jitted `(blank, state, ids, is_fresh, logits, hidden) -> (state, states after every update [n, L, ...])`."""

    def one_layer(state: Any, ids_BX: Array, logits: Array | None, hidden: Array | None) -> Any:
        return policy.update(state, jnp.int32(0), ids_BX, logits, hidden)

    def scan(blank: Any, state: Any, ids: Array, is_fresh: Array, logits: Any, hidden: Any) -> tuple[Any, Any]:
        def one_update(state: Any, update: tuple[Any, ...]) -> tuple[Any, Any]:
            ids_LBX, starts_anew, logits_LBE, hidden_LBD = update
            state = jax.tree.map(lambda new, old: jnp.where(starts_anew, new, old), blank, state)
            state = jax.vmap(one_layer)(state, ids_LBX, logits_LBE, hidden_LBD)
            return state, jax.tree.map(lambda a: a[:, 0], state)

        return lax.scan(one_update, state, (ids, is_fresh, logits, hidden))

    return jax.jit(scan)


@functools.lru_cache(maxsize=8)
def _inputs(kind: str) -> Callable[..., Array]:
    """Jitted `(rows of one layer [n, ...], window or None) -> inputs`."""

    def make(row: Any, window: Array | None) -> Array:
        if kind == "paper":
            assert isinstance(row, UsageState)
            state = jax.tree.map(lambda a: a[None], row)
            return paper_inputs(state, jnp.int32(0))
        if kind == "shared":
            return shared_inputs(row.counts)
        assert window is not None
        return context_inputs(row, window)

    return jax.jit(jax.vmap(make, in_axes=(0, None if kind != "context" else 0)))


@functools.lru_cache(maxsize=8)
def _network(kind: str) -> Callable[..., Array]:
    """Jitted `(network of one layer, inputs) -> keep values [n, E]`."""
    return jax.jit(lambda params, inputs: keep_values(kind, params, inputs))
