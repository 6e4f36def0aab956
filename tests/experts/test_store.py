"""The store hands over whole, checked experts, or an error that names the layer and the expert."""

import concurrent.futures
import ctypes
import fcntl
import logging
import mmap
import os
import shutil
import struct

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.errors import CheckpointError, ConfigError, DamagedRecordError
from flashmoe_jax.experts import store as store_module
from flashmoe_jax.experts.readers import DirectReader, Reader
from flashmoe_jax.experts.record import RecordLayout, checksum
from flashmoe_jax.experts.shard import ARRAY_NAME, ShardWriter, crc32c, shard_key, write_array_metadata
from flashmoe_jax.experts.store import ExpertStore

NUM_LAYERS, NUM_EXPERTS = 2, 5
# Larger than one piece, so that a record arrives in several.
LARGE = RecordLayout.for_experts((("gate_proj", (700, 1000)), ("down_proj", (1000, 701))), "float32")
SMALL = RecordLayout.for_experts((("gate_proj", (7, 11)), ("down_proj", (11, 7))), "bfloat16")


def write_store(directory, layout, seed=0):
    """Returns `[layer, expert, record_words]` and the checksums."""
    random = np.random.default_rng(seed)
    shape = (NUM_LAYERS, NUM_EXPERTS, layout.record_words)
    records = random.integers(0, np.iinfo(layout.word_dtype).max, shape, layout.word_dtype)
    for layer in range(NUM_LAYERS):
        path = directory / ARRAY_NAME / shard_key(layer)
        with ShardWriter(path, NUM_EXPERTS, layout.record_bytes) as writer:
            for expert in random.permutation(NUM_EXPERTS).tolist():
                writer.append(expert, records[layer, expert])
    write_array_metadata(directory / ARRAY_NAME, NUM_LAYERS, NUM_EXPERTS, layout, {})
    return records, [[checksum(record) for record in layer] for layer in records]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    return directory, *write_store(directory, LARGE)


@pytest.fixture(scope="module", params=["array", "range", "direct"])
def reader(request):
    return request.param


@pytest.fixture
def small(tmp_path):
    return tmp_path, *write_store(tmp_path, SMALL)


