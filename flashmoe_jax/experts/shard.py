"""Writes the expert array: one zarr3 shard file per layer, and the array's metadata.

tensorstore reads the result but does not write it: its write of one expert rewrites the whole shard, and a
transaction per layer holds the layer in memory. Here records are appended as they come and only one is in memory.
Invariant: a shard file under its final name is complete, on the drive, and every record of it starts at a multiple
of 4096 bytes, because the index stands at the end of the file.
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.experts.record import RECORD_ALIGNMENT, RecordLayout

ARRAY_NAME = "experts.zarr"
ARRAY_FORMAT_VERSION = 1


def shard_key(layer: int) -> str:
    """Name of a layer's shard within the array, by zarr's default chunk key encoding."""
    return f"c/{layer}/0/0"


def shard_bytes(num_experts: int, record_bytes: int) -> int:
    """Size of one shard file: records, index entries, checksum of the index."""
    return num_experts * record_bytes + index_bytes(num_experts)


def index_bytes(num_experts: int) -> int:
    return 16 * num_experts + 4


class ShardWriter:
    """Appends the records of one layer, in any expert order, to a shard file.

    A context manager: leaving it normally publishes the file, leaving it by an exception removes it.
    """

    def __init__(self, path: Path, num_experts: int, record_bytes: int):
        assert record_bytes % RECORD_ALIGNMENT == 0
        self._path = path
        self._record_bytes = record_bytes
        self._slot_of_expert: list[int | None] = [None] * num_experts
        self._num_written = 0
        self._temporary = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary, "wb", buffering=0)  # noqa: SIM115 - lives as long as the writer

    def append(self, expert: int, words: np.ndarray) -> None:
        """Writes one record; each expert once."""
        assert self._slot_of_expert[expert] is None, f"expert {expert} was already written"
        assert words.nbytes == self._record_bytes
        assert words.flags.c_contiguous
        self._slot_of_expert[expert] = self._num_written
        self._num_written += 1
        _write_all(self._file.fileno(), words.data.cast("B"))

    def close(self) -> None:
        """Writes the index and its checksum, waits for the drive, and gives the file its name."""
        missing = [e for e, slot in enumerate(self._slot_of_expert) if slot is None]
        assert not missing, f"experts {missing} were not written"
        entries = b"".join(
            struct.pack("<QQ", slot * self._record_bytes, self._record_bytes)
            for slot in self._slot_of_expert
            if slot is not None
        )
        fd = self._file.fileno()
        _write_all(fd, memoryview(entries + struct.pack("<I", crc32c(entries))))
        os.fsync(fd)
        # The pages will not be used again; a store larger than memory would push out everything else.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.close()
        os.replace(self._temporary, self._path)
        fsync_directory(self._path.parent)

    def abort(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


def write_array_metadata(
    directory: Path, num_layers: int, num_experts: int, layout: RecordLayout, source: Mapping[str, Any]
) -> None:
    """Writes `zarr.json` of the array `[num_layers, num_experts, record_words]` into `directory`.

    Args:
        directory: the array's own directory, `MODEL/experts.zarr`.
        source: where the weights came from; kept as an attribute.
    """
    directory.mkdir(parents=True, exist_ok=True)
    metadata = array_metadata(num_layers, num_experts, layout) | {
        "attributes": {
            "format_version": ARRAY_FORMAT_VERSION,
            "record": layout.to_json(),
            "quantisation": None,
            "source": dict(source),
        }
    }
    write_file(directory / "zarr.json", json.dumps(metadata, indent=1).encode())


def array_metadata(num_layers: int, num_experts: int, layout: RecordLayout) -> dict[str, Any]:
    """The zarr3 metadata that decides where every byte of the array stands."""
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [num_layers, num_experts, layout.record_words],
        "data_type": layout.word_dtype,
        "fill_value": 0,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [1, num_experts, layout.record_words]},
        },
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, 1, layout.record_words],
                    "codecs": [little_endian],
                    "index_codecs": [little_endian, {"name": "crc32c"}],
                    "index_location": "end",
                },
            }
        ],
    }


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file so that it is either absent (or as before) or whole on the drive."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Makes renames within a directory survive a power cut."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), the checksum of zarr's shard index; indexes are a few kilobytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC32C_TABLE = _crc32c_table()


def _write_all(fd: int, data: memoryview) -> None:
    # write(2) may accept less than it is given, and Linux never more than 2 GiB.
    while data:
        data = data[os.write(fd, data) :]
