"""Traces: what is written is what is read, a file is whole or absent, and what is no trace is refused by name."""

import stat
from pathlib import Path

import numpy as np
import pytest

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, Trace, TraceRecorder, load_trace, popularity, save_trace

LAYERS, TOP_K = 2, 3


def recorded(experts: int, steps: int = 4) -> Trace:
    """A prompt of 5 tokens in two sequences, then decode steps, one of them without the second sequence."""
    random = np.random.RandomState(0)
    recorder = TraceRecorder({"model": "tiny", "experts": experts, "top_k": TOP_K})
    ids = random.randint(experts, size=(5, LAYERS, TOP_K))
    ids[2, 1] = -1
    recorder.add_step(ids, np.array([0, 0, 0, 1, 1]), np.arange(5), PREFILL)
    for step in range(steps):
        rows = 1 if step == 2 else 2
        ids = random.randint(experts, size=(rows, LAYERS, TOP_K))
        recorder.add_step(ids, np.arange(rows), np.full(rows, 50 + step), DECODE)
    return recorder.trace()


def test_rows_are_in_the_order_of_steps():
    trace = recorded(9)
    assert trace.step.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4]
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 7
    assert trace.seq_id.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1]
    assert trace.token.tolist() == [0, 1, 2, 3, 4, 50, 50, 51, 51, 52, 53, 53]


@pytest.mark.parametrize(("experts", "dtype"), [(9, np.uint8), (254, np.uint8), (255, np.uint16), (256, np.uint16)])
def test_round_trip(experts: int, dtype: type, tmp_path: Path):
    trace = recorded(experts)
    trace.ids[0, 0, 0] = experts - 1
    save_trace(trace, tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as archive:
        assert archive["ids"].dtype == dtype
        assert archive["ids"][2, 1].tolist() == [np.iinfo(dtype).max] * TOP_K
    again = load_trace(tmp_path / "trace.npz")
    assert again.meta == trace.meta
    for name in ("ids", "seq_id", "phase", "step", "token"):
        read, written = getattr(again, name), getattr(trace, name)
        assert read.dtype == written.dtype
        np.testing.assert_array_equal(read, written)


def test_optional_columns_have_defaults(tmp_path: Path):
    np.savez(tmp_path / "bare.npz", ids=np.array([[[1, 255]], [[0, 2]]], np.uint8))
    trace = load_trace(tmp_path / "bare.npz")
    assert trace.ids.tolist() == [[[1, -1]], [[0, 2]]]
    assert trace.seq_id.tolist() == [0, 0]
    assert trace.phase.tolist() == [DECODE, DECODE]
    assert trace.step.tolist() == [0, 1]
    assert trace.token.tolist() == [-1, -1]
    assert trace.meta == {}


def with_wide_columns(experts: int = 9, width: int = 4) -> Trace:
    """`recorded` with router logits and hidden states at random."""
    plain, random = recorded(experts), np.random.default_rng(1)
    recorder = TraceRecorder(plain.meta, ("hidden", "router_logits"))
    assert recorder.wide_columns == ("router_logits", "hidden")
    for step in range(plain.step.max() + 1):
        rows = plain.take(plain.step == step)
        wide = {
            "router_logits": random.standard_normal((len(rows.ids), LAYERS, experts)),
            "hidden": random.standard_normal((len(rows.ids), LAYERS, width)),
        }
        recorder.add_step(rows.ids, rows.seq_id, rows.token, int(rows.phase[0]), **wide)
    return recorder.trace()


def test_wide_columns_round_trip(tmp_path: Path):
    trace = with_wide_columns()
    save_trace(trace, tmp_path / "trace.npz")
    again = load_trace(tmp_path / "trace.npz")
    for name, width in (("router_logits", 9), ("hidden", 4)):
        read = getattr(again, name)
        assert read.dtype == np.float16
        assert read.shape == (len(trace.ids), LAYERS, width)
        np.testing.assert_array_equal(read, getattr(trace, name))
    part = load_trace(tmp_path / "trace.npz", wide_columns=("hidden",))
    assert part.router_logits is None
    np.testing.assert_array_equal(part.hidden, trace.hidden)
    np.testing.assert_array_equal(part.ids, trace.ids)


def test_rows_are_taken_of_every_column():
    trace = with_wide_columns()
    rows = trace.take(np.array([7, 2]))
    for name in ("ids", "seq_id", "phase", "step", "token", "router_logits", "hidden"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(trace, name)[[7, 2]])
    assert recorded(9).take(slice(3)).hidden is None


def test_what_was_taken_of_a_recorder_is_forgotten():
    recorder = TraceRecorder({"experts": 4})
    for _ in range(2):
        for step in range(2):
            recorder.add_step(np.zeros((1, 1, 1)), np.zeros(1), np.full(1, step), DECODE)
        trace = recorder.take()
        assert trace.step.tolist() == trace.token.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="the trace is empty"):
        recorder.take()


