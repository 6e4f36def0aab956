"""The subcommand `evaluate`: trained policies against others on held-out prompts, as a report with plots.

Owns the options and where files go. The work is in `evaluate.py` and `figures.py`, imported only when it begins.
Invariant: stdout carries the result alone, a table or JSON; a report that exists is whole.
"""

import argparse
import json
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from flashmoe_jax.console import say
from flashmoe_jax.errors import ConfigError
from train_policy.replay_command import entries, slots_of

DEFAULT_AGAINST = "lru,lfu,lfru,decayed,arc,lecar,s3fifo,min"
DEFAULT_SLOTS = "12.5%,25%,37.5%,50%"
DEFAULT_DRAWS = 1000


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parsers of `python -m train_policy`."""
    parser = commands.add_parser(
        "evaluate",
        help="evaluate trained policies on held-out prompts",
        description="Replay trained policies and others on prompts that training has not seen, and write report.md, "
        "rows.csv and plots. Every trace is a test of its own; several are also taken together. Every token is one "
        "decode step, and the cache carries over from prompt to prompt.",
    )
    parser.add_argument(
        "--policy", type=Path, nargs="+", required=True, metavar="DIR", help="policy folders that fit wrote"
    )
    parser.add_argument("--trace", type=Path, nargs="+", required=True, metavar="T", help="traces (.npz)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the report")
    parser.add_argument(
        "--slots",
        metavar="N,P%,...",
        help=f"slots per layer: numbers, or shares of the experts (default: {DEFAULT_SLOTS.replace('%', '%%')}, each "
        "at least a token's experts)",
    )
    parser.add_argument(
        "--against",
        default=DEFAULT_AGAINST,
        metavar="P,P,...",
        help="policies to compare with, as for replay; lru, decayed and min always are (default: %(default)s)",
    )
    parser.add_argument(
        "--test-prompts",
        default="auto",
        metavar="auto|all|N,N-M,...",
        help="prompts that count, by seq_id (default: auto, those that no policy saw in training)",
    )
    parser.add_argument(
        "--guard", action="store_true", help="learned policies under guard, as the engine runs them (default: bare)"
    )
    parser.add_argument("--experts", type=int, metavar="N", help="experts per layer, where a trace does not say")
    parser.add_argument(
        "--bootstrap",
        type=int,
        default=DEFAULT_DRAWS,
        metavar="N",
        help="draws of prompts for the 95%% intervals, 0 for none (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluates, writes the report and prints."""
    began = time.perf_counter()
    against = _check_options(args)
    slots = entries(args.slots or DEFAULT_SLOTS, "--slots")
    for text in slots:
        slots_of(text, 0)
    try:
        import matplotlib  # noqa: F401
        import numba  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"evaluate needs {error.name}; install it with: pip install 'flashmoe-jax[train]'") from None
    from train_policy import evaluate, figures
    from train_policy.evaluate_report import csv_text, main_table, markdown
    from train_policy.plots import write_plots

    if unknown := set(against) & set(evaluate.NOT_COMPARED):
        raise ConfigError(f"--against {', '.join(sorted(unknown))} is no fair comparison; leave it out")
    against = list(dict.fromkeys([*(p for p in against if p != "min"), *evaluate.REFERENCES]))
    candidates = evaluate.read_candidates(args.policy)
    tests = evaluate.run_tests(
        args.trace,
        candidates,
        against,
        slots=slots,
        is_default_slots=args.slots is None,
        num_experts=args.experts,
        test_prompts=args.test_prompts,
        guard=args.guard,
        say=say,
    )
    evaluation = figures.evaluated(candidates, tests, num_draws=args.bootstrap, seed=args.seed)
    rows = figures.rows(evaluation)
    with _published(args.out) as folder:
        images = write_plots(evaluation, folder)
        (folder / "rows.csv").write_text(csv_text(evaluation), encoding="utf-8")
        (folder / "report.md").write_text(markdown(evaluation, _command(args), images), encoding="utf-8")
    say(f"{args.out / 'report.md'}, {time.perf_counter() - began:.0f} s")
    print(json.dumps(rows, indent=1) if args.json else main_table(evaluation))
    return 0


def _check_options(args: argparse.Namespace) -> list[str]:
    """Refuses what needs no trace; returns the policies to compare with."""
    for name, least in (("bootstrap", 0), ("seed", 0), ("experts", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}; it must be at least {least}")
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out {args.out} is a file; give a folder")
    parent = args.out.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"--out {args.out} cannot be made; give a folder in one that exists and can be written")
    return entries(args.against, "--against")


class _published:
    """A folder to fill, whose files then appear in `out`; what else is there stays."""

    def __init__(self, out: Path):
        self._out = out

    def __enter__(self) -> Path:
        self._part = Path(tempfile.mkdtemp(dir=self._out.absolute().parent, prefix=f".{self._out.name}."))
        return self._part

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._out.mkdir(exist_ok=True)
                # The report last: it names the others.
                for file in sorted(self._part.iterdir(), key=lambda path: path.suffix == ".md"):
                    os.replace(file, self._out / file.name)
        finally:
            shutil.rmtree(self._part, ignore_errors=True)


def _command(args: argparse.Namespace) -> str:
    """The command again, with every option that is not a default."""
    words = ["python", "-m", "train_policy", "evaluate"]
    words += ["--policy", *map(str, args.policy), "--trace", *map(str, args.trace), "--out", str(args.out)]
    defaults = {"against": DEFAULT_AGAINST, "test_prompts": "auto", "bootstrap": DEFAULT_DRAWS, "seed": 0}
    for name in ("slots", "against", "test_prompts", "experts", "bootstrap", "seed"):
        if getattr(args, name) != defaults.get(name):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return shlex.join([*words, *["--guard"] * args.guard])
