"""Reads experts from the drive: `ExpertStore`, a tensorstore array of records opened for byte-range reads.

Owns the byte range of every record (from the shard indexes), the asynchronous reads, and the check of every record
against its checksum. Knows no models, no slots and no counters. Invariant: bytes are handed over only after their
checksum was found right; a future that completes without an error means a whole, undamaged expert.

`read_into` is the fast path: ranges of the shard through tensorstore's key-value layer, which works on every kvstore,
and one copy into the slot. `read_array` goes through the array itself; it is what the verifier uses.
"""

import concurrent.futures
import ctypes
import functools
import json
import logging
import math
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flashmoe_jax.errors import CheckpointError, DamagedRecordError
from flashmoe_jax.experts.record import RecordLayout, checksum
from flashmoe_jax.experts.shard import ARRAY_FORMAT_VERSION, ARRAY_NAME, crc32c, index_bytes, shard_key

# A record is read in pieces of about this size: the copy of one piece overlaps the read of the next, and a piece is
# small enough for malloc to keep its memory (see `retain_freed_memory`).
PIECE_BYTES = 1 << 20
_NOT_STORED = 2**64 - 1  # zarr's index entry of a chunk that was never written

_log = logging.getLogger(__name__)


class ByteRange(NamedTuple):
    """Where a record stands: bytes `[start, end)` of the file `key` within the array."""

    key: str
    start: int
    end: int


class ExpertStore:
    """The experts of one model, open for reading. Use `ExpertStore.open`; methods are thread-safe."""

    def __init__(
        self,
        *,
        array: ts.TensorStore,
        kvstore: ts.KvStore,
        layout: RecordLayout,
        checksums: Sequence[Sequence[str]],
        starts: np.ndarray,
        io_mode: str,
        num_threads: int,
    ):
        self._array = array
        self._kvstore = kvstore
        self._layout = layout
        self._checksums = checksums
        self._starts = starts
        self._io_mode = io_mode
        self._piece_bytes = _piece_bytes(layout.record_bytes)
        self._open_reads: set[concurrent.futures.Future[None]] = set()
        self._workers = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="expert-read")

    @classmethod
    def open(
        cls,
        location: str | Path | dict[str, Any],
        layout: RecordLayout,
        checksums: Sequence[Sequence[str]],
        *,
        num_threads: int = 2,
        num_reads: int = 8,
    ) -> "ExpertStore":
        """Opens the array's metadata and shard indexes; reads no expert.

        Args:
            location: a model directory, or the URL or tensorstore kvstore spec of one (`s3://bucket/model/`).
            layout: what a record holds; the array must agree.
            checksums: `[layer][expert]`, as `record.checksum` gives them.
            num_threads: workers that copy pieces into place and check records.
            num_reads: ranges that tensorstore reads at once from a local drive.

        Raises:
            CheckpointError: missing or unreadable files, another format or layout, an expert that is not stored.
        """
        spec = _array_spec(location)
        io_mode = _io_mode(spec)
        context = ts.Context(
            {
                "file_io_concurrency": {"limit": num_reads},
                **({"file_io_mode": {"mode": "direct"}} if io_mode == "direct" else {}),
            }
        )
        try:
            kvstore = ts.KvStore.open(spec, context=context).result()
            metadata = kvstore.read("zarr.json").result()
        except ValueError as error:
            raise CheckpointError(f"the expert array at {_name(spec)} cannot be opened: {_line(error)}") from None
        if metadata.state != "value":
            raise CheckpointError(
                f"{_name(spec)} holds no expert array (zarr.json is missing); convert the model again"
            )
        shape = (len(checksums), len(checksums[0]), layout.record_words)
        _check_metadata(metadata.value, shape, layout, _name(spec))
        array = ts.open({"driver": "zarr3", "kvstore": spec}, context=context, open=True, read=True).result()
        starts = _read_indexes(kvstore, shape[0], shape[1], layout.record_bytes, _name(spec))
        retain_freed_memory()
        return cls(
            array=array,
            kvstore=kvstore,
            layout=layout,
            checksums=checksums,
            starts=starts,
            io_mode=io_mode,
            num_threads=num_threads,
        )

    @property
    def layout(self) -> RecordLayout:
        return self._layout

    @property
    def num_layers(self) -> int:
        return self._starts.shape[0]

    @property
    def num_experts(self) -> int:
        return self._starts.shape[1]

    @property
    def io_mode(self) -> str:
        """`direct`, `buffered` (a local drive without direct reads) or `remote`."""
        return self._io_mode

    @property
    def transient_bytes_per_read(self) -> int:
        """Most memory that one `read_into` holds besides its destination: the record as read, and one piece."""
        return self._layout.record_bytes + self._piece_bytes

    def byte_range(self, layer: int, expert: int) -> ByteRange:
        """Where a record stands in its shard."""
        start = int(self._starts[layer, expert])
        return ByteRange(shard_key(layer), start, start + self._layout.record_bytes)

    def read(self, layer: int, expert: int) -> ts.Future:
        """Begins one unchecked range read of a whole record; the future's result has its bytes as `.value`."""
        key, start, end = self.byte_range(layer, expert)
        return self._kvstore.read(key, byte_range=slice(start, end))

    def read_into(self, layer: int, expert: int, out_words: np.ndarray) -> "concurrent.futures.Future[None]":
        """Begins a read of a record into memory of the caller.

        A read that has begun cannot be cancelled: `out_words` is written until the future is done, and belongs to
        nobody else until then.

        Args:
            out_words: `[record_words]`, contiguous and writable, in the layout's word dtype; overwritten.

        Returns:
            A future that completes after the checksum was found right, or with `DamagedRecordError` (bytes differ or
            are missing) or `CheckpointError` (the drive or the network failed); both name layer and expert.
        """
        assert out_words.shape == (self._layout.record_words,)
        assert out_words.dtype == np.dtype(self._layout.word_dtype)
        assert out_words.flags.c_contiguous
        assert out_words.flags.writeable
        read = _RecordRead(self, layer, expert, out_words.view(np.uint8))
        self._open_reads.add(read.future)
        read.future.add_done_callback(self._open_reads.discard)
        read.begin()
        return read.future

    def read_array(self, layer: int, expert: int) -> ts.Future:
        """Begins an unchecked read through the tensorstore array; the result is words `[record_words]`."""
        return self._array[layer, expert].read()

    def check(self, layer: int, expert: int, words: np.ndarray | bytes) -> None:
        """Raises DamagedRecordError unless `words` are the record's bytes as they were written."""
        found, written = checksum(words), self._checksums[layer][expert]
        if found != written:
            raise DamagedRecordError(
                f"{self._where(layer, expert)} is damaged: its checksum is {found}, the manifest has {written}; "
                "convert the model again"
            )

    def close(self) -> None:
        """Waits for begun reads; afterwards no memory of a caller is written any more."""
        concurrent.futures.wait(tuple(self._open_reads))
        self._workers.shutdown(wait=True)

    def __enter__(self) -> "ExpertStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _where(self, layer: int, expert: int) -> str:
        key, start, end = self.byte_range(layer, expert)
        return f"layer {layer} expert {expert} ({ARRAY_NAME}/{key}, bytes {start} to {end})"


