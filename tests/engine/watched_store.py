"""Stores for tests of the engine: one that writes down its reads, and one that watches the rows they go to."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tiny_engines import TinyModel

from flashmoe_jax.engine.engine import Engine


class RecordingStore:
    """The model's store; keeps what was read, in order."""

    def __init__(self, model: TinyModel):
        self._store = model.directory.store()
        self.layout, self.reader = self._store.layout, self._store.reader
        self.reads: list[tuple[int, int]] = []
        self.before_read: Callable[[np.ndarray], None] = lambda out_words: None
        self._lock = threading.Lock()

    def read_into(self, layer: int, expert: int, out_words: np.ndarray) -> "concurrent.futures.Future[None]":
        with self._lock:
            self.reads.append((layer, expert))
        self.before_read(out_words)
        return self._store.read_into(layer, expert, out_words)

    def take_reads(self) -> list[tuple[int, int]]:
        """What was read since the last call."""
        with self._lock:
            taken, self.reads = self.reads, []
        return taken

    def close(self) -> None:
        self._store.close()


@jax.jit
def _slowly(*values: jax.Array) -> tuple[jax.Array, ...]:
    """The same values, some milliseconds later, all at once."""
    noise = jax.lax.fori_loop(0, 12, lambda _, m: jnp.tanh(m @ m), jnp.full((160, 160), 0.01))
    return tuple(y + 0 * noise[0, 0] for y in values)


class RowWatch:
    """Slows the computation of experts down, and fails a read into a row that one under way may still read."""

    def __init__(self, engine: Engine, store: RecordingStore):
        memory = engine.memory
        rows = [memory.slots.landing(row) for row in range(memory.rows.num_rows)]
        self._row_at = {landing.ctypes.data: row for row, landing in enumerate(rows)}
        self._readers: dict[int, list[jax.Array]] = {}
        self.num_rewritten = 0  # rows written that had been read before
        group, ffn = memory.programs.expert_ffn_group, memory.programs.expert_ffn

        def slow_group(y_TD, h_TD, array, row, *rest):
            y_TD, done = _slowly(*group(y_TD, h_TD, array, row, *rest))
            self._readers.setdefault(int(row), []).append(done)
            return y_TD, done

        def slow_ffn(out_BXD, h_BD, array, row_BX, active_BX):
            (out_BXD,) = _slowly(ffn(out_BXD, h_BD, array, row_BX, active_BX))
            for row in np.asarray(row_BX)[np.asarray(active_BX)]:
                self._readers.setdefault(int(row), []).append(out_BXD)
            return out_BXD

        memory.programs = dataclasses.replace(memory.programs, expert_ffn=slow_ffn, expert_ffn_group=slow_group)
        store.before_read = self._check

    def _check(self, out_words: np.ndarray) -> None:
        row = self._row_at[out_words.ctypes.data]
        readers = self._readers.pop(row, [])
        self.num_rewritten += bool(readers)
        assert all(reader.is_ready() for reader in readers), f"row {row} is read by a computation and written now"


def assert_slots_hold_their_experts(engine: Engine, model: TinyModel) -> None:
    """The invariant between steps: every resident has its whole record in its slot, and the tables agree."""
    residency = engine.memory.state.residency
    expert_of_slot, slot_of_expert = np.asarray(residency.expert_of_slot), np.asarray(residency.slot_of_expert)
    array = np.asarray(engine.memory.slots.array)
    for layer, experts in enumerate(expert_of_slot):
        held = {int(expert): slot for slot, expert in enumerate(experts) if expert >= 0}
        assert {e: int(s) for e, s in enumerate(slot_of_expert[layer]) if s >= 0} == held
        for expert, slot in held.items():
            row = array[engine.memory.rows.row(layer, slot)]
            np.testing.assert_array_equal(row, np.asarray(model.reference.expert_rows[layer][expert]))
