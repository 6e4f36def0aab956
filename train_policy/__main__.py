"""The policy training command: `python -m train_policy`, also `flashmoe train-policy`.

Owns the command line; what each subcommand does is in a module of its own.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmoe_jax.console import OneLineParser, guarded
from train_policy.evaluate_command import add_parser as add_evaluate_parser
from train_policy.record_command import add_parser as add_record_parser
from train_policy.replay_command import add_parser as add_replay_parser


def build_parser() -> argparse.ArgumentParser:
    """The parser, one subparser per subcommand."""
    parser = OneLineParser(prog="python -m train_policy", description="Make an eviction policy of recorded traces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_record_parser(commands)
    fit = commands.add_parser("fit", help="fit a policy to traces")
    fit.add_argument("--trace", type=Path, nargs="+", required=True, metavar="T", help="traces (.npz) of one model")
    fit.add_argument("--kind", choices=("static",), required=True, help="static: the popular experts stay")
    target = fit.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="folder to write the policy to")
    target.add_argument("--into", type=Path, metavar="MODEL", help="model directory to install it in")
    fit.set_defaults(run=_fit)
    add_replay_parser(commands)
    add_evaluate_parser(commands)
    return parser


def _fit(args: argparse.Namespace) -> int:
    from train_policy.static import fit_static

    print(fit_static(args.trace, out=args.out, into=args.into))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; the exit code is 0, or 2 after a mistake of the caller."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
