"""All rates of this machine at a model's shape: the drive first, while the cores rest, then memory, kernel and copy."""

import contextlib
import dataclasses
import statistics
from pathlib import Path

from flashmoe_jax.console import say
from flashmoe_jax.engine.budget import format_size
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.experts.shard import ARRAY_NAME, shard_key
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.probe.compute import measure_compute
from flashmoe_jax.probe.drive import DEPTHS, MAX_READ_BYTES, DriveReader, measure_drive, of_files, of_temporary_file

# Enough for a drive not to answer from a cache of its own.
TEMPORARY_BYTES = 1 << 30
# Below this the drive, or the machine under a virtual one, may hold the whole model in a cache of its own.
_SMALL_BYTES = 512 << 20
# Rounds of one depth that differ by more than this factor are noted.
_STEADY = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is read and computed: the sizes of a model's experts."""

    layout: RecordLayout
    experts_per_token: int
    width: int  # D

    @classmethod
    def olmoe(cls) -> "Shape":
        """OLMoE-1B-7B: 8 experts of 12 MiB in bfloat16."""
        D, F = 2048, 1024
        fields = (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F)))
        return cls(layout=RecordLayout.for_experts(fields, "bfloat16"), experts_per_token=8, width=D)

    @classmethod
    def of_model(cls, directory: ModelDirectory) -> "Shape":
        config = directory.config
        return cls(layout=directory.layout, experts_per_token=config.experts_per_token, width=config.hidden_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Medians in bytes per second."""

    drive_read: dict[int, float]  # by reads in flight
    memory_read: float
    kernel: float
    device_copy: float
    notes: tuple[str, ...]

    @property
    def compute(self) -> float:
        """At which weights pass through the cores: the kernels', which cannot be faster than memory for long."""
        return min(self.kernel, self.memory_read)


def measure_rates(directory: Path, model: ModelDirectory | None, seconds: float) -> Rates:
    """Measures everything.

    Args:
        directory: where a temporary file is made, without a model.
        model: whose experts are read, or None.
        seconds: for each number of reads in flight.

    Raises:
        FlashMoEError: no room or no right to write, too little memory, damaged files.
    """
    shape = Shape.olmoe() if model is None else Shape.of_model(model)
    layout, notes = shape.layout, []
    read_bytes = min(layout.record_bytes, MAX_READ_BYTES)
    if read_bytes < layout.record_bytes:
        notes.append(f"records of {format_size(layout.record_bytes)} were read in parts of {format_size(read_bytes)}")
    say(f"reading {format_size(read_bytes)} at a time from {directory}, about {seconds * len(DEPTHS):.3g} s")
    with _reader(directory, model, read_bytes) as reader:
        drive = measure_drive(reader, seconds)
    notes += _drive_notes(reader, directory, drive)
    say(f"computing with {shape.experts_per_token} experts of {format_size(layout.record_bytes)} per token")
    compute = measure_compute(layout, experts=shape.experts_per_token, width=shape.width)
    return Rates(
        drive_read={depth: statistics.median(rates) for depth, rates in drive.items()},
        memory_read=compute.memory_read,
        kernel=compute.kernel,
        device_copy=compute.device_copy,
        notes=(*notes, *compute.notes),
    )


def _reader(
    directory: Path, model: ModelDirectory | None, read_bytes: int
) -> contextlib.AbstractContextManager[DriveReader]:
    if model is None:
        return of_temporary_file(directory, read_bytes, TEMPORARY_BYTES)
    shards = [model.path / ARRAY_NAME / shard_key(layer) for layer in range(model.config.num_moe_layers)]
    return of_files(shards, read_bytes)


def _drive_notes(reader: DriveReader, directory: Path, drive: dict[int, list[float]]) -> list[str]:
    notes = []
    if not reader.is_direct:
        notes.append(
            f"{directory} takes no direct reads (O_DIRECT): the drive was read through the page cache, which was asked "
            "to forget what it held, and may look slower or faster than it is"
        )
    slowest, fastest = min(map(min, drive.values())), max(map(max, drive.values()))
    if any(max(rates) > _STEADY * min(rates) for rates in drive.values()):
        notes.append(
            f"the drive was not steady: {slowest / 1e9:.2f} to {fastest / 1e9:.2f} GB/s; measure again, with nothing "
            "else at work, before relying on the medians"
        )
    total_bytes = reader.num_places * reader.read_bytes
    if total_bytes < _SMALL_BYTES and reader.read_bytes < MAX_READ_BYTES:
        notes.append(f"only {format_size(total_bytes)} could be read: a cache inside the drive may answer for it")
    return notes
