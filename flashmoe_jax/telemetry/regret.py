"""`regret`: the engine's misses of late, divided by those of MIN, which knew what would be asked for.

Owns a record of the latest decode steps and the arithmetic. The window begins at a multiple of BLOCK_STEPS after the
last prompt and holds the latest BLOCK_STEPS to 2 * BLOCK_STEPS steps, or all since the prompt while there are fewer.
MIN starts from the residents the engine had there and follows the engine's rules: what is missed is admitted, a step's
own experts are no victims, and what does not fit is streamed. Where a step's experts do not fit, MIN is greedy and no
bound. Invariant: nothing here waits for the device or fails a step; MIN is computed in a thread of its own, or when
`value` is asked for.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

BLOCK_STEPS = 128
# Between two steps of MIN the background thread sleeps, so that decode never waits long for the interpreter.
_PAUSE_S = 5e-4


class _Block(NamedTuple):
    """Steps that follow each other, at most BLOCK_STEPS."""

    start: Any  # [L, R] int32 who is in the slots before the first, -1 = free; perhaps still on its way to the host
    steps: list[tuple[np.ndarray, Sequence[int]]]  # ids [B, L, X] or who is asked for [L, E]; misses of each layer


class RegretGauge:
    """Watches decode; one per expert memory.

    Args:
        num_layers: MoE layers.
        num_experts: per layer.
    """

    def __init__(self, num_layers: int, num_experts: int):
        self._shape = (num_layers, num_experts)
        self._first_of_layer = np.arange(num_layers, dtype=np.int32)[:, None] * (num_experts + 1) + 1
        self._blocks: list[_Block] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="regret")
        self._pending: Future[float | None] | None = None
        self.latest: float | None = None  # as the thread found it last

    def begin_step(self, snapshot: Callable[[], Any]) -> None:
        """A decode step begins; `snapshot` gives a copy of who is in the slots, `[L, R]`, and is rarely called."""
        if not self._blocks or len(self._blocks[-1].steps) == BLOCK_STEPS:
            self._blocks = [*self._blocks[-1:], _Block(snapshot(), [])]

    def end_step(self, chosen_BLX: np.ndarray, num_missed: Sequence[int]) -> None:
        """The step asked for these experts, -1 where nobody asks, and each layer missed so many; both are kept."""
        # The ids of a large batch would take more memory than a flag for every expert.
        is_large = chosen_BLX.nbytes > self._shape[0] * self._shape[1]
        self._blocks[-1].steps.append((self._asked(chosen_BLX) if is_large else chosen_BLX, num_missed))
        if len(self._blocks[-1].steps) == BLOCK_STEPS and (self._pending is None or self._pending.done()):
            self._pending = self._thread.submit(self._compute, tuple(self._blocks), _PAUSE_S)

    def restart(self) -> None:
        """The slots changed by other rules than decode's: what was recorded is forgotten."""
        self._blocks = []

    def value(self) -> float | None:
        """Of the window as it is now; None where nothing was missed, or nothing since the last prompt."""
        blocks = tuple(block._replace(steps=list(block.steps)) for block in self._blocks)
        return self._compute(blocks, 0.0)

    def close(self) -> None:
        """Waits for the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _asked(self, chosen_BLX: np.ndarray) -> np.ndarray:
        """Bool `[L, E]`: who is asked for."""
        num_layers, num_experts = self._shape
        asked = np.zeros((num_layers, num_experts + 1), bool)
        asked.reshape(-1)[(self._first_of_layer + chosen_BLX).reshape(-1)] = True
        return asked[:, 1:]

    def _compute(self, blocks: tuple[_Block, ...], pause_s: float) -> float | None:
        steps = [step for block in blocks for step in block.steps]
        if not steps:
            return None
        asked = np.stack([ids if ids.dtype == bool else self._asked(ids) for ids, _ in steps])
        missed = np.sum([missed for _, missed in steps], axis=0)
        best = min_misses(np.asarray(blocks[0].start), asked, pause_s=pause_s)
        has_any = best > 0
        self.latest = float(np.mean(missed[has_any] / best[has_any])) if has_any.any() else None
        return self.latest


def min_misses(expert_of_slot: np.ndarray, asked: np.ndarray, *, pause_s: float = 0.0) -> np.ndarray:
    """MIN's misses per layer, int64 `[L]`.

    Among experts that are asked for again in the same step, or never, the lower id stays; where the experts of every
    step fit, no choice among them changes the count.

    Args:
        expert_of_slot: `[L, R]` residents at the start, -1 = free.
        asked: bool `[T, L, E]`.
        pause_s: to sleep between two steps.
    """
    T, L, E = asked.shape
    R = expert_of_slot.shape[1]
    next_use = np.empty((T, L, E), np.int16)
    upcoming = np.full((L, E), T, np.int16)
    for t in reversed(range(T)):
        next_use[t] = upcoming
        upcoming[asked[t]] = t
    layer, slot = np.nonzero(expert_of_slot >= 0)
    is_resident = np.zeros((L, E), bool)
    is_resident[layer, expert_of_slot[layer, slot]] = True
    misses = np.zeros(L, np.int64)
    by_id = np.arange(E, dtype=np.int32)
    out = np.int32((T + 1) * E)
    for t in range(T):
        num_missed = np.count_nonzero(asked[t] & ~is_resident, axis=1)
        rows = np.flatnonzero(num_missed)
        if len(rows):
            misses += num_missed
            need, held = asked[t, rows], is_resident[rows]
            fits = (np.count_nonzero(need, axis=1) <= R)[:, None]
            # Lower stays: whom the step needs and may hold, then by the next use; others are out.
            key = np.where(np.where(fits, held, need), next_use[t, rows] * np.int32(E) + by_id, out)
            key = np.where(need & (held | fits), by_id - E, key)
            limit = np.partition(key, R - 1, axis=1)[:, R - 1 : R]
            is_resident[rows] = (key <= limit) & (key < out)
        if pause_s:
            time.sleep(pause_s)
    return misses
