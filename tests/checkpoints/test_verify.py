"""The verifier finds every kind of damage and names it; a model directory says what it is."""

import json
import os
import shutil

import pytest
from tiny_models import tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert
from checkpoints.verify import main, verify
from flashmoe_jax.config import Family
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.experts.shard import ARRAY_NAME, shard_key
from flashmoe_jax.model_dir import DENSE_NAME, MANIFEST_NAME, ModelDirectory


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted")
    hf = write_hf_checkpoint(directory / "hf", tiny_hf_config(Family.QWEN2_MOE))
    (hf / "tokenizer.json").write_text("{}")
    return convert(hf, directory / "model")


@pytest.fixture
def model(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "model")


@pytest.fixture
def one_layer(tmp_path):
    hf = write_hf_checkpoint(tmp_path / "hf", tiny_hf_config(Family.OLMOE, num_hidden_layers=1))
    return convert(hf, tmp_path / "model")


def flip_byte(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_a_whole_directory(model, capsys):
    assert main([str(model)]) == 0
    captured = capsys.readouterr()
    assert "15 experts" in captured.out
    assert "all as they were written" in captured.out


def test_each_damaged_expert_is_named(model, capsys):
    with ModelDirectory.open(model).store() as store:
        damaged = [(0, 3), (2, 0), (2, 4)]
        for layer, expert in damaged:
            key, start, _ = store.byte_range(layer, expert)
            flip_byte(model / ARRAY_NAME / key, start + 40)
    assert main([str(model), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(d["layer"], d["expert"]) for d in report["damages"]] == damaged
    assert main([str(model)]) == 1
    out = capsys.readouterr().out
    assert "layer 2 expert 4" in out
    assert "3 are damaged" in out


def test_a_damaged_dense_weight_is_named(one_layer):
    (path,) = (one_layer / DENSE_NAME).rglob("*router.kernel/c/*/*")
    flip_byte(path, 100)
    file, weight = verify(one_layer).damages
    assert file.what == f"{path} is damaged"
    assert weight.what == "dense weight layers.0.router.kernel is damaged"
    with pytest.raises(CheckpointError, match=f"{path} is damaged"):
        ModelDirectory.open(one_layer).load_dense()


def test_a_dense_weight_that_is_cut_short(one_layer):
    (path,) = (one_layer / DENSE_NAME).rglob("*q_proj.kernel/c/*/*")
    os.truncate(path, 100)
    file, weight = verify(one_layer).damages
    assert "has 100 bytes" in file.what
    assert weight.what.startswith("dense weight layers.0.attention.q_proj.kernel: ")
    assert "\n" not in weight.what


def test_missing_parts_are_named(model):
    (model / "tokenizer.json").unlink()
    os.truncate(model / ARRAY_NAME / shard_key(1), 9000)
    damages = [damage.what for damage in verify(model).damages]
    assert damages[0] == "tokenizer.json is missing"
    assert "layer 1" in damages[1]
    shutil.rmtree(model / DENSE_NAME)
    assert sum("dense weight" in damage.what for damage in verify(model).damages) > 10


def test_directories_that_cannot_be_opened(model, tmp_path, capsys):
    assert main([str(tmp_path / "absent")]) == 2
    assert "is not a model directory" in capsys.readouterr().err
    manifest = json.loads((model / MANIFEST_NAME).read_text())

    def opening(**changes):
        (model / MANIFEST_NAME).write_text(json.dumps(manifest | changes))
        with pytest.raises(CheckpointError) as error:
            ModelDirectory.open(model)
        assert "\n" not in str(error.value)
        return str(error.value)

    newer = opening(format_version=2, created_by="flashmoe_jax 9.9")
    assert "has format 2, made by flashmoe_jax 9.9" in newer
    assert "install a newer flashmoe_jax" in newer
    assert "contradicts itself" in opening(experts=manifest["experts"] | {"checksums": [["0"] * 5]})
    assert "damaged" in opening(dense={})
    assert "format 0" in opening(format_version=0)
    (model / MANIFEST_NAME).write_text("{")
    assert main([str(model)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_the_config_survives_the_manifest(model):
    opened = ModelDirectory.open(model)
    assert opened.manifest.hf_config == tiny_hf_config(Family.QWEN2_MOE)
    assert opened.config.family is Family.QWEN2_MOE
    assert opened.manifest.dense_bytes == sum(weight.nbytes for weight in opened.load_dense().values())
