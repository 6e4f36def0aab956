"""Records keep the exact bits of an expert, whatever the shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.experts.record import RecordLayout, checksum, numpy_dtype

DTYPES = ("bfloat16", "float16", "float32")


def random_fields(layout: RecordLayout, seed: int) -> dict[str, np.ndarray]:
    """Fields of any bits at all, NaNs and denormals included."""
    random = np.random.default_rng(seed)
    return {
        f.name: np.frombuffer(random.bytes(f.num_words * numpy_dtype(f.dtype).itemsize), numpy_dtype(f.dtype)).reshape(
            f.shape
        )
        for f in layout.fields
    }


@given(width=st.integers(1, 70), hidden=st.integers(1, 70), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_round_trip_keeps_every_bit(width, hidden, dtype, seed):
    specs = (("gate_proj", (hidden, width)), ("up_proj", (hidden, width)), ("down_proj", (width, hidden)))
    layout = RecordLayout.for_experts(specs, dtype)
    fields = random_fields(layout, seed)
    words = layout.pack(fields)

    assert layout.record_bytes == words.nbytes
    assert layout.record_bytes % 4096 == 0
    assert layout.record_bytes - layout.payload_words * words.itemsize < 4096
    assert not words[layout.payload_words :].any()
    unpacked = layout.unpack(words)
    for name, field in fields.items():
        assert unpacked[name].dtype == field.dtype
        assert unpacked[name].tobytes() == field.tobytes()
        assert np.shares_memory(unpacked[name], words)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_survives_json(dtype):
    layout = RecordLayout.for_experts((("gate_proj", (3, 5)), ("down_proj", (5, 3))), dtype)
    assert RecordLayout.from_json(layout.to_json()) == layout


def test_layout_that_contradicts_itself_is_refused():
    values = RecordLayout.for_experts((("gate_proj", (3, 5)),), "float32").to_json()
    with pytest.raises(CheckpointError, match="contradicts itself"):
        RecordLayout.from_json(values | {"record_words": values["record_words"] - 1})
    with pytest.raises(CheckpointError, match="lacks"):
        RecordLayout.from_json({"fields": []})


def test_pack_refuses_other_fields_shapes_and_dtypes():
    layout = RecordLayout.for_experts((("gate_proj", (3, 5)),), "float32")
    good = np.zeros((3, 5), np.float32)
    with pytest.raises(CheckpointError, match="up_proj"):
        layout.pack({"gate_proj": good, "up_proj": good})
    with pytest.raises(CheckpointError, match=r"float32\[3, 5\]; given was float32\[5, 3\]"):
        layout.pack({"gate_proj": good.T})
    with pytest.raises(CheckpointError, match="given was float16"):
        layout.pack({"gate_proj": good.astype(np.float16)})
    with pytest.raises(CheckpointError, match="float8"):
        RecordLayout.for_experts((("gate_proj", (3, 5)),), "float8_e4m3fn")


def test_checksum_sees_every_bit():
    words = np.zeros(4096, np.uint16)
    sums = {checksum(words)}
    for position in (0, 1, 2047, 4095):
        words[position] ^= 1 << 9
        sums.add(checksum(words))
    assert len(sums) == 5
    assert checksum(words) == checksum(words.tobytes())
