"""Writes a checkpoint in Hugging Face form, tensor by tensor: numbered safetensors files and their index.

Owns the file format on the writing side. Invariant: only one tensor is in memory, because all names and shapes are
known before the first byte.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from checkpoints.sources import INDEX_NAME, TensorInfo
from flashmoe_jax.experts.record import numpy_dtype
from flashmoe_jax.experts.shard import write_file

DEFAULT_SHARD_BYTES = 4 * 10**9
_FORMAT_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

NamedInfo = tuple[str, TensorInfo]


def tensor_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * numpy_dtype(info.dtype).itemsize


def write_checkpoint(
    directory: Path,
    tensors: Sequence[NamedInfo],
    values: Iterable[np.ndarray],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes tensors to `model.safetensors`, or to several files and an index where they exceed `shard_bytes`.

    Args:
        directory: exists.
        tensors: names, dtypes and shapes, in the order of the files.
        values: the tensors themselves in the same order; taken one at a time.
        shard_bytes: most tensor bytes of a file; a larger tensor has a file of its own.
    """
    shards = list(_split(tensors, shard_bytes))
    coming = iter(values)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard, coming)
        weight_map |= {key: name for key, _ in shard}
    if len(shards) > 1:
        total = sum(tensor_bytes(info) for _, info in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(directory / INDEX_NAME, json.dumps(index, indent=2).encode())


def _split(tensors: Sequence[NamedInfo], shard_bytes: int) -> Iterator[list[NamedInfo]]:
    shard: list[NamedInfo] = []
    used = 0
    for key, info in tensors:
        if shard and used + tensor_bytes(info) > shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append((key, info))
        used += tensor_bytes(info)
    yield shard


def _write_file(path: Path, shard: Sequence[NamedInfo], values: Iterator[np.ndarray]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, info in shard:
        start, end = end, end + tensor_bytes(info)
        header[key] = {"dtype": _FORMAT_NAMES[info.dtype], "shape": info.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, info in shard:
            value = next(values)
            assert (value.shape, value.dtype) == (info.shape, numpy_dtype(info.dtype)), key
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
        # As for the shards of a store: these pages are not used again soon.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
