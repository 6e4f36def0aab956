"""Key sets: what transformers saves is what the name map expects, and what we write transformers loads whole."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from awkward_models import AWKWARD
from parity.hf_models import load_model, random_model
from safetensors.numpy import load_file
from tiny_models import FAMILIES, Weights, random_tensors, split_tensors, tiny_hf_config, write_hf_checkpoint

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.models.families import hf_name_map

pytestmark = pytest.mark.parity


def assert_same(ours: Weights, theirs: Weights) -> None:
    assert ours.dense.keys() == theirs.dense.keys()
    for path, array in ours.dense.items():
        np.testing.assert_array_equal(array, theirs.dense[path], err_msg=path)
    for ours_e, theirs_e in zip(np.ravel(ours.experts), np.ravel(theirs.experts), strict=True):
        assert ours_e.keys() == theirs_e.keys()
        for field, array in ours_e.items():
            np.testing.assert_array_equal(array, theirs_e[field], err_msg=field)


@pytest.mark.parametrize("name", AWKWARD)
def test_saved_keys_are_the_expected_keys(name: str, tmp_path: Path):
    config = ModelConfig.from_hf(AWKWARD[name])
    model = random_model(AWKWARD[name], seed=0)
    model.save_pretrained(tmp_path / "separate")
    separate = load_file(tmp_path / "separate" / "model.safetensors")
    assert set(separate) == set(hf_name_map(config).expected_keys())
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert_same(split_tensors(config, separate), split_tensors(config, fused))


@pytest.mark.parametrize("name", AWKWARD)
def test_transformers_loads_our_keys(name: str, tmp_path: Path):
    config = ModelConfig.from_hf(AWKWARD[name])
    model = load_model(write_hf_checkpoint(tmp_path / "ours", AWKWARD[name], seed=4))
    model.save_pretrained(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert_same(split_tensors(config, random_tensors(config, seed=4)), split_tensors(config, back))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_and_bfloat16(family: str, tmp_path: Path):
    hf_config = tiny_hf_config(family, torch_dtype="bfloat16")
    model = load_model(write_hf_checkpoint(tmp_path, hf_config, seed=4, num_shards=3))
    config = ModelConfig.from_hf(hf_config)
    weights = split_tensors(config, random_tensors(config, seed=4))
    embedding = model.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(embedding, weights.dense["embedder.embedding"].astype(np.float32))
