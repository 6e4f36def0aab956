"""Experts on the drive: `ExpertStore`, a tensorstore array of records opened for reading.

Owns the byte range of every record (from the shard indexes), the written checksums, and one reader
(`readers.py`). Knows no models, no slots and no counters. Invariant: bytes are handed over only after their checksum
was found right; a future that completes without an error means a whole, undamaged expert.
"""

import concurrent.futures
import ctypes
import itertools
import json
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from flashmoe_jax.config import ReaderName
from flashmoe_jax.errors import CheckpointError, ConfigError
from flashmoe_jax.experts.landing import ByteRange, Landing, damage, first_line
from flashmoe_jax.experts.reader_choice import fastest_reader
from flashmoe_jax.experts.readers import ArrayReader, DirectReader, RangeReader, Reader, range_bytes
from flashmoe_jax.experts.record import RecordLayout, checksum
from flashmoe_jax.experts.shard import ARRAY_FORMAT_VERSION, ARRAY_NAME, crc32c, index_bytes, shard_key

_NOT_STORED = 2**64 - 1  # zarr's index entry of a chunk that was never written

_log = logging.getLogger(__name__)


class ExpertStore:
    """The experts of one model, open for reading. Use `ExpertStore.open`; methods are thread-safe."""

    def __init__(
        self,
        *,
        array: ts.TensorStore,
        layout: RecordLayout,
        checksums: Sequence[Sequence[str]],
        starts: np.ndarray,
        io_mode: str,
        readers: dict[ReaderName, Reader],
        reader: ReaderName,
    ):
        self._array = array
        self._layout = layout
        self._checksums = checksums
        self._starts = starts
        self._io_mode = io_mode
        self._open_reads: set[concurrent.futures.Future[None]] = set()
        if reader is ReaderName.AUTO:
            reader = self._fastest(readers)
        self._reader = readers.pop(reader)
        for unused in readers.values():
            unused.close()

    @classmethod
    def open(
        cls,
        location: str | Path | dict[str, Any],
        layout: RecordLayout,
        checksums: Sequence[Sequence[str]],
        *,
        reader: str = ReaderName.AUTO,
        num_threads: int = 2,
        num_reads: int = 8,
        cache_bytes: int = 0,
        context: ts.Context | None = None,
    ) -> "ExpertStore":
        """Opens the array's metadata and shard indexes; reads no expert, but for the measurement of `auto`.

        Args:
            location: a model directory, or the URL or tensorstore kvstore spec of one (`s3://bucket/model/`).
            layout: what a record holds; the array must agree.
            checksums: `[layer][expert]`, as `record.checksum` gives them.
            reader: one of `ReaderName`; `auto` is the fastest on a local drive, else `range`.
            num_threads: workers that copy pieces into place and check records.
            num_reads: reads under way at once on a local drive.
            context: of tensorstore's, whose memory stores are seen; its other settings are replaced.
            cache_bytes: of tensorstore's cache of a store that is not local, which reader `array` fills.

        Raises:
            CheckpointError: missing or unreadable files, another format or layout, an expert that is not stored.
            ConfigError: `direct` for a store that is not local, or a cache that would do nothing.
        """
        wanted = ReaderName(reader)
        spec = _array_spec(location)
        io_mode = _io_mode(spec)
        if wanted is ReaderName.DIRECT and io_mode == "remote":
            raise ConfigError(
                f"reader direct reads local files, and {_name(spec)} is none; choose auto, range or array"
            )
        if cache_bytes:
            _check_cache(wanted, io_mode)
            wanted = ReaderName.ARRAY
        context = ts.Context(
            {
                "file_io_concurrency": {"limit": num_reads},
                **({"cache_pool": {"total_bytes_limit": cache_bytes}} if cache_bytes else {}),
                **({"file_io_mode": {"mode": "direct"}} if io_mode == "direct" else {}),
            },
            parent=context,
        )
        try:
            kvstore = ts.KvStore.open(spec, context=context).result()
            metadata = kvstore.read("zarr.json").result()
        except ValueError as error:
            raise CheckpointError(f"the expert array at {_name(spec)} cannot be opened: {first_line(error)}") from None
        if metadata.state != "value":
            raise CheckpointError(
                f"{_name(spec)} holds no expert array (zarr.json is missing); convert the model again"
            )
        shape = (len(checksums), len(checksums[0]), layout.record_words)
        _check_metadata(metadata.value, shape, layout, _name(spec))
        array = ts.open({"driver": "zarr3", "kvstore": spec}, context=context, open=True, read=True).result()
        starts = _read_indexes(kvstore, shape[0], shape[1], layout.record_bytes, _name(spec))
        retain_freed_memory()
        if wanted is ReaderName.AUTO and io_mode == "remote":
            wanted = ReaderName.RANGE
        make = {
            ReaderName.ARRAY: lambda: ArrayReader(array, layout.word_dtype, num_threads),
            ReaderName.RANGE: lambda: RangeReader(kvstore, num_threads),
            ReaderName.DIRECT: lambda: DirectReader(Path(spec["path"]), num_reads, is_direct=io_mode == "direct"),
        }
        names = list(make) if wanted is ReaderName.AUTO else [wanted]
        return cls(
            array=array,
            layout=layout,
            checksums=checksums,
            starts=starts,
            io_mode=io_mode,
            readers={name: make[name]() for name in names},
            reader=wanted,
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
    def reader(self) -> str:
        """Name of the reader in use."""
        return self._reader.name

    @property
    def transient_bytes_per_read(self) -> int:
        """Most memory that one `read_into` holds besides its destination."""
        return self._reader.transient_bytes(self._layout.record_bytes)

    def byte_range(self, layer: int, expert: int) -> ByteRange:
        """Where a record stands in its shard."""
        start = int(self._starts[layer, expert])
        return ByteRange(shard_key(layer), start, start + self._layout.record_bytes)

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
        landing = self._landing(layer, expert, out_words.view(np.uint8))
        self._open_reads.add(landing.future)
        landing.future.add_done_callback(self._open_reads.discard)
        self._reader.begin(landing)
        return landing.future

    def read_array(self, layer: int, expert: int) -> ts.Future:
        """Begins an unchecked read through the tensorstore array; the result is words `[record_words]`."""
        return self._array[layer, expert].read()

    def check(self, layer: int, expert: int, words: np.ndarray | bytes) -> None:
        """Raises DamagedRecordError unless `words` are the record's bytes as they were written."""
        place, written = self.byte_range(layer, expert), self._checksums[layer][expert]
        error = damage(layer, expert, place, checksum(words), written)
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits for begun reads; afterwards no memory of a caller is written any more."""
        concurrent.futures.wait(tuple(self._open_reads))
        self._reader.close()

    def __enter__(self) -> "ExpertStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _landing(self, layer: int, expert: int, out: np.ndarray) -> Landing:
        return Landing(layer, expert, self.byte_range(layer, expert), self._checksums[layer][expert], out)

    def _fastest(self, readers: dict[ReaderName, Reader]) -> ReaderName:
        def ids() -> Iterator[tuple[int, int]]:
            # Spread over layers and experts: what was just read is not read again soon.
            for i in itertools.count():
                yield i % self.num_layers, (i * 7 + i // self.num_layers) % self.num_experts

        try:
            return fastest_reader(readers, self._landing, ids(), self._layout.record_bytes)
        except CheckpointError as error:
            # Whoever needs that record will be told; others may never ask for it.
            _log.warning("the readers are not measured: %s", error)
            return ReaderName.RANGE


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


def _check_cache(reader: ReaderName, io_mode: str) -> None:
    if io_mode != "remote":
        raise ConfigError("a cache of records is for stores that are not local; leave it out")
    if reader not in (ReaderName.AUTO, ReaderName.ARRAY):
        raise ConfigError(
            f"the cache is filled by reader array, and reader {reader} is asked for; choose auto or array"
        )


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
            data = range_bytes(future)
        except ValueError as error:
            raise CheckpointError(f"{where} cannot be read: {first_line(error)}; convert the model again") from None
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
