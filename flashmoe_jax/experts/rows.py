"""Which row of the slot buffer is which slot, and which rows are spare.

A slot's record may stand in any row: a record that arrived early, in a spare row, becomes a slot's by exchanging the
two rows, and no byte moves. Spare rows take what is used once and not admitted, and what is read ahead. Owned by the
host alone; the device is given the rows of one layer at a time. Invariant: every row is one slot's, or spare, or taken.
"""

import collections

import numpy as np


class RowTable:
    """Rows of `num_layers * num_slots` slots and `num_spare` more."""

    def __init__(self, num_layers: int, num_slots: int, num_spare: int):
        self.num_layers, self.num_slots, self.num_spare = num_layers, num_slots, num_spare
        self.reset()

    @property
    def num_rows(self) -> int:
        return self.num_layers * self.num_slots + self.num_spare

    @property
    def num_free(self) -> int:
        """Spare rows that nobody has taken."""
        return len(self._free)

    def reset(self) -> None:
        """Every row as at the beginning; nobody may hold one any more."""
        num_slots = self.num_layers * self.num_slots
        self._row_of_slot = np.arange(num_slots, dtype=np.int32).reshape(self.num_layers, self.num_slots)
        self._free = collections.deque(range(num_slots, self.num_rows))

    def row(self, layer: int, slot: int) -> int:
        return int(self._row_of_slot[layer, slot])

    def rows_of(self, layer: int) -> np.ndarray:
        """Row of every slot of a layer, int32 `[num_slots]`; a copy, as JAX may go on reading it."""
        return self._row_of_slot[layer].copy()

    def take(self) -> int | None:
        """A spare row, the one that was free longest; None where all are taken."""
        return self._free.popleft() if self._free else None

    def give_back(self, row: int) -> None:
        """A taken row is spare again; no read and no computation may still use it."""
        assert row not in self._free
        self._free.append(row)

    def exchange(self, layer: int, slot: int, row: int) -> None:
        """Makes a taken row the slot's; the slot's old one becomes spare, so nobody may still use that."""
        self.give_back(self.row(layer, slot))
        self._row_of_slot[layer, slot] = row
