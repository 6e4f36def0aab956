"""The subcommand `replay`: policies and numbers of slots on recorded traces, as a table or as JSON.

Owns the options and the report. The work is in `replay.py`, which is imported only when it begins: help and mistakes of
spelling cost no JAX and no numba. Invariant: stdout carries the report alone.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashmoe_jax.console import say
from flashmoe_jax.errors import ConfigError

DEFAULT_POLICIES = "lru,lfu,lfru,decayed,min"


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parsers of `python -m train_policy`."""
    parser = commands.add_parser(
        "replay",
        help="hit rates of policies on traces",
        description="Replay traces through eviction policies, all experts of a token and layer requested together. "
        "Several traces are replayed one after the other, as one.",
        epilog="Policies: lru, lfu, lfru, decayed and static, which the engine runs; random, fifo, lfu-resident (uses "
        "since admission), arc, lecar, s3fifo; min (Belady), min-window:W (MIN that sees W steps, decayed beyond), "
        "min-bypass (MIN that need not admit); or a folder that fit wrote.",
    )
    parser.add_argument("--trace", type=Path, nargs="+", required=True, metavar="T", help="traces (.npz) of one model")
    parser.add_argument(
        "--policies", default=DEFAULT_POLICIES, metavar="P,P,...", help="policies (default: %(default)s)"
    )
    parser.add_argument(
        "--slots", required=True, metavar="N,P%,...", help="slots per layer: numbers, or shares of the experts"
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="experts per layer (default: of the trace's meta, else its largest id + 1)",
    )
    parser.add_argument(
        "--policy-trace",
        type=Path,
        metavar="T",
        help="trace whose popular experts static keeps (default: the replayed traces, which is hindsight)",
    )
    parser.add_argument(
        "--as-engine",
        action="store_true",
        help="a prompt is one step that evicts nothing to admit, a batch step is one step (default: every token is a "
        "decode step)",
    )
    parser.add_argument(
        "--per-access",
        action="store_true",
        help="every expert of a token is a step of its own, as in the literature on caches",
    )
    parser.add_argument(
        "--reset", action="store_true", help="every prompt starts cold (default: cache and counters carry over)"
    )
    parser.add_argument(
        "--staging",
        type=int,
        metavar="G",
        help="staged records that may replace residents after a prompt, with --as-engine (default: 8)",
    )
    parser.add_argument(
        "--guard",
        choices=["on", "off"],
        help="whether learned policies are under the engine's guard, which falls back to decayed (default: on with "
        "--as-engine, off without)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random and lecar (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replays and prints."""
    rows = replay_rows(args)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return 0


def replay_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per policy and number of slots."""
    policies = entries(args.policies, "--policies")
    wanted_slots = entries(args.slots, "--slots")
    for text in wanted_slots:
        _parse_slots(text)
    if args.as_engine and args.per_access:
        raise ConfigError("--as-engine and --per-access exclude each other; give one")
    if args.staging is not None and not args.as_engine:
        raise ConfigError("--staging has an effect with --as-engine only; leave it out")
    if args.staging is not None and args.staging < 1:
        raise ConfigError(f"--staging is {args.staging}; it must be at least 1")
    if args.experts is not None and args.experts < 1:
        raise ConfigError(f"--experts is {args.experts}; it must be at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; it must not be negative")
    if args.policy_trace is not None and "static" not in policies:
        raise ConfigError("--policy-trace has an effect on policy static only; leave it out")
    try:
        import numba  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("replay needs numba; install it with: pip install 'flashmoe-jax[train]'") from None
    from flashmoe_jax.telemetry.trace import load_trace, popularity
    from train_policy.replay import DEFAULT_STAGING, Replayer, saved_policy, summary
    from train_policy.replay_steps import Mode, joined

    if args.guard is not None and all(saved_policy(policy) is None for policy in policies):
        raise ConfigError("--guard has an effect on learned policies only; leave it out, or give a folder of one")
    trace = joined([load_trace(path) for path in args.trace], args.experts)
    num_rows, num_layers, top_k = trace.ids.shape
    num_experts = trace.meta["experts"]
    counts = None
    if args.policy_trace is not None:
        counts = popularity(load_trace(args.policy_trace), num_layers, num_experts)
    elif "static" in policies:
        say("static keeps the experts that are popular in the replayed trace itself: hindsight")
    mode = Mode.ENGINE if args.as_engine else Mode.ACCESS if args.per_access else Mode.TOKEN
    replayer = Replayer(
        trace,
        mode=mode,
        reset=args.reset,
        num_staging=DEFAULT_STAGING if args.staging is None else args.staging,
        seed=args.seed,
        counts=counts,
        guard=args.as_engine if args.guard is None else args.guard == "on",
    )
    slots = [slots_of(text, num_experts) for text in wanted_slots]
    for policy in policies:
        replayer.check(policy, slots)
    say(f"{num_rows} tokens, {num_layers} layers x {num_experts} experts, {top_k} per token")
    if args.as_engine and not replayer.steps.is_prefill.any():
        say("the trace marks no prompt tokens (phase 0), so there is no prefill")
    best = replayer.replay("min", slots)
    rows = []
    for policy in policies:
        began = time.perf_counter()
        results = best if policy == "min" else replayer.replay(policy, slots)
        rows += [summary(result, least, replayer.steps) for result, least in zip(results, best, strict=True)]
        say(f"{policy}: {time.perf_counter() - began:.1f} s")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a person; prefill, where there is any, in columns of its own."""
    columns = ["hit_rate", "reads_per_token", "refetch_5", "regret"]
    titles = ["policy", "slots", "hit rate", "reads/token", "refetch<=5", "regret"]
    has_prefill = any("prefill" in row for row in rows)
    if has_prefill:
        titles += [f"prefill {title}" for title in titles[2:4]]
    lines = [titles]
    for row in rows:
        cells = [row["policy"], str(row["slots"]), *(_number(row[name]) for name in columns)]
        if has_prefill:
            cells += [_number(row["prefill"][name]) for name in columns[:2]]
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def entries(text: str, option: str) -> list[str]:
    """What is between the commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{option} {text!r} has an empty entry; separate entries by single commas")
    return list(dict.fromkeys(parts))


def _parse_slots(text: str) -> tuple[int | None, float]:
    """(slots, per cent), one of them given."""
    if match := re.fullmatch(r"(\d+)(?: ?slots?)?", text):
        return int(match[1]), 0.0
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text):
        return None, float(match[1])
    raise ConfigError(f"slots {text!r} is not understood; write for example 16 or 25%")


def slots_of(text: str, num_experts: int) -> int:
    """Slots per layer of `16` or `25%`."""
    number, percent = _parse_slots(text)
    return int(percent * num_experts / 100) if number is None else number