def test_the_same_trace_makes_the_same_bytes(tmp_path: Path):
    for name in ("one.npz", "two.npz"):
        save_trace(with_wide_columns(), tmp_path / name)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def test_popularity_counts_uses():
    ids = np.array([[[0, 1], [2, -1]], [[1, 3], [2, 0]]], np.int32)
    trace = recorded(4)._replace(ids=ids)
    assert popularity(trace, 2, 4).tolist() == [[1, 2, 0, 1], [1, 0, 2, 0]]
    assert popularity(trace, 2, 4).dtype == np.float32


def test_popularity_of_another_model_is_refused():
    trace = recorded(9)
    with pytest.raises(ConfigError, match=r"2 layers .* the model 3 layers x 9 experts; use a trace of this model"):
        popularity(trace, 3, 9)
    with pytest.raises(ConfigError, match=r"ids up to \d+, the model 2 layers x 2 experts"):
        popularity(trace, 2, 2)


def test_nothing_recorded_is_refused():
    with pytest.raises(ConfigError, match="the trace is empty"):
        TraceRecorder({}).trace()


def test_a_recorded_trace_does_not_change_afterwards():
    recorder = TraceRecorder({"experts": 4})
    ids, seq_id, token = np.zeros((1, 1, 1), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)
    recorder.add_step(ids, seq_id, token, DECODE)
    for array in (ids, seq_id, token):
        array += 1
    trace = recorder.trace()
    assert trace.ids.tolist() == [[[0]]]
    assert trace.seq_id.tolist() == trace.token.tolist() == [0]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch):
    target = tmp_path / "trace.npz"
    save_trace(recorded(9), target)
    before = target.read_bytes()

    def full_disk(file, array, **options):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_trace(recorded(5), target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_saved_trace_is_readable_by_others(tmp_path: Path):
    plain = tmp_path / "plain"
    plain.touch()
    save_trace(recorded(9), tmp_path / "trace.npz")
    assert stat.S_IMODE((tmp_path / "trace.npz").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


GOOD = np.zeros((3, LAYERS, TOP_K), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; record one with --trace"),
        (b"", "cannot be read"),
        (b"some text", "cannot be read"),
        (b"PK\x03\x04 not a zip", "cannot be read"),
        (GOOD, "cannot be read"),
        ({"other": GOOD}, "has no array ids"),
        ({"ids": GOOD[0]}, "has no array ids"),
        ({"ids": GOOD.astype(np.int64)}, "has no array ids"),
        ({"ids": GOOD, "meta": np.array("{not json")}, "cannot be read"),
        ({"ids": GOOD, "seq_id": np.zeros(2, np.int32)}, r"seq_id has shape \(2,\) and there are 3 rows"),
        ({"ids": GOOD, "step": np.zeros((3, 1), np.int32)}, "step has shape"),
        ({"ids": GOOD, "hidden": np.zeros((3, 3), np.float16)}, r"hidden has shape \(3, 3\) and ids are of 3 rows x 2"),
        ({"ids": GOOD, "router_logits": np.zeros((2, 2, 5), np.float16)}, "router_logits has shape"),
    ],
)
def test_what_is_no_trace_is_refused(content, message: str, tmp_path: Path):
    path = tmp_path / "trace.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        with path.open("wb") as file:
            np.save(file, content)
    elif content is not None:
        np.savez(path, **content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_trace(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cut_or_damaged_trace_is_refused(tmp_path: Path):
    path = tmp_path / "trace.npz"
    save_trace(recorded(9), path)
    whole = path.read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:-1], whole[:60] + bytes(20) + whole[80:]):
        path.write_bytes(cut)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_trace(path)
