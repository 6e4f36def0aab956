"""Where tensors come from: names, dtypes and shapes first, then any run of elements, in bounded memory.

Owns reading of safetensors files; `orbax_source.py` is the other source. Knows no model: what a name means is the
plan's business. Invariant: opening a source checks that every byte it promises is there, so that a cut or missing
file is found before anything is written.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from flashmoe_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_READ_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20
_NUMBERED = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")


class TensorInfo(NamedTuple):
    """A tensor as stored; `dtype` is numpy's or ml_dtypes' name, or the file's own where neither knows it."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def describe(self) -> dict[str, Any]:
        """What goes into the manifest: kind and fingerprint."""

    def begin(self, keys: Iterable[str]) -> None:
        """Announces which tensors are read next, and in which order; those announced before may be forgotten."""

    def read_into(self, key: str, first: int, out: np.ndarray) -> None:
        """Copies elements from the `first` on, in row order, into a contiguous array of the stored dtype."""

    def close(self) -> None: ...


class _Place(NamedTuple):
    path: Path
    offset: int  # bytes from the start of the file


class SafetensorsSource:
    """The safetensors files of a Hugging Face directory: a single one, or those an index names."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files = _weight_files(directory)
        self._tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        for path in self._files:
            self._add(path)
        self._check_index()
        self._fds = {path: os.open(path, os.O_RDONLY) for path in self._files}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def describe(self) -> dict[str, Any]:
        return {"kind": "safetensors", "fingerprint": fingerprint([self._directory / "config.json", *self._files])}

    def begin(self, keys: Iterable[str]) -> None:
        # What was read is not read again; the page cache is worth more to others.
        if hasattr(os, "posix_fadvise"):
            for fd in self._fds.values():
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, key: str, first: int, out: np.ndarray) -> None:
        path, offset = self._places[key]
        view = out.reshape(-1).view(np.uint8).data
        offset += first * out.itemsize
        while view:
            try:
                count = os.preadv(self._fds[path], [view[:_READ_BYTES]], offset)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{path} became shorter while it was read; convert again")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _add(self, path: Path) -> None:
        size = path.stat().st_size
        header, data_start = _read_header(path, size)
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            try:
                dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            except (KeyError, TypeError, ValueError):
                raise CheckpointError(f"{path} has a damaged header at {key}; download it again") from None
            if data_start + end > size:
                raise CheckpointError(
                    f"{path} is cut short: it has {size} bytes and {key} ends at {data_start + end}; download it again"
                )
            if dtype in _ITEM_BYTES and end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
                raise CheckpointError(
                    f"{path} has a damaged header: {key} is {dtype}{list(shape)} in {end - start} bytes; "
                    "download it again"
                )
            if key in self._tensors:
                raise CheckpointError(
                    f"{key} is in both {self._places[key].path.name} {list(self._tensors[key].shape)} and "
                    f"{path.name} {list(shape)}; keep one"
                )
            self._tensors[key] = TensorInfo(_DTYPES.get(dtype, dtype), shape)
            self._places[key] = _Place(path, data_start + start)

    def _check_index(self) -> None:
        index = self._directory / INDEX_NAME
        if not index.is_file():
            return
        for key, name in _weight_map(index).items():
            if key not in self._tensors:
                raise CheckpointError(f"{index} says that {key} is in {name}, which does not hold it; download again")


def fingerprint(files: Iterable[Path]) -> str:
    """Names, sizes and times of files, and the bytes of config.json, as one hexadecimal number."""
    digest = hashlib.sha256()
    for path in sorted(files):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        if path.name == "config.json":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint, or one clear line."""
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing; give the directory of a Hugging Face checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    return weight_map


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.is_file():
        files = sorted({directory / name for name in _weight_map(index).values()})
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
        numbers = [match for match in (_NUMBERED.fullmatch(path.name) for path in files) if match]
        if numbers and len(numbers) == len(files):
            present = {int(match[1]) for match in numbers}
            lost = sorted(set(range(1, int(numbers[0][2]) + 1)) - present)
            if lost:
                raise CheckpointError(f"{directory} lacks shard {lost[0]} of {numbers[0][2]}; download it again")
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing ({len(missing)} of the {len(files)} shards in {INDEX_NAME}); download it again"
        )
    if not files:
        raise CheckpointError(
            f"{directory} holds no safetensors file; save other formats (.bin, .pt, .gguf) as safetensors first"
        )
    return files


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is cut short or no safetensors file; download it again")
            header = json.loads(file.read(length))
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a damaged header; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return header, 8 + length
