"""Dense weights survive the drive bit for bit, in however many groups they are saved and loaded."""

import os

import jax
import ml_dtypes
import numpy as np
import pytest

from flashmoe_jax import dense_store
from flashmoe_jax.dense_store import find_damage, list_files, load_dense, read_dense, save_dense
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.models.weights import WeightSpec

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def weights():
    random = np.random.default_rng(0)
    return {
        f"layers.{layer}.block.w{i}": random.standard_normal((3 + i, 5)).astype(
            ml_dtypes.bfloat16 if DTYPES[i] == "bfloat16" else DTYPES[i]
        )
        for layer in range(2)
        for i in range(3)
    } | {"norm": np.zeros(7, np.float32)}  # zeros are not left out


def specs_of(weights):
    return {path: WeightSpec(value.shape, str(value.dtype)) for path, value in weights.items()}


@pytest.mark.parametrize(("saved_bytes", "loaded_bytes"), [(1, 1 << 20), (100, 1), (1 << 20, 100)])
def test_round_trip_in_any_groups(tmp_path, monkeypatch, weights, saved_bytes, loaded_bytes):
    monkeypatch.setattr(dense_store, "_SAVED_GROUP_BYTES", saved_bytes)
    monkeypatch.setattr(dense_store, "_GROUP_BYTES", loaded_bytes)
    save_dense(tmp_path / "dense", weights.items())
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loaded = load_dense(tmp_path / "dense", specs_of(weights), sharding)
    read = dict(read_dense(tmp_path / "dense", specs_of(weights)))
    assert list(loaded) == list(read) == list(weights)
    for path, value in weights.items():
        assert loaded[path].sharding == sharding
        assert np.asarray(loaded[path]).tobytes() == value.tobytes()
        assert read[path].tobytes() == value.tobytes()
        assert read[path].dtype == value.dtype
    some = dict(read_dense(tmp_path / "dense", specs_of(weights), only=["layers.1.block.w2"]))
    assert list(some) == ["layers.1.block.w2"]


def test_an_error_while_saving_leaves_no_checkpoint(tmp_path, weights):
    def broken():
        yield from list(weights.items())[:4]
        raise CheckpointError("the source broke")

    with pytest.raises(CheckpointError, match="the source broke"):
        save_dense(tmp_path / "dense", broken())
    assert not (tmp_path / "dense").exists()


def test_other_weights_are_refused_by_name_and_shape(tmp_path, weights):
    save_dense(tmp_path / "dense", weights.items())
    specs = specs_of(weights)
    cases = {
        r"more in .* is absent, it should be float32\[2\]": specs | {"more": WeightSpec((2,), "float32")},
        r"norm in .* is float32\[7\], it should be float32\[8\]": specs | {"norm": WeightSpec((8,), "float32")},
        r"norm in .* is float32\[7\], it should be absent": {k: v for k, v in specs.items() if k != "norm"},
    }
    for message, other in cases.items():
        with pytest.raises(CheckpointError, match=message) as error:
            load_dense(tmp_path / "dense", other)
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="holds no dense weights"):
        load_dense(tmp_path / "absent", specs)


def test_missing_cut_and_damaged_files_are_found(tmp_path, weights):
    directory = tmp_path / "dense"
    save_dense(directory, weights.items())
    files = list_files(directory)
    assert list(find_damage(directory, files)) == []
    chunks = sorted(name for name in files if "/c/" in name)
    (directory / chunks[0]).unlink()
    os.truncate(directory / chunks[1], 3)
    data = bytearray((directory / chunks[2]).read_bytes())
    data[0] ^= 1
    (directory / chunks[2]).write_bytes(data)
    lines = list(find_damage(directory, files))
    assert [line.removeprefix(f"{directory}/") for line in lines] == [
        f"{chunks[0]} is missing",
        f"{chunks[1]} has 3 bytes, {files[chunks[1]].num_bytes} were written",
        f"{chunks[2]} is damaged",
    ]
