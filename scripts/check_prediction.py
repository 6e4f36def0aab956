"""One prediction of the probe against the engine itself, with the drive's reads throttled to a stated rate.

Measures this machine as the probe does, decodes with the engine in a control group that lets its reads through at
`--drive`, and prints what was predicted for that rate beside what came out, as CSV. The engine's own routing, recorded
in that run, is predicted from as well: that row says how good the arithmetic is, the other also how good the assumption
about hit rates is. Page cache: not used, reads are direct. Tokens are random.

    python scripts/check_prediction.py OLMoE-flash --drive 1GB/s --budget 6GiB
"""

import argparse
import csv
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cgroup
import numpy as np

import flashmoe_jax
from flashmoe_jax.console import guarded, say
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.probe.arguments import parse_rates
from flashmoe_jax.probe.hit_rates import MissModel, TracedRouting, UniformRouting, hit_rate
from flashmoe_jax.probe.measure import measure_rates
from flashmoe_jax.probe.model import token_work
from flashmoe_jax.probe.predict import Drive, predict
from flashmoe_jax.telemetry.trace import load_trace

COLUMNS = (
    "hit_rates,budget,slots,drive_bytes_per_s,hit_rate,predicted_tokens_per_s,limit_tokens_per_s,measured_hit_rate,"
    "measured_tokens_per_s,measured_read_bytes_per_token,predicted_over_measured"
).split(",")
WARM_UP_TOKENS = 4
PROMPT_TOKENS = 32


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="model directory")
    parser.add_argument("--drive", default="1GB/s", metavar="RATE", help="throttle of the reads (default %(default)s)")
    parser.add_argument("--budget", default="50%", metavar="B", help="--device-budget (default 50%%)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="timed (default %(default)s)")
    parser.add_argument("--policy", default="lru", help="(default %(default)s)")
    parser.add_argument("--in-group", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """What the engine did, timed tokens only."""

    slots: int
    token_s: float  # median
    hit_rate: float
    read_bytes_per_token: float


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.in_group is not None:
        return guarded(lambda: decode(arguments))
    return guarded(lambda: check(arguments))


def check(arguments: argparse.Namespace) -> int:
    """Measures, decodes in a group, predicts, prints."""
    drives = parse_rates(arguments.drive)
    if len(drives) != 1:
        raise ConfigError(f"--drive {arguments.drive} names several rates; give one")
    directory = ModelDirectory.open(arguments.directory)
    rates = measure_rates(arguments.directory, directory, seconds=0.5)
    throttle = cgroup.Throttle(directory.array_path, next(iter(drives.values())))
    fastest = max(rates.drive_read.values())
    if throttle.bytes_per_s > fastest:
        raise ConfigError(f"the drive reads {fastest / 1e9:.2f} GB/s itself; throttle it to less")
    with tempfile.TemporaryDirectory() as folder:
        decoded = _decode_in_group(arguments, throttle, Path(folder))
        trace = load_trace(Path(folder) / "trace.npz")
    config, work = directory.config, token_work(directory)
    L, E, X = config.num_moe_layers, config.num_experts, config.experts_per_token
    routings: list[tuple[str, MissModel]] = [
        ("assumed", UniformRouting(E, X)),
        ("of this run", TracedRouting(trace, L, E, X, "")),
    ]
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    measured = 1 / decoded.token_s
    for name, routing in routings:
        shares = routing.miss_shares(decoded.slots)
        drive = Drive.of_rate(arguments.drive, throttle.bytes_per_s)
        predicted = predict(work, shares, drive, compute_bytes_per_s=rates.compute)
        writer.writerow(
            [
                *(name, arguments.budget, decoded.slots, throttle.bytes_per_s),
                f"{hit_rate(routing, decoded.slots):.3f}",
                *(f"{predicted.tokens_per_s:.3f}", f"{predicted.limit_tokens_per_s:.3f}", f"{decoded.hit_rate:.3f}"),
                *(f"{measured:.3f}", round(decoded.read_bytes_per_token), f"{predicted.tokens_per_s / measured:.3f}"),
            ]
        )
    return 0


def _decode_in_group(arguments: argparse.Namespace, throttle: cgroup.Throttle, folder: Path) -> Decoded:
    command = [sys.executable, __file__, str(arguments.directory), "--in-group", str(folder)]
    for name in ("drive", "budget", "tokens", "policy"):
        command += [f"--{name}", str(getattr(arguments, name))]
    try:
        with cgroup.create("flashmoe-throttle", throttle=throttle) as group:
            answer = group.run(command, stdout=subprocess.PIPE, text=True)
    except cgroup.CgroupError as error:
        raise ConfigError(str(error)) from error
    if answer.returncode:
        raise ConfigError(f"the engine ended with status {answer.returncode}; see above")
    return Decoded(**json.loads(answer.stdout))


def decode(arguments: argparse.Namespace) -> int:
    """Inside the group: decodes random tokens, prints `Decoded` as JSON and leaves the trace."""
    context = PROMPT_TOKENS + WARM_UP_TOKENS + arguments.tokens
    with flashmoe_jax.load(
        arguments.directory,
        device_budget=arguments.budget,
        policy=arguments.policy,
        max_context=context,
        record_trace=True,
    ) as engine:
        say(engine.plan_line())
        random = np.random.default_rng(0)
        session = engine.session()
        tokens = random.integers(0, session.vocab_size, context).tolist()
        np.asarray(session.prefill([tokens[:PROMPT_TOKENS]]))
        token_s, before = [], engine.stats()
        for index, token in enumerate(tokens[PROMPT_TOKENS:]):
            if index == WARM_UP_TOKENS:
                before = engine.stats()
            began = time.perf_counter()
            np.asarray(session.decode(np.array([token], np.int32)))
            token_s.append(time.perf_counter() - began)
        after = engine.stats()
        engine.save_trace(arguments.in_group / "trace.npz")
        grown: dict[str, Any] = {name: after[name] - before[name] for name in ("hits", "accesses", "read_bytes")}
        result = Decoded(
            slots=engine.plan.slots_per_layer,
            token_s=float(np.median(token_s[WARM_UP_TOKENS:])),
            hit_rate=grown["hits"] / grown["accesses"],
            read_bytes_per_token=grown["read_bytes"] / arguments.tokens,
        )
    print(json.dumps(dataclasses.asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
