"""flashmoe_jax beside llama.cpp and transformers with accelerate: the same OLMoE weights, limits and token ids.

Every run is a child process in a memory control group of its own, with the page cache of its files emptied before. All
are fed the same fixed random ids, as greedy text of random weights loops. Runs are interleaved, and the drive's and the
memory's read rates are measured between them. Writes runs.csv, medians.csv, ratios.csv, machine.json and plots to
--out; prints the ratios. Under `none` there is no limit, all weights are touched before decode, and decode is resident.

    python -m scripts.bench_peers --hf OLMoE --model OLMoE-flash --gguf olmoe.gguf \\
        --peers-python VENV/bin/python --out DIR

The other peers need an environment of their own (`pip install ".[peers]"`).
"""

import argparse
import contextlib
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.console import OneLineParser, guarded, say
from flashmoe_jax.engine.budget import parse_size
from flashmoe_jax.errors import ConfigError
from scripts import cgroup
from scripts.peers import machine, tables
from scripts.peers.child import WARM_UP_TOKENS
from scripts.peers.page_cache import drop, files_under
from scripts.peers.plots import plot_decode
from scripts.peers.read_ahead import ReadAheadError, file_with_read_ahead

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("flashmoe", "llama.cpp", "accelerate")
SEED = 7


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the model")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the same, converted")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same for llama.cpp; written if missing")
    parser.add_argument("--peers-python", default=sys.executable, metavar="EXE", help="interpreter of the other peers")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma separated (default: %(default)s)")
    parser.add_argument("--limits", default="none,8GiB,4GiB", help="memory limits (default: %(default)s)")
    parser.add_argument(
        "--read-ahead", default="own,128KiB", help="of the drive under llama.cpp's file (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--prefill-tokens", type=int, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-decode-s", type=float, default=60, metavar="S", help="of one run (default: %(default)s)")
    parser.add_argument("--policy", default="decayed", help="of flashmoe_jax (default: %(default)s)")
    parser.add_argument("--reader", default="auto", help="of flashmoe_jax (default: %(default)s)")
    parser.add_argument(
        "--offload", type=Path, metavar="DIR", help="folder for accelerate's layers (default: in --out)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    return parser


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Peer, limit and read-ahead of everything that is measured in one round."""
    for limit in args.limits.split(","):
        for peer in args.peers.split(","):
            ahead = args.read_ahead.split(",") if peer == "llama.cpp" and limit != tables.NO_LIMIT else ["own"]
            for read_ahead in ahead:
                yield peer, limit, read_ahead


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what cannot be measured."""
    unknown = set(args.peers.split(",")) - set(PEERS)
    if unknown:
        raise ConfigError(f"peer {', '.join(sorted(unknown))} is unknown; choose of {', '.join(PEERS)}")
    for size in [*args.limits.split(","), *args.read_ahead.split(",")]:
        if size not in (tables.NO_LIMIT, tables.OWN_READ_AHEAD):
            parse_size(size)
    if "llama.cpp" in args.peers.split(",") and args.gguf is None:
        raise ConfigError("llama.cpp needs --gguf FILE; it is written there if missing")


def command_of(peer: str, limit: str, model: Path, args: argparse.Namespace, tokens: Path) -> list[str]:
    """The command line of one child."""
    common = ["--tokens", str(tokens), "--prefill-tokens", str(args.prefill_tokens)]
    common += ["--decode-tokens", str(args.decode_tokens), "--max-decode-s", str(args.max_decode_s)]
    is_limited = limit != tables.NO_LIMIT
    if not is_limited:
        common += ["--resident"]
    if peer == "flashmoe":
        own = ["--model", str(args.model), "--compiled", str(args.out / "compiled"), "--policy", args.policy]
        own += ["--reader", args.reader, "--record-routes", *(["--memory-limit", limit] if is_limited else [])]
        return [sys.executable, "-m", "scripts.peers.run_flashmoe", *own, *common]
    if peer == "llama.cpp":
        return [args.peers_python, "-m", "scripts.peers.run_llama_cpp", "--model", str(model), *common]
    own = ["--model", str(args.hf), "--offload", str(args.offload or args.out / "offload")]
    own += ["--memory-limit", str(parse_size(limit))] if is_limited else []
    return [args.peers_python, "-m", "scripts.peers.run_accelerate", *own, *common]


def measure(peer: str, limit: str, read_ahead: str, args: argparse.Namespace, tokens: Path) -> dict[str, Any]:
    """One run, as `tables.run_row` takes it."""
    source = {"flashmoe": args.model, "llama.cpp": args.gguf, "accelerate": args.hf}[peer]
    run: dict[str, Any] = {"peer": peer, "limit": limit, "read_ahead": read_ahead}
    run["drive_read_bytes_per_s"] = machine.drive_read_rate(files_under(args.model / "experts.zarr"))
    run["memory_read_bytes_per_s"] = machine.memory_read_rate()[0]
    num_bytes = None if read_ahead == tables.OWN_READ_AHEAD else parse_size(read_ahead)
    memory_bytes = None if limit == tables.NO_LIMIT else parse_size(limit)
    with contextlib.ExitStack() as stack:
        model = source if num_bytes is None else stack.enter_context(file_with_read_ahead(source, num_bytes))
        run["page_cache"] = drop(files_under(source))
        command = command_of(peer, limit, model, args, tokens)
        if memory_bytes is None:
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        else:
            group = stack.enter_context(cgroup.create("flashmoe-peers", memory_bytes=memory_bytes))
            result = group.run(command, cwd=ROOT, capture_output=True, text=True)
            run["cgroup_peak_bytes"] = group.peak_bytes
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return run | {"error": lines[-1][:200]}
    return run | json.loads(result.stdout.splitlines()[-1])


def run(args: argparse.Namespace) -> int:
    check(args)
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    if "llama.cpp" in args.peers.split(",") and not args.gguf.exists():
        say(f"writing {args.gguf}")
        writer = [args.peers_python, "-m", "scripts.peers.gguf_writer", "--hf", str(args.hf), "--out", str(args.gguf)]
        subprocess.run(writer, cwd=ROOT, check=True)
    vocabulary = json.loads((args.hf / "config.json").read_text())["vocab_size"]
    count = args.prefill_tokens + args.decode_tokens + WARM_UP_TOKENS
    facts = machine.describe(args.model) | {"memory_read_measured_by": machine.memory_read_rate()[1]}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        np.save(tokens, np.random.default_rng(SEED).integers(0, vocabulary, count).astype(np.int32))
        if "flashmoe" in args.peers.split(","):
            for limit in dict.fromkeys(args.limits.split(",")):
                say(f"compiling for limit {limit}")
                measure("flashmoe", limit, "own", args, tokens)
        for round_id in range(args.runs):
            for peer, limit, read_ahead in cells(args):
                result = measure(peer, limit, read_ahead, args, tokens) | {"run": round_id}
                runs.append(result)
                row = tables.run_row(result)
                speed = row.get("decode_tokens_per_s")
                what = result.get("error") or f"{speed:.3f} tokens/s, load + prefill {row['load_prefill_s']:.2f} s"
                say(f"run {round_id + 1} of {args.runs}, {peer}, limit {limit}, read-ahead {read_ahead}: {what}")
                write(args.out, runs, facts)
    writer = csv.writer(sys.stdout)
    with (args.out / "ratios.csv").open(newline="") as file:
        writer.writerows(csv.reader(file))
    return 0 if any("error" not in result for result in runs) else 1


def write(out: Path, runs: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """All tables and plots of the runs so far."""
    rows = [tables.run_row(result) for result in runs]
    medians = tables.median_rows(rows)
    dense = [result["facts"]["dense_bytes"] for result in runs if "dense_bytes" in result.get("facts", {})]
    tables.write_csv(out / "runs.csv", tables.RUN_COLUMNS, rows)
    tables.write_csv(out / "medians.csv", tables.MEDIAN_COLUMNS, medians)
    tables.write_csv(out / "ratios.csv", tables.RATIO_COLUMNS, tables.ratio_rows(medians, dense[0] if dense else None))
    whole = [result for result in runs if "facts" in result]
    known = {result["peer"]: {name: result[name] for name in ("versions", "facts")} for result in whole}
    (out / "machine.json").write_text(json.dumps(facts | {"peers": known}, indent=1) + "\n")
    plot_decode(medians, out / "decode.png")


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)

    def body() -> int:
        try:
            return run(args)
        except (cgroup.CgroupError, ReadAheadError) as error:
            raise ConfigError(str(error)) from error

    return guarded(body)


if __name__ == "__main__":
    sys.exit(main())
