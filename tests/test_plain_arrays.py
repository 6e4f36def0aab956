"""Dense weights read as plain files equal what orbax reads, and everything else is left to orbax."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from tiny_models import tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert
from flashmoe_jax import model_dir as model_dir_module
from flashmoe_jax.dense_store import load_dense, nest, quiet_orbax, save_dense
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.experts.record import checksum
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.models.weights import WeightSpec
from flashmoe_jax.plain_arrays import find_plain, read_plain

DEVICE = jax.devices()[0]


def weights_of(dtype: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"a.kernel": (300, 41), "a.scale": (7,), "b.deep.kernel": (1, 2048), "c": (2048, 2)}
    return {path: np.asarray(jax.numpy.asarray(random.normal(size=shape), dtype)) for path, shape in shapes.items()}


def specs_of(weights: dict[str, np.ndarray]) -> dict[str, WeightSpec]:
    return {path: WeightSpec(weight.shape, str(weight.dtype)) for path, weight in weights.items()}


def checksums_of(weights: dict[str, np.ndarray]) -> dict[str, str]:
    return {path: checksum(np.ascontiguousarray(w).reshape(-1).view(np.uint8)) for path, w in weights.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equals_orbax(dtype: str, tmp_path: Path):
    weights = weights_of(dtype)
    specs = specs_of(weights)
    save_dense(tmp_path / "dense", weights.items())
    arrays = find_plain(tmp_path / "dense", specs)
    assert arrays is not None
    plain, by_orbax = read_plain(arrays, checksums_of(weights), DEVICE), load_dense(tmp_path / "dense", specs)
    assert list(plain) == list(by_orbax)
    for path, weight in weights.items():
        assert plain[path].dtype == by_orbax[path].dtype == weight.dtype
        np.testing.assert_array_equal(np.asarray(plain[path]).view(np.uint8), weight.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(plain[path]).view(np.uint8), np.asarray(by_orbax[path]).view(np.uint8))


def test_a_compressed_checkpoint_is_left_to_orbax(tmp_path: Path):
    weights = weights_of("float32")
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    with quiet_orbax(), context:
        ocp.save(tmp_path / "dense", nest(weights))
    assert find_plain(tmp_path / "dense", specs_of(weights)) is None


def test_other_specs_and_missing_files_are_left_to_orbax(tmp_path: Path):
    weights = weights_of("float32")
    specs = specs_of(weights)
    save_dense(tmp_path / "dense", weights.items())
    assert find_plain(tmp_path / "dense", specs | {"c": WeightSpec((2048, 3), "float32")}) is None
    assert find_plain(tmp_path / "dense", specs | {"c": WeightSpec((2048, 2), "bfloat16")}) is None
    assert find_plain(tmp_path / "dense", specs | {"d": WeightSpec((2,), "float32")}) is None
    with open(tmp_path / "dense/state/c/c/0/0", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\1")  # the index of the shard
    assert find_plain(tmp_path / "dense", specs) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return convert(write_hf_checkpoint(folder / "hf", tiny_hf_config("olmoe")), folder / "model")


def test_a_converted_model_is_read_without_orbax(model: Path, monkeypatch: pytest.MonkeyPatch):
    directory = ModelDirectory.open(model)
    by_orbax = load_dense(model / "dense", directory.dense_specs)
    monkeypatch.setattr(model_dir_module, "load_dense", None)
    for path, weight in directory.load_dense().items():
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(by_orbax[path]))


def test_other_bytes_than_were_written_are_found(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "model")
    manifest = json.loads((model / "manifest.json").read_text())
    path = next(path for path in manifest["dense"]["leaves"] if path.endswith("kernel"))
    manifest["dense"]["leaves"][path]["checksum"] = "0" * 16
    (tmp_path / "model/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"{path}/c/0/0 is damaged; convert the model again"):
        ModelDirectory.open(tmp_path / "model").load_dense()
