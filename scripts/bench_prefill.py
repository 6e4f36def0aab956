"""Prefill of flashmoe_jax against the time that reading its experts once takes.

Each prompt of fixed random ids starts with no expert resident, so that every needed one is read. `ratio` is the time of
the whole prefill over the seconds in which at least one read was under way. Prefetch modes are interleaved over --runs
rounds; a first round, in which programs are compiled, does not count. Experts are read past the page cache by the
readers range and direct. Writes a CSV to stdout.

    python -m scripts.bench_prefill --model OLMoE-flash --prompt-tokens 256 --budget 12slots
"""

import argparse
import csv
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import flashmoe_jax
from flashmoe_jax.console import OneLineParser, guarded, say
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.engine.platform import enable_compilation_cache
from flashmoe_jax.resolve import default_cache_dir

COLUMNS = "prefetch round prefill_s busy_s ratio reads bytes_per_busy_s stall_s useful late wasted".split()


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--budget", default="25%", help="of the slots (default: %(default)s)")
    parser.add_argument("--reader", default="direct", help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="rounds that count (default: %(default)s)")
    return parser


def measure(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """One prompt, from empty slots."""
    memory = engine.memory
    memory.reset()
    counters, fetcher = memory.prefill_counters, memory.fetcher

    def now() -> np.ndarray:
        reads = (counters.prefetch_useful, counters.prefetch_late, counters.prefetch_wasted)
        return np.array([time.perf_counter(), fetcher.busy_s, fetcher.num_reads, counters.stall_s, *reads])

    before = now()
    engine.session(1, len(prompt) + 1).prefill([prompt]).block_until_ready()
    prefill_s, busy_s, num_reads, stall_s, useful, late, wasted = (now() - before).tolist()
    return {
        "prefill_s": round(prefill_s, 4),
        "busy_s": round(busy_s, 4),
        "ratio": round(prefill_s / busy_s, 4),
        "reads": int(num_reads),
        "bytes_per_busy_s": int(num_reads * counters.record_bytes / busy_s),
        "stall_s": round(stall_s, 4),
        "useful": int(useful),
        "late": int(late),
        "wasted": int(wasted),
    }


def run(args: argparse.Namespace) -> int:
    enable_compilation_cache(default_cache_dir() / "compiled")
    writer = csv.DictWriter(sys.stdout, COLUMNS)
    writer.writeheader()
    for number in range(args.runs + 1):
        for mode in ("off", "auto"):
            options = {"device_budget": args.budget, "reader": args.reader, "prefetch": mode}
            with flashmoe_jax.load(args.model, max_context=args.prompt_tokens + 1, **options) as engine:
                prompt = np.random.default_rng(number).integers(0, engine.config.vocab_size, args.prompt_tokens)
                row = measure(engine, prompt.tolist())
            if number == 0:
                say(f"compiled with prefetch {mode}")
                continue
            writer.writerow({"prefetch": mode, "round": number, **row})
            sys.stdout.flush()
    return 0


def main() -> int:
    args = build_parser().parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
