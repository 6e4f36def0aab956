"""The slot buffer: device memory for expert records, as one array of rows of integer words.

Row `layer * R + slot` is a slot of a MoE layer; the rows past `L * R` are the staging ring, for records that are used
once and not admitted. The buffer knows rows and bytes, not which expert is where (`residency.py`). Two kinds behind
one interface: on the CPU backend device memory is host memory, so the buffer is a page-aligned block that JAX aliases
and reads land in place; elsewhere a read lands in host memory and is inserted on the device.
Invariant: a row is written only when every dispatched computation that may read it is done; the caller sees to that.
"""

import abc
import mmap
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class SlotBuffer(abc.ABC):
    """`num_rows` rows of `row_words` words, written one row at a time."""

    num_rows: int
    row_words: int

    @property
    @abc.abstractmethod
    def array(self) -> Array:
        """The rows, `[num_rows, row_words]`, for a computation dispatched now."""

    @abc.abstractmethod
    def landing(self, row: int) -> np.ndarray:
        """Host memory `[row_words]` that a read for `row` must fill before `commit`."""

    @abc.abstractmethod
    def commit(self, rows: Sequence[int]) -> None:
        """Makes the filled landings of `rows` visible to computations dispatched from now on."""

    @abc.abstractmethod
    def copy_row(self, source: int, target: int) -> None:
        """Copies one row over another, on the device."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the memory; no computation may be pending."""


def make_slot_buffer(num_rows: int, row_words: int, dtype: np.dtype, device: jax.Device) -> SlotBuffer:
    """The buffer that suits the device's platform."""
    if device.platform == "cpu":
        return AliasedSlots(num_rows, row_words, dtype, device)
    return InsertedSlots(num_rows, row_words, dtype, device)


class AliasedSlots(SlotBuffer):
    """A page-aligned mmap block that JAX aliases: reads land in the slot itself, and nothing is ever copied in.

    The array is never donated: donating an aliased array moves it to other memory.
    """

    def __init__(self, num_rows: int, row_words: int, dtype: np.dtype, device: jax.Device):
        self.num_rows, self.row_words = num_rows, row_words
        self._block = mmap.mmap(-1, num_rows * row_words * np.dtype(dtype).itemsize)
        self._rows: np.ndarray | None = np.frombuffer(self._block, dtype).reshape(num_rows, row_words)
        self._array: Array | None = jax.device_put(self._rows, device, may_alias=True)
        # A misaligned or moved block would be copied silently, and reads would then land where nobody looks.
        assert self._array.unsafe_buffer_pointer() == self._rows.ctypes.data, "JAX copied the slot buffer"

    @property
    def array(self) -> Array:
        assert self._array is not None, "the slot buffer is closed"
        return self._array

    def landing(self, row: int) -> np.ndarray:
        assert self._rows is not None, "the slot buffer is closed"
        return self._rows[row]

    def commit(self, rows: Sequence[int]) -> None:
        del rows  # already in place

    def copy_row(self, source: int, target: int) -> None:
        assert self._rows is not None, "the slot buffer is closed"
        np.copyto(self._rows[target], self._rows[source])

    def close(self) -> None:
        # The views go before the block: an mmap with exported buffers cannot be closed, so it is left to their count.
        self._array = self._rows = None


class InsertedSlots(SlotBuffer):
    """A device array updated in place (donated) from aligned host memory, one landing record per row in flight."""

    def __init__(self, num_rows: int, row_words: int, dtype: np.dtype, device: jax.Device):
        self.num_rows, self.row_words = num_rows, row_words
        self._dtype, self._device = np.dtype(dtype), device
        self._array: Array | None = jax.device_put(jnp.zeros((num_rows, row_words), self._dtype), device)
        self._landings: dict[int, np.ndarray] = {}
        self._spare: list[np.ndarray] = []

    @property
    def array(self) -> Array:
        assert self._array is not None, "the slot buffer is closed"
        return self._array

    def landing(self, row: int) -> np.ndarray:
        if row not in self._landings:
            self._landings[row] = self._spare.pop() if self._spare else self._new_landing()
        return self._landings[row]

    def commit(self, rows: Sequence[int]) -> None:
        for row in rows:
            record = self._landings.pop(row)
            on_device = jax.device_put(record, self._device, may_alias=False)
            self._array = _insert_row(self.array, on_device, np.int32(row))
            # The host record is reused for a later read, so its copy must have left.
            on_device.block_until_ready()
            self._spare.append(record)

    def copy_row(self, source: int, target: int) -> None:
        self._array = _copy_row(self.array, np.int32(source), np.int32(target))

    def close(self) -> None:
        self._array = None
        self._landings.clear()
        self._spare.clear()

    def _new_landing(self) -> np.ndarray:
        block = mmap.mmap(-1, self.row_words * self._dtype.itemsize)
        return np.frombuffer(block, self._dtype)


def _insert_row_impl(rows: Array, record: Array, row: Array) -> Array:
    return lax.dynamic_update_slice(rows, record[None], (row, jnp.int32(0)))


def _copy_row_impl(rows: Array, source: Array, target: Array) -> Array:
    record = lax.dynamic_slice_in_dim(rows, source, 1, axis=0)
    return lax.dynamic_update_slice(rows, record, (target, jnp.int32(0)))


_insert_row = jax.jit(_insert_row_impl, donate_argnums=0)
_copy_row = jax.jit(_copy_row_impl, donate_argnums=0)
