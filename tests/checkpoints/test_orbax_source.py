"""An orbax tree of a supported family converts to the same model as its safetensors."""

import json

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from tiny_models import FAMILIES, random_tensors, random_weights, tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert, main
from checkpoints.verify import verify
from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.dense_store import nest
from flashmoe_jax.model_dir import ModelDirectory


def native(config, seed):
    """The tree of dense paths and stacked experts."""
    weights = random_weights(config, seed)
    experts = {
        str(layer): {field: np.stack([fields[field] for fields in layer_weights]) for field in layer_weights[0]}
        for layer, layer_weights in enumerate(weights.experts)
    }
    return {"dense": nest(weights.dense), "experts": experts}


def one_by_one(config, seed):
    """The tree of dense paths and single experts, as JAX arrays."""
    weights = random_weights(config, seed)
    experts = {
        str(layer): {str(expert): fields for expert, fields in enumerate(layer_weights)}
        for layer, layer_weights in enumerate(weights.experts)
    }
    return jax.tree.map(jax.numpy.asarray, {"dense": nest(weights.dense), "experts": experts})


FORMS = {
    "ours": native,
    "ours, one by one": one_by_one,
    "names": lambda config, seed: random_tensors(config, seed),
    "nested names": lambda config, seed: nest(random_tensors(config, seed)),
}


def write_tree(tmp_path, hf_config, form):
    directory = tmp_path / "orbax" / "params"
    directory.parent.mkdir()
    ocp.save(directory, FORMS[form](ModelConfig.from_hf(hf_config), 0))
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(hf_config))
    return directory


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", [Family.QWEN2_MOE, Family.MIXTRAL])
def test_orbax_and_safetensors_give_the_same_weights(tmp_path, family, form):
    hf_config = tiny_hf_config(family, torch_dtype="bfloat16", num_hidden_layers=2)
    directory = write_tree(tmp_path, hf_config, form)
    assert main(["--orbax", str(directory), "--out", str(tmp_path / "model")]) == 0
    convert(write_hf_checkpoint(tmp_path / "hf", hf_config), tmp_path / "same")
    found, wanted = (ModelDirectory.open(tmp_path / name).manifest for name in ("model", "same"))
    assert found.checksums == wanted.checksums
    assert found.dense == wanted.dense
    assert found.config == wanted.config
    assert verify(tmp_path / "model").damages == ()


def test_bad_trees_are_one_line(tmp_path, capsys):
    assert FAMILIES
    hf_config = tiny_hf_config(Family.OLMOE)
    directory = write_tree(tmp_path, hf_config | {"num_hidden_layers": 2}, "ours")
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(hf_config))
    assert main(["--orbax", str(directory), "--out", str(tmp_path / "model")]) == 2
    assert "lacks model.layers.2.input_layernorm.weight" in capsys.readouterr().err
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": 1}))
    assert main(["--orbax", str(directory), "--out", str(tmp_path / "model")]) == 2
    assert "error: " in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    (tmp_path / "empty").mkdir()
    assert main(["--orbax", str(tmp_path / "empty"), "--out", str(tmp_path / "model")]) == 2
    assert "not an orbax checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
