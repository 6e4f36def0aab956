"""Rates of memory, expert kernel and device copy, measured in turn on one block of records.

Owns the order of measuring and the notes about what could not be measured as meant. Invariant: kernel and memory read
the same block in the same rounds, so that their ratio says how near the kernel comes to the memory's limit.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from flashmoe_jax import native
from flashmoe_jax.engine.memory import available_bytes
from flashmoe_jax.experts.ffn import expert_ffn
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.native import streams
from flashmoe_jax.probe.block import make_records, num_rows
from flashmoe_jax.probe.kernel import KernelTimer, RowCycle
from flashmoe_jax.probe.rounds import in_turn

NUM_ROUNDS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeRates:
    """Medians in bytes per second."""

    memory_read: float  # of the best number of streams, all cores
    kernel: float  # bytes of expert weights, one token
    device_copy: float  # of one record to the device
    notes: tuple[str, ...]


def measure_compute(layout: RecordLayout, *, experts: int, width: int) -> ComputeRates:
    """Measures at a model's shape.

    Args:
        layout: of its records.
        experts: per token.
        width: model width D.

    Raises:
        BudgetError: too little memory is free.
    """
    device = jax.devices()[0]
    notes = _kernel_notes(device)
    rows, note = num_rows(layout, experts, available_bytes())
    notes += [note] if note else []
    host_rows = make_records(layout, rows)
    read = streams.library_reader()
    if read is None:
        notes.append("memory was read by numpy, in one stream, for want of the library: it may be faster")
    numbers_of_streams = streams.STREAMS if read is not None else (1,)
    device_rows = jax.device_put(host_rows, device, may_alias=True)
    kernel = KernelTimer(expert_ffn, layout, device_rows, min(experts, rows), width)
    measure: dict[str, Callable[[], float]] = {
        f"{n} streams": functools.partial(streams.read_rate, host_rows, n, read or streams.numpy_reader)
        for n in numbers_of_streams
    }
    measure |= {"kernel": kernel.rate, "copy": _CopyTimer(host_rows, device).rate}
    medians = {name: statistics.median(rates) for name, rates in in_turn(measure, NUM_ROUNDS).items()}
    return ComputeRates(
        memory_read=max(medians[f"{n} streams"] for n in numbers_of_streams),
        kernel=medians["kernel"],
        device_copy=medians["copy"],
        notes=tuple(notes),
    )


class _CopyTimer:
    """Copies one record after the other from host memory to the device."""

    def __init__(self, host_rows: np.ndarray, device: jax.Device):
        self._rows, self._device = host_rows, device
        self._cycle = RowCycle(len(host_rows))
        # On the CPU device_put hands out aligned memory itself, may_alias=False or not, and would copy nothing.
        self._landing = np.zeros_like(host_rows[0]) if device.platform == "cpu" else None

    def rate(self) -> float:
        """One copy; returns bytes per second."""
        record = self._rows[self._cycle.take(1)[0, 0]]
        began = time.perf_counter()
        if self._landing is not None:
            np.copyto(self._landing, record)
        else:
            jax.device_put(record, self._device).block_until_ready()
        return record.nbytes / (time.perf_counter() - began)


def _kernel_notes(device: jax.Device) -> list[str]:
    if device.platform != "cpu":
        return [f"the kernel rate is that of the expert feed-forward on {device.device_kind}"]
    library = native.load()
    notes = [] if library.is_loaded else [f"the kernel rate is that of plain XLA code: {library.reason}"]
    return [
        *notes,
        "device memory is host memory: the device copy is a memcpy, and reads need none",
    ]
