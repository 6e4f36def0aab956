"""Random checkpoints are complete, repeatable and scaled as the routers need it."""

import importlib.util
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import FAMILIES, tiny_hf_config

from checkpoints.convert import convert
from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.model_dir import ModelDirectory

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_random_checkpoint.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_random_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(script, tmp_path, name, hf_config, *options):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config))
    assert script.main(["--config", str(config), "--out", str(tmp_path / name), *options]) == 0
    return tmp_path / name


def load_all(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_checkpoint_converts(script, tmp_path, family, capsys):
    hf_config = tiny_hf_config(family, torch_dtype=None)
    hf = make(script, tmp_path, "hf", hf_config, "--overlap-layers", "2", "--overlap-tokens", "8")
    assert "consecutive-token expert overlap: " in capsys.readouterr().out
    convert(hf, tmp_path / "model")
    assert ModelDirectory.open(tmp_path / "model").config.weight_dtype == "bfloat16"


def test_values_depend_on_seed_and_name_only(script, tmp_path):
    hf_config = tiny_hf_config(Family.OLMOE, torch_dtype="float32", hidden_size=128, initializer_range=0.05)
    none = ("--overlap-layers", "0")
    once = load_all(make(script, tmp_path, "once", hf_config, "--seed", "5", *none))
    again = load_all(make(script, tmp_path, "again", hf_config, "--seed", "5", "--shard-size", "99KB", *none))
    other = load_all(make(script, tmp_path, "other", hf_config, "--seed", "6", *none))
    longer = load_all(make(script, tmp_path, "longer", hf_config | {"num_hidden_layers": 4}, "--seed", "5", *none))
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    for name, value in once.items():
        np.testing.assert_array_equal(again[name], value)
        np.testing.assert_array_equal(longer[name], value)
    assert not np.array_equal(other[key], once[key])
    assert not np.array_equal(once[key], once["model.layers.1.mlp.experts.3.up_proj.weight"])
    assert (once["model.norm.weight"] == 1).all()
    assert once["model.layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.05, rel=0.03)
    assert once["model.layers.0.self_attn.q_proj.weight"].mean() == pytest.approx(0, abs=0.002)
    assert once["model.embed_tokens.weight"].std() == pytest.approx(64 * 0.05, rel=0.03)


def test_bfloat16_without_a_stated_dtype(script, tmp_path):
    hf = make(script, tmp_path, "hf", tiny_hf_config(Family.MIXTRAL, torch_dtype=None), "--overlap-layers", "0")
    assert {value.dtype for value in load_all(hf).values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert ModelConfig.from_hf(json.loads((hf / "config.json").read_text())).weight_dtype == "bfloat16"


def test_the_overlap_of_known_choices(script):
    assert script._overlap(np.array([[0, 1], [1, 0], [1, 2], [3, 4]])) == pytest.approx((1 + 0.5 + 0) / 3)


def test_bad_input_is_one_line(script, tmp_path, capsys):
    assert script.main(["--config", str(tmp_path / "none.json"), "--out", str(tmp_path / "hf")]) == 2
    assert "is missing" in capsys.readouterr().err
