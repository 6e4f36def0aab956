"""tensorstore reads what our shard writer wrote, and the file is as the reader of byte ranges needs it."""

import json

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.experts.shard import (
    ShardWriter,
    array_metadata,
    crc32c,
    shard_bytes,
    shard_key,
    write_array_metadata,
)

LAYOUT = RecordLayout.for_experts((("gate_proj", (7, 11)), ("down_proj", (11, 7))), "bfloat16")


def record(seed: int) -> np.ndarray:
    words = np.zeros(LAYOUT.record_words, np.uint16)
    words[: LAYOUT.payload_words] = np.random.default_rng(seed).integers(0, 2**16, LAYOUT.payload_words)
    return words


def write_array(directory, num_layers, num_experts, order=None, seed=0):
    """Writes records in the order given and returns them as `[num_layers, num_experts, record_words]`."""
    records = np.stack([[record(seed + 1000 * layer + e) for e in range(num_experts)] for layer in range(num_layers)])
    for layer in range(num_layers):
        with ShardWriter(directory / shard_key(layer), num_experts, LAYOUT.record_bytes) as writer:
            for expert in order or range(num_experts):
                writer.append(expert, records[layer, expert])
    write_array_metadata(directory, num_layers, num_experts, LAYOUT, {"kind": "test"})
    return records


def open_array(directory):
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/"}}, open=True).result()


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(5)), num_layers=st.integers(1, 3), seed=st.integers(0, 999))
def test_tensorstore_reads_what_was_appended_in_any_order(tmp_path_factory, order, num_layers, seed):
    directory = tmp_path_factory.mktemp("array")
    records = write_array(directory, num_layers, 5, order, seed)
    array = open_array(directory)
    assert array.shape == records.shape
    assert array.chunk_layout.read_chunk.shape == (1, 1, LAYOUT.record_words)
    assert array.chunk_layout.write_chunk.shape == (1, 5, LAYOUT.record_words)
    np.testing.assert_array_equal(array.read().result(), records)


def test_every_record_starts_at_a_multiple_of_4096_and_the_index_ends_the_file(tmp_path):
    order = (3, 0, 4, 1, 2)
    records = write_array(tmp_path, 2, 5, order)
    data = (tmp_path / shard_key(1)).read_bytes()
    assert len(data) == shard_bytes(5, LAYOUT.record_bytes)
    entries = np.frombuffer(data[-84:-4], "<u8").reshape(5, 2)
    assert (entries[:, 0] % 4096 == 0).all()
    assert (entries[:, 1] == LAYOUT.record_bytes).all()
    for expert, (start, size) in enumerate(entries.tolist()):
        assert data[start : start + size] == records[1, expert].tobytes()
        assert start == order.index(expert) * LAYOUT.record_bytes


def test_the_file_equals_one_that_tensorstore_writes_itself(tmp_path):
    records = write_array(tmp_path / "ours", 1, 4)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/theirs/"},
        "metadata": array_metadata(1, 4, LAYOUT),
    }
    ts.open(spec, create=True).result().write(records).result()
    assert (tmp_path / "ours" / shard_key(0)).read_bytes() == (tmp_path / "theirs" / shard_key(0)).read_bytes()


def test_an_expert_of_zeros_is_stored(tmp_path):
    with ShardWriter(tmp_path / shard_key(0), 2, LAYOUT.record_bytes) as writer:
        for expert in range(2):
            writer.append(expert, np.zeros(LAYOUT.record_words, np.uint16))
    assert (tmp_path / shard_key(0)).stat().st_size == shard_bytes(2, LAYOUT.record_bytes)


def test_attributes_describe_the_record(tmp_path):
    write_array(tmp_path, 1, 2)
    attributes = json.loads((tmp_path / "zarr.json").read_text())["attributes"]
    assert RecordLayout.from_json(attributes["record"]) == LAYOUT
    assert attributes["format_version"] == 1
    assert attributes["source"] == {"kind": "test"}


def test_an_aborted_or_incomplete_shard_leaves_no_file(tmp_path):
    path = tmp_path / shard_key(0)
    with pytest.raises(IndexError), ShardWriter(path, 2, LAYOUT.record_bytes) as writer:
        writer.append(2, record(0))
    assert list(path.parent.iterdir()) == []
    with pytest.raises(AssertionError, match="not written"), ShardWriter(path, 2, LAYOUT.record_bytes) as writer:
        writer.append(1, record(0))
    assert list(path.parent.iterdir()) == []


def test_crc32c_of_known_data():
    # RFC 3720, B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
