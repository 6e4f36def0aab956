"""The host tier: records in host memory between the drive and the slots of a device that has memory of its own.

One aligned arena of records, pinned where the driver allows it, fed by what leaves the slots and by what was read and
not admitted. It is exclusive: a record that goes to a slot leaves the arena, so that slots and arena together hold as
many different experts as they have room for. When it is full, the least recently fed record leaves. Owned by the
engine's thread. Invariant: an arena row is written only when no copy from it is under way.
"""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashmoe_jax.experts.slots import InsertedSlots, pinned_rows

# Records on their way from the device at most: each is in its memory a second time.
MAX_COMING = 4


class _Leaving(NamedTuple):
    """A record on its way to a slot: its arena row is free when the copy is ready."""

    on_device: Array
    place: int


class _Coming(NamedTuple):
    """A record on its way from the device."""

    layer: int
    expert: int
    record: Array


class HostTier:
    """An arena of `num_records` records beside a slot buffer."""

    def __init__(self, num_records: int, slots: InsertedSlots, dtype: np.dtype, device: jax.Device):
        assert num_records > 0
        self.num_records = num_records
        self._slots = slots
        self._arena = pinned_rows(num_records, slots.row_words, dtype, device)
        self._place: collections.OrderedDict[tuple[int, int], int] = collections.OrderedDict()  # least recent first
        self._free = list(range(num_records))[::-1]
        self._leaving: list[_Leaving] = []
        self._coming: list[_Coming] = []
        self.num_hits = 0

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Whether the record of (layer, expert) is in the arena or on its way to it."""
        return key in self._place or any((c.layer, c.expert) == key for c in self._coming)

    def insert(self, layer: int, expert: int, row: int) -> bool:
        """Copies a record that is here into a slot's row, visible to what is dispatched next; it leaves the arena.

        Returns:
            Whether it was here.
        """
        if (layer, expert) not in self._place:
            self.settle(must=any((c.layer, c.expert) == (layer, expert) for c in self._coming))
        place = self._place.pop((layer, expert), None)
        if place is None:
            return False
        self._leaving.append(_Leaving(self._slots.insert(row, self._arena[place]), place))
        self.num_hits += 1
        return True

    def take_back(self, layer: int, expert: int, row: int) -> None:
        """The record in a row of the slot buffer is no longer resident: begins copying it to the arena.

        The row may be overwritten by whatever is dispatched afterwards.
        """
        if (layer, expert) in self:
            return
        if len(self._coming) >= MAX_COMING:
            self._coming[0].record.block_until_ready()
            self.settle()
        record = _read_row(self._slots.array, np.int32(row))
        record.copy_to_host_async()
        self._coming.append(_Coming(layer, expert, record))

    def settle(self, *, must: bool = False) -> None:
        """Ends copies that are done; `must` waits for all."""
        still_leaving = []
        for leaving in self._leaving:
            if must or leaving.on_device.is_ready():  # type: ignore[attr-defined]
                leaving.on_device.block_until_ready()
                self._free.append(leaving.place)
            else:
                still_leaving.append(leaving)
        self._leaving = still_leaving
        while self._coming and (must or self._coming[0].record.is_ready()):  # type: ignore[attr-defined]
            coming = self._coming.pop(0)
            place = self._free_place()
            np.copyto(self._arena[place], np.asarray(coming.record))
            self._place[coming.layer, coming.expert] = place

    def close(self) -> None:
        """Waits for copies and frees the arena."""
        for leaving in self._leaving:
            leaving.on_device.block_until_ready()
        self._leaving.clear()
        self._coming.clear()
        self._place.clear()
        self._arena = self._arena[:0]

    def _free_place(self) -> int:
        if self._free:
            return self._free.pop()
        if self._place:
            return self._place.popitem(last=False)[1]
        # Every record is on its way to a slot.
        leaving = self._leaving.pop(0)
        leaving.on_device.block_until_ready()
        return leaving.place


@jax.jit
def _read_row(rows: Array, row: Array) -> Array:
    return jnp.squeeze(lax.dynamic_slice_in_dim(rows, row, 1, axis=0), 0)
