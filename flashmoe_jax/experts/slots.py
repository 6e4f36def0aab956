"""The slot buffer: device memory for expert records, as one array of rows of integer words.

The buffer knows rows and bytes, not which slot a row is (`rows.py`) nor which expert is where (`residency.py`). Two
kinds behind one interface: on the CPU backend device memory is host memory, so the buffer is a page-aligned block that
JAX aliases and reads land in place; elsewhere a read lands in host memory and is inserted on the device.
Invariant: a row is written only when every dispatched computation that may read it is done; the caller sees to that.
"""

import abc
import mmap
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashmoe_jax.experts.pinning import pin_memory

# Host records on their way to the device at most; one more waits for the first to have left.
MAX_LEAVING = 4


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
    def release(self, row: int) -> None:
        """Forgets the landing of a row that will not be committed; nothing is written to it any more."""

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
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._block.madvise(mmap.MADV_HUGEPAGE)  # kernels read it in streams, which small pages interrupt
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

    def release(self, row: int) -> None:
        del row  # its memory is the row's own

    def close(self) -> None:
        # The views go before the block: an mmap with exported buffers cannot be closed, so it is left to their count.
        self._array = self._rows = None


class InsertedSlots(SlotBuffer):
    """A device array updated in place (donated) from page-aligned host memory, one landing record per row in flight.

    Copies to the device are asynchronous: a landing is reused only when its copy has left. Where the driver allows it
    the landings are pinned, so that a copy needs no further one in the driver.
    """

    def __init__(self, num_rows: int, row_words: int, dtype: np.dtype, device: jax.Device):
        self.num_rows, self.row_words = num_rows, row_words
        self._dtype, self._device = np.dtype(dtype), device
        self._array: Array | None = jax.device_put(jnp.zeros((num_rows, row_words), self._dtype), device)
        self._landings: dict[int, np.ndarray] = {}
        self._spare: list[np.ndarray] = []
        self._leaving: list[tuple[Array, np.ndarray]] = []

    @property
    def array(self) -> Array:
        assert self._array is not None, "the slot buffer is closed"
        return self._array

    def landing(self, row: int) -> np.ndarray:
        if row not in self._landings:
            self._landings[row] = self._spare_record()
        return self._landings[row]

    def commit(self, rows: Sequence[int]) -> None:
        for row in rows:
            record = self._landings.pop(row)
            self._leaving.append((self.insert(row, record), record))

    def insert(self, row: int, record: np.ndarray) -> Array:
        """Copies a host record `[row_words]` into a row; it may be written again when what is returned is ready."""
        on_device = jax.device_put(record, self._device, may_alias=False)
        self._array = _insert_row(self.array, on_device, np.int32(row))
        return on_device

    def release(self, row: int) -> None:
        if row in self._landings:
            self._spare.append(self._landings.pop(row))

    def close(self) -> None:
        for on_device, _ in self._leaving:
            on_device.block_until_ready()
        self._leaving.clear()
        self._array = None
        self._landings.clear()
        self._spare.clear()

    def _spare_record(self) -> np.ndarray:
        while self._leaving:
            on_device, record = self._leaving[0]
            if len(self._leaving) >= MAX_LEAVING:
                on_device.block_until_ready()
            elif not on_device.is_ready():  # type: ignore[attr-defined]
                break
            self._spare.append(record)
            self._leaving.pop(0)
        return self._spare.pop() if self._spare else pinned_rows(1, self.row_words, self._dtype, self._device)[0]


def pinned_rows(num_rows: int, row_words: int, dtype: np.dtype, device: jax.Device) -> np.ndarray:
    """Page-aligned host memory `[num_rows, row_words]`, pinned where the device's driver allows it."""
    block = mmap.mmap(-1, num_rows * row_words * np.dtype(dtype).itemsize)
    rows = np.frombuffer(block, dtype).reshape(num_rows, row_words)
    if device.platform == "gpu":
        pin_memory(rows.ctypes.data, rows.nbytes)
    return rows


def _insert_row_impl(rows: Array, record: Array, row: Array) -> Array:
    return lax.dynamic_update_slice(rows, record[None], (row, jnp.int32(0)))


_insert_row = jax.jit(_insert_row_impl, donate_argnums=0)
