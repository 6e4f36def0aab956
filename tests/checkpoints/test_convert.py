"""Conversion keeps every bit, refuses what does not fit, and publishes whole directories or none."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import FAMILIES, random_weights, tiny_hf_config, write_hf_checkpoint

from checkpoints import convert as convert_module
from checkpoints.convert import convert, main
from checkpoints.staging import staging_path
from checkpoints.verify import verify
from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.errors import CheckpointError, ConfigError
from flashmoe_jax.experts.shard import ShardWriter
from flashmoe_jax.model_dir import ModelDirectory

REPOSITORY = Path(__file__).resolve().parents[2]


def read_model(path):
    """Dense weights and experts of a model directory, as `tiny_models.Weights` has them."""
    model = ModelDirectory.open(path)
    dense = {name: np.asarray(value) for name, value in model.load_dense().items()}
    with model.store() as store:
        words = np.zeros((store.num_layers, store.num_experts, model.layout.record_words), model.layout.word_dtype)
        for layer in range(store.num_layers):
            for expert in range(store.num_experts):
                store.read_into(layer, expert, words[layer, expert]).result()
    return model, dense, [[model.layout.unpack(record) for record in layer] for layer in words]


def assert_same_bits(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def assert_holds(path, weights):
    _, dense, experts = read_model(path)
    assert set(dense) == set(weights.dense)
    for name, value in weights.dense.items():
        assert_same_bits(dense[name], value)
    for layer, layer_weights in enumerate(weights.experts):
        for expert, fields in enumerate(layer_weights):
            for name, value in fields.items():
                assert_same_bits(experts[layer][expert][name], value)


@pytest.fixture
def hf(tmp_path):
    return write_hf_checkpoint(tmp_path / "hf", tiny_hf_config(Family.OLMOE), num_shards=3)


def rewrite(hf, change):
    """Applies `change` to the tensors of the first shard of a checkpoint and keeps the index in step."""
    path = min(hf.glob("*.safetensors"))
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)
    index_path = hf / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    kept = {key: name for key, name in index["weight_map"].items() if name != path.name}
    index["weight_map"] = kept | dict.fromkeys(tensors, path.name)
    index_path.write_text(json.dumps(index))


def refusal(hf, out, capsys, *options):
    """Runs the command, which must fail with one line and leave nothing; returns the line."""
    assert main(["--hf", str(hf), "--out", str(out), *options]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert not out.exists()
    assert not staging_path(out).exists()
    return errors[0]


@pytest.mark.parametrize(("dtype", "num_shards"), [("float32", 1), ("bfloat16", 3), ("float16", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_arrives(tmp_path, family, num_shards, dtype):
    hf_config = tiny_hf_config(family, torch_dtype=dtype)
    hf = write_hf_checkpoint(tmp_path / "hf", hf_config, seed=3, num_shards=num_shards)
    convert(hf, tmp_path / "model")
    config = ModelConfig.from_hf(hf_config)
    assert ModelDirectory.open(tmp_path / "model").config == config
    assert_holds(tmp_path / "model", random_weights(config, 3))
    assert verify(tmp_path / "model").damages == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"family": Family.QWEN3_MOE, "mlp_only_layers": [1]},
        {"family": Family.QWEN2_MOE, "decoder_sparse_step": 2, "qkv_bias": True},
        {"num_hidden_layers": 1, "num_key_value_heads": 1},
    ],
)
def test_unusual_shapes(tmp_path, changes):
    changes = dict(changes)
    hf_config = tiny_hf_config(changes.pop("family", Family.OLMOE), **changes)
    write_hf_checkpoint(tmp_path / "hf", hf_config, seed=1)
    convert(tmp_path / "hf", tmp_path / "model")
    assert_holds(tmp_path / "model", random_weights(ModelConfig.from_hf(hf_config), 1))


def test_fused_experts_of_transformers_5(tmp_path):
    hf_config = tiny_hf_config(Family.QWEN3_MOE)
    hf = write_hf_checkpoint(tmp_path / "hf", hf_config, seed=2)
    path = hf / "model.safetensors"
    tensors = dict(load_file(path))
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: np.stack([tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(5)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        tensors[f"{prefix}.down_proj"] = parts["down_proj"]
    save_file(tensors, path)
    convert(hf, tmp_path / "model")
    assert_holds(tmp_path / "model", random_weights(ModelConfig.from_hf(hf_config), 2))


def test_dense_weights_keep_their_own_dtype(tmp_path):
    hf_config = tiny_hf_config(Family.OLMOE, torch_dtype="bfloat16")
    hf = write_hf_checkpoint(tmp_path / "hf", hf_config)
    path = hf / "model.safetensors"
    tensors = dict(load_file(path))
    router = "model.layers.1.mlp.gate.weight"
    tensors[router] = tensors[router].astype(np.float32) + np.float32(1e-4)
    save_file(tensors, path)
    convert(hf, tmp_path / "model")
    model, dense, _ = read_model(tmp_path / "model")
    assert_same_bits(dense["layers.1.router.kernel"], tensors[router])
    assert dense["layers.0.router.kernel"].dtype == ml_dtypes.bfloat16
    assert model.config.weight_dtype == "bfloat16"


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_casts(tmp_path, stored, dtype):
    hf_config = tiny_hf_config(Family.MIXTRAL, torch_dtype=stored)
    write_hf_checkpoint(tmp_path / "hf", hf_config)
    convert(tmp_path / "hf", tmp_path / "model", dtype)
    weights = random_weights(ModelConfig.from_hf(hf_config), 0)
    cast = np.dtype(dtype) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    model, dense, experts = read_model(tmp_path / "model")
    assert model.config.weight_dtype == dtype
    for name, value in weights.dense.items():
        assert_same_bits(dense[name], value.astype(cast))
    for name, value in weights.experts[2][4].items():
        assert_same_bits(experts[2][4][name], value.astype(cast))


def test_experts_of_several_dtypes_need_a_cast(hf, tmp_path, capsys):
    def change(tensors):
        key = next(key for key in tensors if ".experts." in key)
        tensors[key] = tensors[key].astype(np.float16)

    rewrite(hf, change)
    assert "several dtypes" in (line := refusal(hf, tmp_path / "model", capsys))
    assert "--dtype" in line
    assert main(["--hf", str(hf), "--out", str(tmp_path / "model"), "--dtype", "bfloat16"]) == 0


def test_tied_head_that_is_stored_too(tmp_path, capsys):
    hf = write_hf_checkpoint(tmp_path / "hf", tiny_hf_config(Family.OLMOE, tie_word_embeddings=True))
    path = hf / "model.safetensors"
    tensors = dict(load_file(path))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path)
    convert(hf, tmp_path / "model")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path)
    assert "lm_head.weight differs" in refusal(hf, tmp_path / "other", capsys)


def test_what_is_written_where_is_said_first(hf, tmp_path, capsys):
    assert main(["--hf", str(hf), "--out", str(tmp_path / "model")]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("writing ")
    assert str(tmp_path / "model") in captured.err.splitlines()[0]
    assert "free there" in captured.err.splitlines()[0]
    assert "olmoe, 3 x 5 experts" in captured.out


def test_buffers_that_are_no_weights_are_left_out(hf, tmp_path, capsys):
    rewrite(hf, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}))
    assert main(["--hf", str(hf), "--out", str(tmp_path / "model")]) == 0
    assert "leaving out 1 tensors" in capsys.readouterr().err


def test_text_files_come_along(hf, tmp_path):
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (hf / name).write_text(f"{{{name}}}")
    convert(hf, tmp_path / "model")
    assert ModelDirectory.open(tmp_path / "model").manifest.text_files == (
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    )
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "{chat_template.jinja}"


# Bad input: one line each, and nothing is left.


def test_missing_tensor(hf, tmp_path, capsys):
    key = "model.layers.0.self_attn.q_proj.weight"
    for shard in hf.glob("*.safetensors"):
        tensors = {k: v for k, v in load_file(shard).items() if k != key}
        save_file(tensors, shard)
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    name = index["weight_map"].pop(key)
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    line = refusal(hf, tmp_path / "model", capsys)
    assert f"lacks {key} (layers.0.attention.q_proj.kernel) [24, 24]" in line
    index["weight_map"][key] = name
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{key} is in {name}, which does not hold it" in refusal(hf, tmp_path / "model", capsys)


def test_missing_expert_tensors_are_counted(hf, tmp_path, capsys):
    rewrite(hf, lambda t: [t.pop(key) for key in list(t) if ".experts." in key])
    line = refusal(hf, tmp_path / "model", capsys)
    assert "lacks model.layers.0.mlp.experts.0." in line
    assert "and 12 more; check" in line


def test_unknown_tensor(hf, tmp_path, capsys):
    rewrite(hf, lambda t: t.update({"model.layers.0.mlp.experts.0.bias": np.ones(3, np.float32)}))
    assert "model.layers.0.mlp.experts.0.bias is not a weight" in refusal(hf, tmp_path / "model", capsys)


@pytest.mark.parametrize("kind", [".experts.", "norm.weight"])
def test_wrong_shape_gives_both_names_and_shapes(hf, tmp_path, capsys, kind):
    def change(tensors):
        key = next(key for key in tensors if kind in key)
        changed.append((key, list(tensors[key].shape)))
        tensors[key] = tensors[key][:-1].copy()

    changed: list = []
    rewrite(hf, change)
    line = refusal(hf, tmp_path / "model", capsys)
    key, shape = changed[0]
    assert key in line
    assert str(shape) in line
    assert str([shape[0] - 1, *shape[1:]]) in line


def test_duplicate_tensor(hf, tmp_path, capsys):
    shards = sorted(hf.glob("*.safetensors"))
    first, second = (dict(load_file(shard)) for shard in shards[:2])
    key = next(iter(first))
    save_file(second | {key: first[key]}, shards[1])
    line = refusal(hf, tmp_path / "model", capsys)
    assert key in line
    assert shards[0].name in line
    assert shards[1].name in line


def test_missing_shard(hf, tmp_path, capsys):
    lost = sorted(hf.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"{lost} is missing" in refusal(hf, tmp_path / "model", capsys)
    (hf / "model.safetensors.index.json").unlink()
    assert "lacks shard 2 of 00003" in refusal(hf, tmp_path / "model", capsys)


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_truncated_shard(hf, tmp_path, capsys, size):
    path = max(hf.glob("*.safetensors"))
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    line = refusal(hf, tmp_path / "model", capsys)
    assert str(path) in line
    assert "cut short" in line


def test_damaged_header(hf, tmp_path, capsys):
    path = max(hf.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[8:12] = b"}}}}"
    path.write_bytes(data)
    assert "damaged header" in refusal(hf, tmp_path / "model", capsys)


def test_no_checkpoint_at_all(tmp_path, capsys):
    assert "config.json is missing" in refusal(tmp_path, tmp_path / "model", capsys)
    assert "config.json is missing" in refusal(tmp_path / "absent", tmp_path / "model", capsys)
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(Family.OLMOE)))
    assert "no safetensors file" in refusal(tmp_path, tmp_path / "model", capsys)
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in refusal(tmp_path, tmp_path / "model", capsys)


def test_unsupported_family(hf, tmp_path, capsys):
    (hf / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "llama" in refusal(hf, tmp_path / "model", capsys)
    with pytest.raises(ConfigError):
        convert(hf, tmp_path / "model")


def test_quantised_weights_are_refused_by_name(hf, tmp_path, capsys):
    rewrite(hf, lambda t: t.update({"lm_head.weight": np.zeros((67, 24), np.int8)}))
    line = refusal(hf, tmp_path / "model", capsys)
    assert "lm_head.weight is I8" in line or "lm_head.weight is in both" in line


def test_existing_output_is_refused(hf, tmp_path, capsys):
    out = tmp_path / "model"
    out.mkdir()
    assert main(["--hf", str(hf), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list(out.iterdir()) == []


def test_unwritable_output(hf, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["--hf", str(hf), "--out", str(tmp_path / "file" / "model")]) == 2
    assert "error: " in capsys.readouterr().err


def test_too_little_space_is_refused_before_anything_is_written(hf, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "1000 B are free there" in refusal(hf, tmp_path / "model", capsys)


@pytest.mark.parametrize("part", ["experts", "dense", "manifest"])
def test_a_drive_that_becomes_full_leaves_nothing(hf, tmp_path, capsys, monkeypatch, part):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_in_words(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [os_error_code='28']")

    if part == "experts":
        monkeypatch.setattr(ShardWriter, "append", full)
    elif part == "dense":
        monkeypatch.setattr(convert_module, "save_dense", full_in_words)
    else:
        monkeypatch.setattr(convert_module.Manifest, "write", full)
    assert "became full" in refusal(hf, tmp_path / "model", capsys)
    monkeypatch.undo()
    convert(hf, tmp_path / "model")


def test_two_at_once(hf, tmp_path, capsys):
    out = tmp_path / "model"
    with filelock.FileLock(tmp_path / ".model.lock"):
        assert main(["--hf", str(hf), "--out", str(out)]) == 2
    assert "another process is writing" in capsys.readouterr().err
    convert(hf, out)


# A killed run: the process kills itself when it calls one of its functions for the n-th time.

KILLED = """
import os, signal, sys
import checkpoints.convert as convert
from flashmoe_jax.experts import shard
name, number = sys.argv[3:5]
owner, name = {"fsync": (os, "fsync"), "close": (shard.ShardWriter, "close"), "rename": (os, "rename"),
               "write": (convert.Manifest, "write")}[name]
