import json
from pathlib import Path

import pytest

from flashmoe_jax.errors import CheckpointError, ConfigError
from flashmoe_jax.text import GenerationDefaults, SamplingParams


def write(directory: Path, name: str, **fields: object) -> None:
    (directory / name).write_text(json.dumps(fields), encoding="utf-8")


def test_an_empty_directory_means_greedy(tmp_path: Path):
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert defaults == GenerationDefaults()
    assert not defaults.do_sample
    assert SamplingParams().is_greedy


def test_qwen3_defaults(tmp_path: Path):
    write(
        tmp_path,
        "generation_config.json",
        bos_token_id=151643,
        do_sample=True,
        eos_token_id=[151645, 151643],
        pad_token_id=151643,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        transformers_version="4.51.0",
        max_new_tokens=64,
    )
    write(tmp_path, "config.json", eos_token_id=7)
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert defaults.do_sample
    assert defaults.sampling == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert defaults.eos_token_ids == (151645, 151643)
    assert defaults.max_new_tokens == 64
    assert defaults.unused == ()


@pytest.mark.parametrize("where", ["config.json", "manifest.json"])
def test_end_ids_of_the_model_config(tmp_path: Path, where: str):
    config = {"eos_token_id": 50279}
    write(tmp_path, where, **(config if where == "config.json" else {"hf_config": config}))
    write(tmp_path, "generation_config.json", eos_token_id=None)
    assert GenerationDefaults.from_dir(tmp_path).eos_token_ids == (50279,)


def test_fields_that_are_not_followed_are_named(tmp_path: Path):
    write(tmp_path, "generation_config.json", num_beams=4, typical_p=1.0, no_repeat_ngram_size=3)
    assert GenerationDefaults.from_dir(tmp_path).unused == ("no_repeat_ngram_size", "num_beams")


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0},
        {"temperature": "hot"},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [True]},
        {"max_new_tokens": 0},
        {"top_k": -1},
    ],
)
def test_bad_values_are_refused_with_the_file(tmp_path: Path, fields: dict):
    write(tmp_path, "generation_config.json", **fields)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        GenerationDefaults.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, r"temperature is -1; it must be 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is "),
    ],
)
def test_ranges_of_the_parameters(fields: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**fields)
