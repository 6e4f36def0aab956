"""Decode speed of flashmoe_jax over budgets, policies, readers, prefetch modes and models, with the limits beside it.

Every cell loads the engine anew, takes a prompt, and decodes fixed ids: of --text, else random ones. Cells are
interleaved over --runs rounds; the drive's O_DIRECT rate is measured before each, the memory's read rate at the start.
`limit_s` is what no engine of the same policy without prefetch can beat: the larger of missing bytes ÷ drive rate and
touched bytes ÷ memory rate, per token. Experts are read past the page cache; compilation happens in a round that does
not count. Writes decode.csv and decode.png to --out; prints medians.

    python -m scripts.bench_decode --model OLMoE-flash --budgets 12slots,24slots --policies lru,decayed --out DIR
"""

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import flashmoe_jax
from flashmoe_jax.console import OneLineParser, guarded, say
from flashmoe_jax.engine.budget import Budget
from flashmoe_jax.engine.platform import enable_compilation_cache
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.text.tokenizer import Tokenizer
from scripts.peers.machine import drive_read_rate, memory_read_rate
from scripts.peers.page_cache import files_under

COLUMNS = (
    "model dtype budget slots_per_layer policy reader prefetch run load_s prefill_s tokens_per_s step_ms_p50 hit_rate "
    "misses_per_token read_bytes_per_token stall compute host useful late wasted cancelled drive_bytes_per_s "
    "memory_bytes_per_s limit_s ratio_to_limit peak_rss_bytes"
).split()


class Cell(NamedTuple):
    """One setting that is measured."""

    model: Path
    budget: str
    policy: str
    reader: str
    prefetch: str


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True, help="model directory; again for a dtype")
    parser.add_argument("--budgets", default="25%", metavar="LIST", help="of slots or bytes (default: %(default)s)")
    parser.add_argument("--policies", default="lru,decayed", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--readers", default="auto", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--prefetch", default="off,auto", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what is decoded (default: random ids)")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=32, metavar="N", help="decoded in each run (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="rounds that count (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    return parser


def ids_of(cell: Cell, args: argparse.Namespace) -> np.ndarray:
    """The ids of one run; the same for all cells of a model."""
    count = args.prompt_tokens + args.tokens
    if args.text is None:
        config = ModelDirectory.open(cell.model).config
        return np.random.default_rng(1).integers(0, config.vocab_size, count)
    ids = Tokenizer.from_dir(cell.model).encode(args.text.read_text(encoding="utf-8"))
    if len(ids) < count:
        raise ConfigError(f"--text {args.text} has {len(ids)} tokens and {count} are asked for; give a longer one")
    return np.array(ids[:count])


def measure(cell: Cell, ids: np.ndarray, args: argparse.Namespace, memory_rate: float) -> dict[str, Any]:
    """One row of the CSV file."""
    drive_rate = drive_read_rate(files_under(cell.model / "experts.zarr"), seconds=0.5)
    sizes = {"device_budget": cell.budget}
    if Budget.parse(cell.budget).num_bytes is not None:
        sizes = {"memory_limit": cell.budget}
    began = time.perf_counter()
    with flashmoe_jax.load(
        cell.model,
        **sizes,
        policy=cell.policy,
        reader=cell.reader,
        prefetch=cell.prefetch,
        max_context=len(ids),
    ) as engine:
        load_s = time.perf_counter() - began
        session, prompt = engine.session(), ids[: args.prompt_tokens].tolist()
        began = time.perf_counter()
        session.prefill([prompt]).block_until_ready()
        prefill_s, steps_s = time.perf_counter() - began, []
        for token in ids[args.prompt_tokens :]:
            began = time.perf_counter()
            session.decode(np.array([token])).block_until_ready()
            steps_s.append(time.perf_counter() - began)
        stats, config, plan = engine.stats(), engine.config, engine.plan
        record_bytes = engine.memory.store.layout.record_bytes
    reads = stats["prefetch_reads"]
    num_missed = stats["demand_reads"] + reads["useful"] + reads["late"]
    touched = plan.dense_bytes + config.num_moe_layers * config.experts_per_token * record_bytes
    limit_s = max(num_missed / len(steps_s) * record_bytes / drive_rate, touched / memory_rate)
    per_step_s = sum(steps_s) / len(steps_s)
    return {
        "model": cell.model.name,
        "dtype": config.weight_dtype,
        "budget": cell.budget,
        "policy": stats["policy"],
        "slots_per_layer": plan.slots_per_layer,
        "reader": stats["reader"],
        "prefetch": cell.prefetch,
        "load_s": load_s,
        "prefill_s": prefill_s,
        "tokens_per_s": 1 / per_step_s,
        "step_ms_p50": statistics.median(steps_s) * 1e3,
        "hit_rate": stats["hits"] / stats["accesses"],
        "misses_per_token": num_missed / len(steps_s),
        "read_bytes_per_token": stats["read_bytes"] / len(steps_s),
        **stats["shares"],
        **reads,
        "drive_bytes_per_s": drive_rate,
        "memory_bytes_per_s": memory_rate,
        "limit_s": limit_s,
        "ratio_to_limit": per_step_s / limit_s,
        "peak_rss_bytes": stats["peak_rss_bytes"],
    }


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Median tokens/s over slots, a line per policy, reader and prefetch mode, and the limits as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        name = f"{row['model']} {row['policy']}, {row['reader']}, prefetch {row['prefetch']}"
        lines.setdefault(name, {}).setdefault(row["slots_per_layer"], []).append(row)
    for name, by_slots in lines.items():
        slots = sorted(by_slots)
        speeds = [statistics.median(row["tokens_per_s"] for row in by_slots[s]) for s in slots]
        (drawn,) = axes.plot(slots, speeds, marker="o", label=name)
        limits = [statistics.median(1 / row["limit_s"] for row in by_slots[s]) for s in slots]
        axes.plot(slots, limits, linestyle="none", marker="_", markersize=14, color=drawn.get_color())
    axes.set_xlabel("slots per layer (bars: what drive and memory allow without prefetch)")
    axes.set_ylabel("decode, tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    enable_compilation_cache(args.out / "compiled")
    lists = (text.split(",") for text in (args.budgets, args.policies, args.readers, args.prefetch))
    all_cells = [Cell(*choice) for choice in itertools.product(args.model, *lists)]
    ids = {cell: ids_of(cell, args) for cell in all_cells}
    memory_rate, how = memory_read_rate()
    say(f"memory: {memory_rate / 1e9:.1f} GB/s ({how})")
    rows: list[dict[str, Any]] = []
    for run_id in range(-1, args.runs):
        for cell in all_cells:
            row = measure(cell, ids[cell], args, memory_rate) | {"run": run_id}
            what = f"{row['tokens_per_s']:.3f} tokens/s, {row['ratio_to_limit']:.2f} x the limit"
            say(f"{'warm-up' if run_id < 0 else f'run {run_id + 1}'}: {' '.join(map(str, cell))}: {what}")
            if run_id < 0:
                continue
            rows.append(row)
            with (args.out / "decode.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    plot(rows, args.out / "decode.png")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*Cell._fields, "tokens_per_s", "ratio_to_limit", "hit_rate"])
    for i, cell in enumerate(all_cells):
        own = rows[i :: len(all_cells)]
        medians = [
            statistics.median(row[name] for row in own) for name in ("tokens_per_s", "ratio_to_limit", "hit_rate")
        ]
        writer.writerow([*cell, *(f"{value:.4g}" for value in medians)])
    return 0


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