def flip_byte(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def all_ids():
    return [(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]


def test_reads_in_flight_together_land_where_they_were_sent(large, reader):
    directory, records, checksums = large
    with ExpertStore.open(directory, LARGE, checksums, reader=reader) as store:
        assert (store.num_layers, store.num_experts) == (NUM_LAYERS, NUM_EXPERTS)
        slots = np.zeros_like(records)
        reads = [store.read_into(layer, expert, slots[layer, expert]) for layer, expert in all_ids()]
        concurrent.futures.wait(reads)
        assert [read.exception() for read in reads] == [None] * len(reads)
    np.testing.assert_array_equal(slots, records)


@settings(deadline=None, max_examples=25)
@given(ids=st.lists(st.sampled_from(all_ids()), min_size=1, max_size=8))
def test_any_sequence_of_reads_through_any_path(large, ids, reader):
    directory, records, checksums = large
    with ExpertStore.open(directory, LARGE, checksums, reader=reader, num_threads=3) as store:
        out = np.zeros((len(ids), LARGE.record_words), LARGE.word_dtype)
        reads = [store.read_into(layer, expert, out[i]) for i, (layer, expert) in enumerate(ids)]
        for i, (layer, expert) in enumerate(ids):
            reads[i].result()
            np.testing.assert_array_equal(out[i], records[layer, expert])
            np.testing.assert_array_equal(store.read_array(layer, expert).result(), records[layer, expert])


def test_byte_ranges_are_aligned_and_one_per_expert(large):
    directory, _records, checksums = large
    with ExpertStore.open(directory, LARGE, checksums, reader="range") as store:
        ranges = {store.byte_range(layer, expert) for layer, expert in all_ids()}
        assert len(ranges) == NUM_LAYERS * NUM_EXPERTS
        for key, start, end in ranges:
            assert start % 4096 == 0
            assert end - start == LARGE.record_bytes
            assert key in (shard_key(0), shard_key(1))


def test_nothing_but_the_record_is_written(small, reader):
    directory, records, checksums = small
    block = np.full((3, SMALL.record_words), 7, SMALL.word_dtype)
    with ExpertStore.open(directory, SMALL, checksums, reader=reader) as store:
        store.read_into(1, 4, block[1]).result()
    np.testing.assert_array_equal(block, np.stack([block[0] * 0 + 7, records[1, 4], block[0] * 0 + 7]))


def test_opening_reads_no_expert(small):
    directory, _, checksums = small
    for layer in range(NUM_LAYERS):
        flip_byte(directory / ARRAY_NAME / shard_key(layer), 17)
    with ExpertStore.open(directory, SMALL, checksums):
        pass


@pytest.mark.parametrize("expert", range(NUM_EXPERTS))
def test_one_flipped_bit_is_found_and_named(small, expert, reader):
    directory, records, checksums = small
    with ExpertStore.open(directory, SMALL, checksums, reader=reader) as store:
        key, _start, end = store.byte_range(1, expert)
        flip_byte(directory / ARRAY_NAME / key, end - 1)  # in the padding, which is checked too
        out = np.zeros(SMALL.record_words, SMALL.word_dtype)
        with pytest.raises(DamagedRecordError, match=f"layer 1 expert {expert} .*c/1/0/0.* is damaged"):
            store.read_into(1, expert, out).result()
        store.read_into(1, (expert + 1) % NUM_EXPERTS, out).result()
        np.testing.assert_array_equal(out, records[1, (expert + 1) % NUM_EXPERTS])


def test_a_shard_that_shrinks_or_vanishes_after_opening(small, reader):
    directory, _, checksums = small
    out = np.zeros(SMALL.record_words, SMALL.word_dtype)
    with ExpertStore.open(directory, SMALL, checksums, reader=reader) as store:
        last = max(range(NUM_EXPERTS), key=lambda e: store.byte_range(0, e).start)
        os.truncate(directory / ARRAY_NAME / shard_key(0), store.byte_range(0, last).start + 100)
        with pytest.raises(DamagedRecordError, match=f"layer 0 expert {last}"):
            store.read_into(0, last, out).result()
        (directory / ARRAY_NAME / shard_key(1)).unlink()
        with pytest.raises(DamagedRecordError, match=r"layer 1 expert 2 .*(missing|No such file|damaged)"):
            store.read_into(1, 2, out).result()


def test_damaged_metadata_and_indexes_are_refused_by_name(small, tmp_path):
    directory, _, checksums = small
    array = directory / ARRAY_NAME

    def damaged(change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(array, copy / ARRAY_NAME)
        change(copy / ARRAY_NAME)
        with pytest.raises(CheckpointError) as error:
            ExpertStore.open(copy, SMALL, checksums)
        assert "\n" not in str(error.value)
        return str(error.value)

    def drop_expert(root):
        path = root / shard_key(1)
        data = bytearray(path.read_bytes())
        data[-84 + 32 : -84 + 48] = b"\xff" * 16
        data[-4:] = struct.pack("<I", crc32c(bytes(data[-84:-4])))
        path.write_bytes(data)

    def make_newer(root):
        path = root / "zarr.json"
        path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))

    assert "index is damaged" in damaged(lambda root: flip_byte(root / shard_key(0), SMALL.record_bytes * 5))
    assert "layer 1" in damaged(lambda root: (root / shard_key(1)).unlink())
    assert "layer 0" in damaged(lambda root: os.truncate(root / shard_key(0), SMALL.record_bytes * 3))
    assert "layer 0" in damaged(lambda root: os.truncate(root / shard_key(0), 10))
    assert "lacks expert 2" in damaged(drop_expert)
    assert "zarr.json" in damaged(lambda root: (root / "zarr.json").unlink())
    assert "zarr.json is damaged" in damaged(lambda root: (root / "zarr.json").write_text("{"))
    assert "format 2" in damaged(make_newer)


def test_another_layout_or_shape_is_refused(small):
    directory, _, checksums = small
    with pytest.raises(CheckpointError, match="manifest describes"):
        ExpertStore.open(directory, LARGE, checksums, reader="range")
    with pytest.raises(CheckpointError, match="manifest describes"):
        ExpertStore.open(directory, SMALL, checksums[:1])
    other = RecordLayout.for_experts((("gate_proj", (11, 7)), ("down_proj", (7, 11))), "bfloat16")
    with pytest.raises(CheckpointError, match="lay records out differently"):
        ExpertStore.open(directory, other, checksums)


def test_closing_waits_for_reads_on_their_way(large, reader):
    directory, records, checksums = large
    store = ExpertStore.open(directory, LARGE, checksums, reader=reader)
    out = np.zeros_like(records[0])
    reads = [store.read_into(0, expert, out[expert]) for expert in range(NUM_EXPERTS)]
    store.close()
    assert all(read.done() for read in reads)
    np.testing.assert_array_equal(out, records[0])


def test_reads_cannot_be_cancelled_once_begun(small, reader):
    directory, _, checksums = small
    with ExpertStore.open(directory, SMALL, checksums, reader=reader) as store:
        read = store.read_into(0, 0, np.zeros(SMALL.record_words, SMALL.word_dtype))
        assert not read.cancel()
        read.result()


def test_urls_and_kvstore_specs_open_the_same_store(small, reader):
    directory, records, checksums = small
    out = np.zeros(SMALL.record_words, SMALL.word_dtype)
    for location in (f"file://{directory}/", {"driver": "file", "path": f"{directory}/"}, str(directory)):
        with ExpertStore.open(location, SMALL, checksums, reader=reader) as store:
            store.read_into(1, 3, out).result()
        np.testing.assert_array_equal(out, records[1, 3])


def test_direct_reads_leave_the_page_cache_alone(large, reader):
    directory, _, checksums = large
    with ExpertStore.open(directory, LARGE, checksums, reader=reader) as store:
        if store.io_mode != "direct":
            pytest.skip("the temporary folder's file system takes no direct reads")
        path = directory / ARRAY_NAME / shard_key(0)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = cached_pages(path)
        out = np.zeros(LARGE.record_words, LARGE.word_dtype)
        for expert in range(NUM_EXPERTS):
            store.read_into(0, expert, out).result()
        # The array reads its index again, through the cache.
        assert cached_pages(path) <= before + (reader == "array")


def cached_pages(path):
    """Pages of a file that the page cache holds, by mincore(2)."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        size = len(view)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(view, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p))
        assert result == 0
        return int((pages & 1).sum())


def test_a_drive_without_direct_reads_is_said_once_and_read_through_the_cache(small, monkeypatch, caplog):
    directory, records, checksums = small

    preadv = os.preadv

    def refuse(fd, *arguments):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", refuse)
    with caplog.at_level(logging.WARNING), ExpertStore.open(directory, SMALL, checksums) as store:
        assert store.io_mode == "buffered"
        out = np.zeros(SMALL.record_words, SMALL.word_dtype)
        for expert in range(NUM_EXPERTS):
            store.read_into(0, expert, out).result()
            np.testing.assert_array_equal(out, records[0, expert])
    assert len(caplog.records) == 1
    assert "does not take direct reads" in caplog.text


def test_auto_takes_a_reader_that_reads_what_the_array_reads(small, caplog):
    directory, records, checksums = small
    out = np.zeros(SMALL.record_words, SMALL.word_dtype)
    with ExpertStore.open(directory, SMALL, checksums) as store:
        assert store.reader in ("array", "range", "direct")
        store.read_into(0, 1, out).result()
    np.testing.assert_array_equal(out, records[0, 1])
    assert not caplog.records


class Wrong(Reader):
    """Is quick, and says that it read what it did not."""

    name = "range"

    def begin(self, landing):
        landing.out[:] = 1
        landing.future.set_result(None)

    def transient_bytes(self, record_bytes):
        return 0

    def close(self):
        pass


def test_auto_leaves_out_a_reader_that_reads_other_bytes_or_fails(small, monkeypatch, caplog):
    directory, _, checksums = small
    monkeypatch.setattr(store_module, "RangeReader", lambda *_: Wrong())
    monkeypatch.setattr(DirectReader, "_open", lambda *_: os.open(directory / "missing", os.O_RDONLY))
    with ExpertStore.open(directory, SMALL, checksums) as store:
        assert store.reader == "array"
    assert "range is not used: it read other bytes" in caplog.text
    assert "direct is not used: layer" in caplog.text


def test_a_damaged_record_does_not_keep_auto_from_opening(small):
    directory, _, checksums = small
    for layer in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            flip_byte(directory / ARRAY_NAME / shard_key(layer), expert * SMALL.record_bytes)
    out = np.zeros(SMALL.record_words, SMALL.word_dtype)
    with ExpertStore.open(directory, SMALL, checksums) as store, pytest.raises(DamagedRecordError):
        store.read_into(0, 1, out).result()


def test_direct_wants_files_and_a_cache_wants_none(small):
    directory, _, checksums = small
    with pytest.raises(ConfigError, match="reader direct reads local files"):
        ExpertStore.open({"driver": "memory", "path": "m/"}, SMALL, checksums, reader="direct")
    with pytest.raises(ConfigError, match="a cache of records is for stores that are not local"):
        ExpertStore.open(directory, SMALL, checksums, cache_bytes=1 << 20)


@pytest.mark.parametrize("reader_name", ["auto", "range", "array"])
def test_a_store_that_is_not_local(small, reader_name):
    directory, records, checksums = small
    context = ts.Context()
    memory = ts.KvStore.open({"driver": "memory", "path": "m/"}, context=context).result()
    for path in (p for p in directory.rglob("*") if p.is_file()):
        memory.write(path.relative_to(directory).as_posix(), path.read_bytes()).result()
    out = np.zeros(SMALL.record_words, SMALL.word_dtype)
    with ExpertStore.open(
        {"driver": "memory", "path": "m/"}, SMALL, checksums, reader=reader_name, context=context
    ) as store:
        assert store.io_mode == "remote"
        assert store.reader == ("array" if reader_name == "array" else "range")
        store.read_into(1, 2, out).result()
    np.testing.assert_array_equal(out, records[1, 2])