class _RecordRead:
    """One `read_into` on its way: its pieces arrive in any order, the last one triggers the check."""

    def __init__(self, store: ExpertStore, layer: int, expert: int, out_bytes: np.ndarray):
        self._store = store
        self._layer = layer
        self._expert = expert
        self._out = out_bytes
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()

    def begin(self) -> None:
        key, start, end = self._store.byte_range(self._layer, self._expert)
        size = self._store._piece_bytes
        bounds = [(at, min(at + size, end)) for at in range(start, end, size)]
        self._num_open = len(bounds)
        for first, last in bounds:
            piece = self._store._kvstore.read(key, byte_range=slice(first, last))
            piece.add_done_callback(functools.partial(self._arrived, offset=first - start, num_bytes=last - first))

    def _arrived(self, piece: ts.Future, *, offset: int, num_bytes: int) -> None:
        # This runs in a thread of tensorstore's, which must not be kept from the next read.
        self._store._workers.submit(self._land, piece, offset, num_bytes)

    def _land(self, piece: ts.Future, offset: int, num_bytes: int) -> None:
        try:
            data = _value(piece)
            if len(data) != num_bytes:
                raise ValueError(f"{len(data)} of {num_bytes} bytes could be read")
            self._out[offset : offset + num_bytes] = np.frombuffer(data, np.uint8)
        except Exception as error:
            self._error = error
        with self._lock:
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            self._finish()

    def _finish(self) -> None:
        where = self._store._where(self._layer, self._expert)
        try:
            if isinstance(self._error, ValueError):
                # tensorstore reports a range beyond the end of a file, a missing key and an I/O error alike.
                raise DamagedRecordError(f"{where} cannot be read: {_line(self._error)}") from None
            if self._error is not None:
                raise CheckpointError(f"{where} cannot be read: {_line(self._error)}") from None
            self._store.check(self._layer, self._expert, self._out)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


