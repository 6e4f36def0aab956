"""The declared memory limit is kept, in a control group that would kill the process if it were not."""

import csv
import importlib
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_models import tiny_hf_config, write_hf_checkpoint

ROOT = Path(__file__).parents[2]
# The limit that a refusal names follows from what the refusing process held; another one may hold a little more.
SLACK_MIB = 16


@pytest.fixture(scope="module")
def check_budget() -> ModuleType:
    """The script, where control groups can be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        cgroup, script = importlib.import_module("cgroup"), importlib.import_module("check_budget")
    try:
        with cgroup.create("flashmoe-test", memory_bytes=1 << 30):
            pass
    except cgroup.CgroupError as error:
        pytest.skip(str(error))
    return script


def smallest_limit_mib(model: Path, cache_dir: Path, context: int) -> int:
    """What the engine says is the least that works."""
    options = ["--prompt", "a", "--max-new-tokens", "1", "--memory-limit", "1MiB", "--max-context", str(context)]
    command = [sys.executable, "-m", "flashmoe_jax.generate", "--model", model, "--cache-dir", cache_dir, *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    found = re.search(r"slots per layer need ([\d.]+)MiB; give at least that", answer.stderr)
    assert found, answer.stderr
    return int(float(found[1])) + 1


def run(script: ModuleType, capsys: pytest.CaptureFixture, *options: Any) -> tuple[int, list[dict[str, str]]]:
    """Exit code and rows of the script."""
    status = script.main([str(option) for option in options])
    return status, list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_the_smallest_limit_is_kept_from_conversion_to_the_last_token(
    check_budget: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = ROOT / "checkpoints" / "demo"
    declared = smallest_limit_mib(model, tmp_path / "first", 1000) + SLACK_MIB
    options = ["--model", model, "--cache-dir", tmp_path / "second", "--memory-limit", f"{declared}MiB"]
    status, rows = run(check_budget, capsys, *options, "--prompt-tokens", 500, "--new-tokens", 500)
    assert [row["stage"] for row in rows] == ["convert", "load", "prefill", "decode"]
    assert all(int(row["vm_hwm_bytes"]) <= declared << 20 for row in rows), rows
    assert {(row["passed"], row["oom_kills"]) for row in rows} == {("True", "0")}
    assert status == 0


def test_a_long_prompt_keeps_to_the_limit(
    check_budget: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tiny_hf_config("qwen3_moe", max_position_embeddings=4096, num_experts=16, torch_dtype="bfloat16")
    model = write_hf_checkpoint(tmp_path / "hf", config)
    options = ["--model", model, "--cache-dir", tmp_path / "cache", "--memory-limit", "640MiB", "--policy", "lru"]
    status, rows = run(check_budget, capsys, *options, "--prompt-tokens", 2000, "--new-tokens", 20)
    assert status == 0, rows
    assert [row["stage"] for row in rows] == ["convert", "load", "prefill", "decode"]


def test_a_process_that_takes_too_much_fails(
    check_budget: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = tmp_path / "greedy.py"
    greedy.write_text("print(len(bytearray(512 << 20)))\n")
    monkeypatch.setattr(check_budget, "__file__", str(greedy))
    status, rows = run(check_budget, capsys, "--model", "none", "--memory-limit", "128MiB", "--margin", "16MiB")
    assert (status, rows) == (1, [])
