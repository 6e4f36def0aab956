"""Export gives back the checkpoint that was converted, bit for bit."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import FAMILIES, tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert
from checkpoints.export import export, main
from flashmoe_jax.config import Family
from flashmoe_jax.experts.shard import ARRAY_NAME, shard_key
from flashmoe_jax.model_dir import ModelDirectory


def load_all(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_tensors(found, wanted):
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert found[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path, family, dtype):
    hf_config = tiny_hf_config(family, torch_dtype=dtype)
    hf = write_hf_checkpoint(tmp_path / "hf", hf_config, num_shards=2)
    (hf / "tokenizer.json").write_text('{"a": 1}')
    convert(hf, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "back")
    assert_same_tensors(load_all(tmp_path / "back"), load_all(hf))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == hf_config
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}'
    assert [p.name for p in (tmp_path / "back").glob("*.safetensors")] == ["model.safetensors"]


def test_shards_and_their_index(tmp_path, capsys):
    hf = write_hf_checkpoint(tmp_path / "hf", tiny_hf_config(Family.OLMOE))
    convert(hf, tmp_path / "model")
    assert main([str(tmp_path / "model"), "--out", str(tmp_path / "back"), "--shard-size", "20KB"]) == 0
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    tensors = load_all(tmp_path / "back")
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name in set(index["weight_map"].values()):
        shard = load_file(tmp_path / "back" / name)
        assert all(index["weight_map"][key] == name for key in shard)
        assert sum(tensor.nbytes for tensor in shard.values()) <= 20_000
    assert_same_tensors(tensors, load_all(hf))
    convert(tmp_path / "back", tmp_path / "again")
    assert ModelDirectory.open(tmp_path / "again").manifest.checksums == (
        ModelDirectory.open(tmp_path / "model").manifest.checksums
    )


def test_a_cast_shows_in_the_exported_config(tmp_path):
    hf = write_hf_checkpoint(tmp_path / "hf", tiny_hf_config(Family.MIXTRAL))
    convert(hf, tmp_path / "model", "bfloat16")
    export(tmp_path / "model", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert(tmp_path / "back", tmp_path / "again")
    assert ModelDirectory.open(tmp_path / "again").config == ModelDirectory.open(tmp_path / "model").config


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys):
    hf = write_hf_checkpoint(tmp_path / "hf", tiny_hf_config(Family.OLMOE))
    convert(hf, tmp_path / "model")
    assert main([str(hf), "--out", str(tmp_path / "back")]) == 2
    assert "is not a model directory" in capsys.readouterr().err
    assert main([str(tmp_path / "model"), "--out", str(hf)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([str(tmp_path / "model"), "--out", str(tmp_path / "back"), "--shard-size", "many"]) == 2
    assert "many" in capsys.readouterr().err
    path = tmp_path / "model" / ARRAY_NAME / shard_key(1)
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[5000] ^= 1
    path.write_bytes(data)
    assert main([str(tmp_path / "model"), "--out", str(tmp_path / "back")]) == 2
    assert "layer 1 expert 1" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model"]