calls, function = 0, getattr(owner, name)
def kill_at(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)
setattr(owner, name, kill_at)
convert.main(["--hf", sys.argv[1], "--out", sys.argv[2]])
"""


def test_killed_at_any_point_a_second_run_finishes(hf, tmp_path):
    out = tmp_path / "model"
    # Among the dense weights, with two layers written, before the manifest is there, and before the last rename.
    for name, number in (("fsync", 9), ("close", 3), ("write", 1), ("rename", 1)):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(hf), str(out), name, str(number)],
            cwd=REPOSITORY,
            capture_output=True,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not out.exists()
        assert staging_path(out).exists()
    convert(hf, out)
    assert verify(out).damages == ()
    assert_holds(out, random_weights(ModelConfig.from_hf(tiny_hf_config(Family.OLMOE)), 0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model"]


def interrupted_after_one_layer(hf, out, monkeypatch):
    write_layer = convert_module._write_layer

    def stop(source, plan, layer, *rest):
        if layer == 1:
            raise KeyboardInterrupt
        return write_layer(source, plan, layer, *rest)

    monkeypatch.setattr(convert_module, "_write_layer", stop)
    assert main(["--hf", str(hf), "--out", str(out)]) == 130
    monkeypatch.undo()


def test_an_interrupted_run_is_resumed_not_repeated(hf, tmp_path, monkeypatch, capsys):
    out = tmp_path / "model"
    interrupted_after_one_layer(hf, out, monkeypatch)
    assert "goes on where this one stopped" in capsys.readouterr().err
    assert not out.exists()
    written = []
    append = ShardWriter.append
    monkeypatch.setattr(ShardWriter, "append", lambda self, *rest: (written.append(rest[0]), append(self, *rest)))
    convert(hf, out)
    assert len(written) == 2 * 5
    assert_holds(out, random_weights(ModelConfig.from_hf(tiny_hf_config(Family.OLMOE)), 0))


def test_leftovers_of_another_source_or_dtype_are_not_used(hf, tmp_path, monkeypatch):
    out = tmp_path / "model"
    interrupted_after_one_layer(hf, out, monkeypatch)
    other = write_hf_checkpoint(tmp_path / "other", tiny_hf_config(Family.OLMOE), seed=9)
    convert(other, out)
    assert_holds(out, random_weights(ModelConfig.from_hf(tiny_hf_config(Family.OLMOE)), 9))


def test_errors_are_checkpoint_errors(hf, tmp_path):
    with pytest.raises(CheckpointError, match="allowed: keep"):
        convert(hf, tmp_path / "model", "int8")
