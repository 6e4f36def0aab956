"""The policy training command: `python -m train_policy`, also `flashmoe train-policy`.

Owns the command line; what each subcommand does is in a module of its own.
"""

import argparse
import sys
from collections.abc import Sequence

from flashmoe_jax.console import OneLineParser, guarded
from train_policy.evaluate_command import add_parser as add_evaluate_parser
from train_policy.fit_command import add_parser as add_fit_parser
from train_policy.record_command import add_parser as add_record_parser
from train_policy.replay_command import add_parser as add_replay_parser


def build_parser() -> argparse.ArgumentParser:
    """The parser, one subparser per subcommand."""
    parser = OneLineParser(prog="python -m train_policy", description="Make an eviction policy of recorded traces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_record_parser(commands)
    add_fit_parser(commands)
    add_replay_parser(commands)
    add_evaluate_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; the exit code is 0, or 2 after a mistake of the caller."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
