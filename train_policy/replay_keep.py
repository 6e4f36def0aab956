"""Keep values of every step: what each expert is worth when the step chooses its victims.

For the policies that the engine runs, their own `update` and `score`, jitted, scanned over the updates and vmapped over
the layers; for random and MIN, compiled loops. A replay takes the values in chunks, so that a long trace needs little
memory. Invariant: values come from the trace alone, never from who is resident, so that one pass serves every number
of slots.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashmoe_jax.policy import Policy, PolicyShape
from train_policy.policies.compiled import kernel
from train_policy.policies.optimal import FARTHEST, NEVER, next_use, write_distances
from train_policy.replay_steps import Steps

# Floats of one chunk: fewer make more calls, more leave the processor's cache before they are used.
_CHUNK_FLOATS = 1 << 22
_MAX_CHUNK, _MIN_CHUNK = 4096, 64


def policy_keep(policy: Policy, steps: Steps, top_k: int) -> Iterator[np.ndarray]:
    """Keep values of a policy of the engine, float32 `[n, L, E]` in chunks that together have one row per step.

    Args:
        policy: whose layers do not look at each other.
        steps: whose `updates` the policy sees.
        top_k: experts per token.
    """
    scores = _scan(policy)
    start = policy.init(PolicyShape(steps.num_layers, steps.num_experts, top_k))
    per_layer = [policy.layer_params(layer) for layer in range(steps.num_layers)]
    params = jax.tree.map(lambda *of_layers: np.stack(of_layers), *per_layer)
    # The state's own layer axis gets length 1, with the layers in front of it to map over. Steps this small are faster
    # on the CPU than on any accelerator.
    blank, params = jax.device_put(
        (jax.tree.map(lambda a: np.asarray(a)[:, None], start), params), jax.local_devices(backend="cpu")[0]
    )
    state = blank
    size = _chunk_size(steps)
    pending: tuple[int, Any] | None = None
    for first in range(0, len(steps.updates), size):
        rows = steps.updates[first : first + size]
        ids = np.full((size, *rows.shape[1:]), -1, np.int32)
        ids[: len(rows)] = rows
        is_fresh = np.zeros(size, bool)
        is_fresh[: len(rows)] = steps.is_fresh[first : first + size]
        state, keep = scores(params, blank, state, ids, is_fresh)
        # One chunk ahead of the reader, who works on another core.
        if pending is not None:
            yield _of_steps(steps, *pending)
        pending = (first, keep)
    if pending is not None:
        yield _of_steps(steps, *pending)


def random_keep(steps: Steps, seed: int) -> Iterator[np.ndarray]:
    """Uniform random keep values, the same for the same seed."""
    size = _chunk_size(steps)
    for first in range(0, steps.num_steps, size):
        rows = min(size, steps.num_steps - first)
        keep = np.empty((rows, steps.num_layers, steps.num_experts), np.float32)
        _write_random(seed, first, keep)
        yield keep


def min_keep(steps: Steps) -> Iterator[np.ndarray]:
    """MIN: the sooner the next use, the more worth."""
    for distance in _distances(steps):
        yield -distance


def window_keep(steps: Steps, window: int, beyond: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """MIN that sees the next `window` steps only; among experts not seen there `beyond` decides.

    Args:
        window: at most half of FARTHEST.
        beyond: keep values of another policy, all of them below FARTHEST / 2.
    """
    rest, known = _Rows(beyond), _distances(steps)
    for distance in known:
        yield np.where(distance <= window, np.float32(FARTHEST) - distance, rest.take(len(distance)))


def beside(keep: Iterator[np.ndarray], other: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks of `keep`, each with the rows of `other` for the same steps."""
    rows = _Rows(other)
    for chunk in keep:
        yield chunk, rows.take(len(chunk))


class _Rows:
    """Chunks of any size, taken as chunks of another."""

    def __init__(self, chunks: Iterator[np.ndarray]):
        self._chunks = chunks
        self._left: np.ndarray | None = None

    def take(self, count: int) -> np.ndarray:
        parts: list[np.ndarray] = [] if self._left is None else [self._left]
        while sum(len(part) for part in parts) < count:
            parts.append(next(self._chunks))
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._left = rows[count:]
        return rows[:count]


@functools.lru_cache(maxsize=64)
def _scan(policy: Policy) -> Callable[..., tuple[Any, Array]]:
    """Jitted `(params, blank, state, ids [n, L, W], is_fresh [n]) -> (state, keep [n, L, E])`."""

    def one_layer(params: Any, state: Any, ids_W: Array) -> tuple[Any, Array]:
        layer = jnp.int32(0)
        state = policy.update(params, state, layer, ids_W[None], None, None)
        return state, policy.score(params, state, layer)

    def scores(params: Any, blank: Any, state: Any, ids: Array, is_fresh: Array) -> tuple[Any, Array]:
        def one_update(state: Any, update: tuple[Array, Array]) -> tuple[Any, Array]:
            ids_LW, starts_anew = update
            state = jax.tree.map(lambda new, old: jnp.where(starts_anew, new, old), blank, state)
            return jax.vmap(one_layer)(params, state, ids_LW)

        return lax.scan(one_update, state, (ids, is_fresh))

    return jax.jit(scores)


def _of_steps(steps: Steps, first: int, keep: Array) -> np.ndarray:
    """The rows of a chunk of updates after which a step chooses."""
    values = np.asarray(keep)
    inside = np.searchsorted(steps.last_update, [first, first + len(values)])
    rows = steps.last_update[inside[0] : inside[1]] - first
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return values[rows[0] : rows[-1] + 1]
    return values[rows]


def _chunk_size(steps: Steps) -> int:
    # A power of two, and few different ones: each is compiled once.
    fitting = _CHUNK_FLOATS // (steps.num_layers * steps.num_experts)
    largest = min(max(1 << (fitting.bit_length() - 1), _MIN_CHUNK), _MAX_CHUNK) if fitting else _MIN_CHUNK
    needed = max(len(steps.updates) - 1, 1)
    return min(largest, max(1 << needed.bit_length(), _MIN_CHUNK))


def _distances(steps: Steps) -> Iterator[np.ndarray]:
    """Steps to every expert's next use, float32 `[n, L, E]`; FARTHEST for never."""
    coming = [next_use(requests, steps.num_experts) for requests in steps.layers]
    upcoming = [np.full(steps.num_experts, NEVER) for _ in coming]
    size = _chunk_size(steps)
    for first in range(0, steps.num_steps, size):
        last = min(first + size, steps.num_steps)
        distance = np.empty((last - first, steps.num_layers, steps.num_experts), np.float32)
        for layer, next_step in enumerate(coming):
            write_distances(steps.layers[layer], next_step, first, last, upcoming[layer], layer, distance)
        yield distance


@kernel
def _write_random(seed: int, first: int, keep: np.ndarray) -> None:
    """Fills `[n, L, E]` with a hash (splitmix64) of seed, step, layer and expert."""
    num_rows, num_layers, num_experts = keep.shape
    for row in range(num_rows):
        for layer in range(num_layers):
            for expert in range(num_experts):
                index = ((first + row) * num_layers + layer) * num_experts + expert
                x = np.uint64(index) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
                x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
                x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                x ^= x >> np.uint64(31)
                keep[row, layer, expert] = np.float32(x >> np.uint64(40)) * np.float32(2.0**-24)
