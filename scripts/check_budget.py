"""Whether a declared --memory-limit is kept: converting, loading, a long prompt and many tokens, in a control group.

One process does all of it, as `flashmoe generate --model HF_DIR --memory-limit SIZE` would, inside a fresh control
group whose limit is the declared one plus a margin for what the process does not own: page cache and the kernel's
tables. Passes if the process is not killed and its peak (VmHWM) never exceeds what was declared. Prints one CSV row per
stage. Tokens are random: text plays no part, and as many experts as can be are asked for.

    python scripts/check_budget.py --model OLMoE --memory-limit 4GiB --cache-dir /big/tmp
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cgroup
import numpy as np

import flashmoe_jax
from flashmoe_jax.console import guarded, say
from flashmoe_jax.engine.budget import format_size, parse_size
from flashmoe_jax.engine.memory import peak_rss_bytes
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.resolve import resolve_model

COLUMNS = "stage,declared_bytes,vm_hwm_bytes,group_limit_bytes,group_peak_bytes,oom_kills,seconds,passed".split(",")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="model directory, or a Hugging Face directory, which is converted first unless --cache-dir holds it",
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where it is converted to (default: the user's)")
    parser.add_argument("--memory-limit", default="4GiB", metavar="SIZE", help="declared (default %(default)s)")
    parser.add_argument("--margin", default="64MiB", metavar="SIZE", help="of the group (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2000, metavar="N", help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=500, metavar="N", help="(default %(default)s)")
    parser.add_argument("--policy", default="auto", help="(default %(default)s)")
    parser.add_argument("--in-group", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.in_group:
        return guarded(lambda: work(arguments))
    return guarded(lambda: check(arguments))


def check(arguments: argparse.Namespace) -> int:
    """Runs `work` in a group of its own and prints what came of it."""
    declared = parse_size(arguments.memory_limit)
    limit = declared + parse_size(arguments.margin)
    command = [sys.executable, __file__, "--in-group", "--model", arguments.model]
    command += ["--memory-limit", arguments.memory_limit, "--policy", arguments.policy]
    command += ["--prompt-tokens", str(arguments.prompt_tokens), "--new-tokens", str(arguments.new_tokens)]
    command += [] if arguments.cache_dir is None else ["--cache-dir", str(arguments.cache_dir)]
    try:
        with cgroup.create("flashmoe-budget", memory_bytes=limit) as group:
            answer = group.run(command, stdout=subprocess.PIPE, text=True)
            peak, kills = group.peak_bytes, group.oom_kills
    except cgroup.CgroupError as error:
        raise ConfigError(str(error)) from error
    stages = [json.loads(line) for line in answer.stdout.splitlines()]
    writer = csv.DictWriter(sys.stdout, COLUMNS)
    writer.writeheader()
    passed = answer.returncode == 0 and not kills
    for stage in stages:
        is_kept = stage["vm_hwm_bytes"] <= declared
        passed &= is_kept
        row = {"declared_bytes": declared, "group_limit_bytes": limit, "group_peak_bytes": peak, "oom_kills": kills}
        writer.writerow(stage | row | {"passed": is_kept})
    if stages:
        highest = stages[-1]["vm_hwm_bytes"]
        say(f"declared {format_size(declared)}, VmHWM {format_size(highest, up=True)} ({highest / declared:.1%})")
    if answer.returncode:
        say(f"the process ended with status {answer.returncode}" + (", killed for want of memory" if kills else ""))
    say("passed" if passed else "failed")
    return 0 if passed else 1


def work(arguments: argparse.Namespace) -> int:
    """Inside the group: converts, loads, reads a prompt, decodes; one JSON line per stage."""
    began = time.perf_counter()

    def done(stage: str) -> None:
        nonlocal began
        now = time.perf_counter()
        line: dict[str, Any] = {"stage": stage, "vm_hwm_bytes": peak_rss_bytes(), "seconds": round(now - began, 2)}
        print(json.dumps(line), flush=True)
        began = now

    model = resolve_model(arguments.model, arguments.cache_dir)
    done("convert")
    context = arguments.prompt_tokens + arguments.new_tokens
    with flashmoe_jax.load(
        model, memory_limit=arguments.memory_limit, policy=arguments.policy, max_context=context
    ) as engine:
        say(engine.plan_line())
        done("load")
        random = np.random.default_rng(0)
        session = engine.session()
        prompt, new = (
            random.integers(0, session.vocab_size, count) for count in (arguments.prompt_tokens, arguments.new_tokens)
        )
        np.asarray(session.prefill([prompt.tolist()]))
        done("prefill")
        for token in new:
            np.asarray(session.decode(np.array([token], np.int32)))
        done("decode")
    return 0


if __name__ == "__main__":
    sys.exit(main())