def retain_freed_memory() -> None:
    """Tells glibc's malloc to keep freed blocks of up to 32 MiB instead of giving them back to the system.

    Every piece read is a fresh allocation; without this each one is mapped, zeroed page by page and unmapped, which
    costs more CPU than the read itself. Two arenas, and at most 64 MiB kept at the top of one, bound what is kept.
    Does nothing where the C library is another one.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
        libc.mallopt(m_arena_max, 2)
        libc.mallopt(m_mmap_threshold, 32 << 20)
        libc.mallopt(m_trim_threshold, 64 << 20)


def _piece_bytes(record_bytes: int) -> int:
    """Size of the pieces of a record: equal, of whole pages, near PIECE_BYTES."""
    num_pieces = max(1, round(record_bytes / PIECE_BYTES))
    return math.ceil(record_bytes / num_pieces / mmap.PAGESIZE) * mmap.PAGESIZE


def _array_spec(location: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The kvstore spec of the array inside a model directory, however that is named."""
    if isinstance(location, dict):
        spec = dict(location)
    elif isinstance(location, str) and "://" in location:
        spec = ts.KvStore.Spec(location).to_json()
    else:
        spec = {"driver": "file", "path": str(Path(location).absolute())}
    spec["path"] = f"{spec.get('path', '').rstrip('/')}/{ARRAY_NAME}/".lstrip("/" if spec["driver"] != "file" else "")
    return spec


def _name(spec: dict[str, Any]) -> str:
    return spec["path"] if spec["driver"] == "file" else f"{spec['driver']}:{spec['path']}"


def _line(error: BaseException) -> str:
    """The first line of a tensorstore error, without its source locations."""
    return str(error).split("\n")[0].split(" [tensorstore_spec")[0].strip()


def _io_mode(spec: dict[str, Any]) -> str:
    """Whether the drive under a local array takes direct reads, found by making one; says so once if not."""
    if spec["driver"] != "file":
        return "remote"
    try:
        fd = os.open(os.path.join(spec["path"], "zarr.json"), os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            if hasattr(os, "O_DIRECT"):
                os.preadv(fd, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
                return "direct"
        finally:
            os.close(fd)
    except FileNotFoundError:
        return "buffered"  # opening the array will say what is missing
    except OSError:
        pass
    _log.warning("%s does not take direct reads; experts are read through the page cache", _name(spec))
    return "buffered"


def _check_metadata(data: bytes, shape: tuple[int, ...], layout: RecordLayout, name: str) -> None:
    try:
        metadata = json.loads(data)
        attributes = metadata["attributes"]
        version, record = attributes["format_version"], attributes["record"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{name}zarr.json is damaged; convert the model again") from None
    if version != ARRAY_FORMAT_VERSION:
        raise CheckpointError(
            f"{name} has format {version}; this version reads format {ARRAY_FORMAT_VERSION}: "
            "install the flashmoe_jax that wrote it, or convert the model again"
        )
    if tuple(metadata.get("shape", ())) != shape or metadata.get("data_type") != layout.word_dtype:
        raise CheckpointError(
            f"{name} is {metadata.get('data_type')}{metadata.get('shape')}, "
            f"the manifest describes {layout.word_dtype}{list(shape)}; convert the model again"
        )
    if RecordLayout.from_json(record) != layout:
        raise CheckpointError(f"{name} and the manifest lay records out differently; convert the model again")


def _read_indexes(kvstore: ts.KvStore, num_layers: int, num_experts: int, record_bytes: int, name: str) -> np.ndarray:
    """Start of every record in its shard, `[num_layers, num_experts]` int64, from the ends of the shard files."""
    size = index_bytes(num_experts)
    pending = [kvstore.read(shard_key(layer), byte_range=slice(-size, None)) for layer in range(num_layers)]
    starts = np.empty((num_layers, num_experts), np.int64)
    for layer, future in enumerate(pending):
        where = f"{name}{shard_key(layer)} (layer {layer})"
        try:
            data = _value(future)
        except ValueError as error:
            raise CheckpointError(f"{where} cannot be read: {_line(error)}; convert the model again") from None
        if len(data) != size or struct.unpack("<I", data[-4:])[0] != crc32c(data[:-4]):
            raise CheckpointError(f"{where} is cut short or its index is damaged; convert the model again")
        entries = np.frombuffer(data[:-4], "<u8").reshape(num_experts, 2)
        for expert, (start, num_bytes) in enumerate(entries.tolist()):
            if start == _NOT_STORED:
                raise CheckpointError(f"{where} lacks expert {expert}; convert the model again")
            if num_bytes != record_bytes:
                raise CheckpointError(
                    f"{where} holds {num_bytes} bytes for expert {expert}, a record has {record_bytes}; "
                    "convert the model again"
                )
        starts[layer] = entries[:, 0]
    return starts


def _value(future: ts.Future) -> bytes:
    """Bytes of a kvstore read. Raises ValueError where there are none."""
    result = future.result()
    if result.state != "value":
        raise ValueError("the file is missing")
    return result.value
