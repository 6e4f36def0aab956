"""The expert feed-forward of one token as a call that can be timed; which code computes it is the caller's choice.

Invariant: successive calls take the next records of the block, so that every call reads its weights from memory.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.experts.record import RecordLayout

# `expert_ffn(out_TXD, h_TD, rows_RW, row_TX, active_TX, fields)` of one of the backends.
ExpertFfn = Callable[..., Array]


def one_token_run(expert_ffn: ExpertFfn, layout: RecordLayout) -> Any:
    """Jitted `run(h_1D, rows_RW, row_1X)`: the outputs `[1, X, D]` of one token and the experts in the rows."""
    return jax.jit(
        lambda h, rows, row: expert_ffn(
            jnp.zeros((1, row.shape[1], h.shape[1])), h, rows, row, jnp.ones(row.shape, bool), layout.fields
        )
    )


class RowCycle:
    """The rows of the block in turn, some at a time."""

    def __init__(self, num_rows: int):
        self._num_rows, self._next = num_rows, 0

    def take(self, count: int) -> np.ndarray:
        """The next rows, int32 `[1, count]`."""
        rows = (self._next + np.arange(count, dtype=np.int32)) % self._num_rows
        self._next = (self._next + count) % self._num_rows
        return rows.reshape(1, count)


class KernelTimer:
    """Calls the feed-forward of a token with `experts` records of the block on their device.

    Args:
        rows_RW: the block, on the device.
        width: model width D.
    """

    def __init__(self, expert_ffn: ExpertFfn, layout: RecordLayout, rows_RW: Array, experts: int, width: int):
        self._run, self._rows, self._experts = one_token_run(expert_ffn, layout), rows_RW, experts
        self._cycle = RowCycle(rows_RW.shape[0])
        self._h = np.random.default_rng(1).normal(size=(1, width)).astype(np.float32)
        itemsize = np.dtype(layout.word_dtype).itemsize
        self._weight_bytes = experts * layout.payload_words * itemsize

    def rate(self) -> float:
        """One call; returns bytes of weights per second."""
        row_1X = self._cycle.take(self._experts)
        began = time.perf_counter()
        self._run(self._h, self._rows, row_1X).block_until_ready()
        return self._weight_bytes / (time.perf_counter() - began)
