"""Reads the weights of an orbax checkpoint that lie on the drive as plain bytes, straight to where they will stay.

`save_dense` writes every weight as a zarr3 array of one uncompressed chunk, so the first bytes of one file are the
weight. Read through orbax they pass through several copies, at half of the drive's rate; here they are read past the
page cache into one page-aligned block, which JAX aliases on the CPU backend. Knows nothing of manifests. Invariant:
what is not exactly of that form is not touched: `find_plain` answers None, and the caller reads through orbax.
"""

import concurrent.futures
import dataclasses
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from flashmoe_jax.experts.record import checksum, numpy_dtype
from flashmoe_jax.experts.shard import crc32c, index_bytes
from flashmoe_jax.models.weights import WeightSpec

# Reads under way together; the files are large and small.
NUM_READS = 4
_STATE = "state"  # orbax's name for what is saved by itself


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """One weight: the first `num_bytes` of a file."""

    file: Path
    spec: WeightSpec

    @property
    def num_bytes(self) -> int:
        return math.prod(self.spec.shape) * numpy_dtype(self.spec.dtype).itemsize


def find_plain(directory: Path, specs: Mapping[str, WeightSpec]) -> dict[str, PlainArray] | None:
    """Where the weights of a checkpoint are; None unless every one is a plain file of its spec."""
    found = {}
    for path, spec in specs.items():
        folder = directory / _STATE / path
        file = folder / "c" / "/".join("0" * len(spec.shape)) if spec.shape else folder / "c"
        plain = PlainArray(file, spec)
        try:
            if not _is_plain(json.loads((folder / "zarr.json").read_bytes()), plain):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found[path] = plain
    return found


def read_plain(
    arrays: Mapping[str, PlainArray], checksums: Mapping[str, str], device: jax.Device
) -> dict[str, jax.Array]:
    """Reads weights to a device and checks their bytes.

    Args:
        arrays: from `find_plain`.
        checksums: of every weight's bytes.

    Raises:
        ValueError: bytes are missing or are not those that were written; the message names the file.
        OSError: a file cannot be read.
    """
    is_cpu = device.platform == "cpu"
    offsets, end = {}, 0
    for path, plain in arrays.items():
        offsets[path] = end
        end += -(-plain.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    block = mmap.mmap(-1, max(end, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(block, np.uint8)

    def read(path: str) -> jax.Array:
        plain = arrays[path]
        room = memory[offsets[path] : offsets[path] + -(-plain.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE]
        _read_file(plain.file, room, plain.num_bytes)
        data = room[: plain.num_bytes]
        if checksum(data) != checksums[path]:
            raise ValueError(f"{plain.file} is damaged")
        weight = data.view(numpy_dtype(plain.spec.dtype)).reshape(plain.spec.shape)
        return jax.device_put(weight, device, may_alias=is_cpu)

    # The largest first: the last to end is then a small one.
    by_size = sorted(arrays, key=lambda path: -arrays[path].num_bytes)
    with concurrent.futures.ThreadPoolExecutor(NUM_READS, thread_name_prefix="dense-read") as pool:
        weights = dict(zip(by_size, pool.map(read, by_size), strict=True))
    return jax.block_until_ready({path: weights[path] for path in arrays})


def _is_plain(metadata: Mapping, plain: PlainArray) -> bool:
    """Whether the array is one uncompressed little-endian chunk at the start of a shard of its own."""
    shape = list(plain.spec.shape)
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    (codec,) = metadata["codecs"]
    configuration = codec["configuration"]
    return (
        metadata["zarr_format"] == 3
        and metadata["shape"] == shape
        and metadata["data_type"] == plain.spec.dtype
        and metadata["chunk_grid"] == {"name": "regular", "configuration": {"chunk_shape": shape}}
        and metadata["chunk_key_encoding"]["name"] == "default"
        and metadata["chunk_key_encoding"].get("configuration", {}).get("separator", "/") == "/"
        and codec["name"] == "sharding_indexed"
        and configuration["chunk_shape"] == shape
        and configuration["codecs"] == [little_endian]
        and configuration["index_codecs"] == [little_endian, {"name": "crc32c"}]
        and configuration.get("index_location", "end") == "end"
        and _is_first(plain)
    )


def _is_first(plain: PlainArray) -> bool:
    """Whether the shard's index says that the only chunk is the first `num_bytes` of the file."""
    size = index_bytes(1)
    if plain.file.stat().st_size != plain.num_bytes + size:
        return False
    with open(plain.file, "rb", buffering=0) as file:
        file.seek(plain.num_bytes)
        index = file.read(size)
    return index == struct.pack("<QQ", 0, plain.num_bytes) + struct.pack("<I", crc32c(index[:-4]))


def _read_file(path: Path, room: np.ndarray, num_bytes: int) -> None:
    """Fills the first `num_bytes` of `room`, which is whole pages, from the start of a file."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        fd = os.open(path, os.O_RDONLY)  # a file system without direct reads
    try:
        done = 0
        while done < num_bytes:
            count = os.preadv(fd, [room[done:].data], done)
            if count == 0:
                raise ValueError(f"{path} ends {num_bytes - done} bytes early")
            done += count
    finally:
        os.close(fd)
