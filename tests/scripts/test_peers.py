"""Parts of the comparison with other programs: tables, page cache, read-ahead, the GGUF file."""

import csv
import json
import math
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_hf_config, write_hf_checkpoint

from scripts.bench_peers import build_parser, cells, check
from scripts.peers import child, page_cache, read_ahead, tables


def run_of(peer: str, run: int, decode_s: list[float], load_s: float = 2.0, **more) -> dict:
    return {
        "peer": peer,
        "limit": "4GiB",
        "read_ahead": "own",
        "run": run,
        "import_s": 1.0,
        "load_s": load_s,
        "load_compile_s": 0.0,
        "prefill_s": 1.0,
        "prefill_compile_s": 0.5,
        "decode_s": decode_s,
        "decode_compile_s": 0.25,
        "peak_rss_bytes": 10,
        "facts": {},
        **more,
    }


def test_medians_and_ratios_are_those_of_the_runs(tmp_path: Path):
    runs = [
        run_of("flashmoe", 0, [0.5, 0.5], drive_read_bytes_per_s=1e9),
        run_of("flashmoe", 1, [0.25, 0.25], drive_read_bytes_per_s=1e9),
        run_of("flashmoe", 2, [1.0, 1.0], drive_read_bytes_per_s=1e9),
        run_of("llama.cpp", 0, [2.0, 2.0], load_s=8.0),
        run_of("llama.cpp", 1, [1.0, 1.0], load_s=8.0) | {"read_ahead": "128KiB"},
        {"peer": "accelerate", "limit": "4GiB", "read_ahead": "own", "run": 0, "error": "killed"},
    ]
    rows = [tables.run_row(run) for run in runs]
    assert rows[0]["decode_tokens_per_s"] == 2 and rows[0]["compile_s"] == 0.75 and rows[0]["load_prefill_s"] == 3
    medians = tables.median_rows(rows)
    assert [(line["peer"], line["read_ahead"], line["runs"]) for line in medians] == [
        ("flashmoe", "own", 3),
        ("llama.cpp", "own", 1),
        ("llama.cpp", "128KiB", 1),
        ("accelerate", "own", 0),
    ]
    own = medians[0]
    assert (own["decode_tokens_per_s"], own["decode_tokens_per_s_min"], own["decode_tokens_per_s_max"]) == (2, 1, 4)
    ratios = {line["what"]: line["ratio"] for line in tables.ratio_rows(medians, dense_bytes=1e9)}
    assert ratios["decode tokens/s: flashmoe ÷ llama.cpp at its best read-ahead"] == 2
    assert ratios["decode tokens/s: flashmoe ÷ llama.cpp as it comes"] == 4
    assert ratios["ready to prefill, s: flashmoe ÷ llama.cpp as it comes"] == 0.25
    assert ratios["ready to prefill, s: flashmoe ÷ dense bytes at drive rate"] == 2
    assert not any("accelerate" in what for what in ratios)
    tables.write_csv(tmp_path / "runs.csv", tables.RUN_COLUMNS, rows)
    with (tmp_path / "runs.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["error"] for row in read] == [""] * 5 + ["killed"]
    assert float(read[1]["decode_tokens_per_s"]) == 4


class Countdown:
    """A peer that computes nothing; its logits count."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def import_packages(self) -> dict[str, str]:
        return {"nothing": "1"}

    def load(self, args) -> None:
        self.calls.append(("load", 0))

    def _logits(self, what: str, count: int) -> np.ndarray:
        self.calls.append((what, count))
        return np.full(4, len(self.calls), np.float32)

    def prefill(self, ids) -> np.ndarray:
        return self._logits("prefill", len(ids))

    def decode(self, token: int) -> np.ndarray:
        return self._logits("decode", token)

    def warm_up(self, ids) -> None:
        self.calls.append(("warm_up", len(ids)))

    def compile_s(self) -> float:
        return 0.0

    def facts(self) -> dict:
        return {}

    def close(self) -> None:
        self.calls.append(("close", 0))


def test_every_peer_goes_through_the_same_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.save(tmp_path / "ids.npy", np.arange(10, dtype=np.int32))
    arguments = ["--model", "m", "--tokens", str(tmp_path / "ids.npy"), "--prefill-tokens", "3", "--decode-tokens", "2"]
    args = child.build_parser("").parse_args([*arguments, "--resident", "--logits", str(tmp_path / "logits.npy")])
    peer = Countdown()
    assert child.run_and_print(peer, args) == 0
    assert peer.calls == [("load", 0), ("prefill", 3), ("warm_up", 5), ("decode", 3), ("decode", 4), ("close", 0)]
    result = json.loads(capsys.readouterr().out)
    assert len(result["decode_s"]) == 2 and result["versions"]["nothing"] == "1"
    assert np.load(tmp_path / "logits.npy").shape == (3, 4)


def test_what_is_measured_in_a_round():
    arguments = ["--hf", "h", "--model", "m", "--out", "o", "--limits", "none,4GiB", "--peers", "flashmoe,llama.cpp"]
    args = build_parser().parse_args([*arguments, "--gguf", "g"])
    check(args)
    assert list(cells(args)) == [
        ("flashmoe", "none", "own"),
        ("llama.cpp", "none", "own"),
        ("flashmoe", "4GiB", "own"),
        ("llama.cpp", "4GiB", "own"),
        ("llama.cpp", "4GiB", "128KiB"),
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--peers", "vllm"], "peer vllm is unknown"), ([], "llama.cpp needs --gguf"), (["--limits", "4G"], "size '4G'")],
)
def test_bad_options_are_refused(more: list[str], message: str):
    args = build_parser().parse_args(["--hf", "h", "--model", "m", "--out", "o", *more])
    with pytest.raises(ValueError, match=message):
        check(args)


def test_the_page_cache_is_emptied_of_a_file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    assert page_cache.cached_bytes(path) == 1 << 20
    assert page_cache.files_under(tmp_path) == [path]
    said = page_cache.drop([path])
    assert said.endswith("0 MB left cached"), said
    assert page_cache.cached_bytes(path) == 0


def test_the_devices_own_read_ahead_is_left_alone(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    before = read_ahead.read_ahead_bytes(path)
    with read_ahead.file_with_read_ahead(path, None) as same:
        assert same == path
    assert read_ahead.read_ahead_bytes(path) == before


def test_the_gguf_file_holds_the_same_words(tmp_path: Path):
    gguf = pytest.importorskip("gguf", reason="the GGUF writer needs the package gguf (extra: peers)")
    from safetensors.numpy import load_file

    from scripts.peers.gguf_writer import write_gguf

    config = tiny_hf_config("olmoe") | {"torch_dtype": "bfloat16"}
    hf = write_hf_checkpoint(tmp_path / "hf", config)
    write_gguf(hf, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = {name: w for file in hf.glob("*.safetensors") for name, w in load_file(file).items()}
    experts = [weights[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(config["num_experts"])]
    stored = np.asarray(tensors["blk.0.ffn_up_exps.weight"].data)
    assert stored.tobytes() == np.stack(experts).tobytes()
    assert math.prod(tensors["token_embd.weight"].shape) == config["vocab_size"] * config["hidden_size"]
