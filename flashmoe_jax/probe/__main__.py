"""`python -m flashmoe_jax.probe [DIR]`: the command.

Owns the order: options, the model's manifest, budgets, measurements, predictions. Invariant: what can be refused is
refused before the first measurement, which takes seconds.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flashmoe_jax.console import guarded, prepare_stdout
from flashmoe_jax.output import write
from flashmoe_jax.probe.arguments import build_parser, check_options, parse_rates

__all__ = ["build_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """The command, once its arguments are parsed; returns the exit code."""
    prepare_stdout()
    check_options(args)
    drives = {} if args.drive is None else parse_rates(args.drive)
    result = _probe(args, drives)
    if args.json:
        write(json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    else:
        from flashmoe_jax.probe.report import print_tables

        print_tables(result)
    return 0


def _probe(args: argparse.Namespace, drives: Mapping[str, float]) -> dict[str, Any]:
    """The `--json` object."""
    from flashmoe_jax.engine.platform import configure_backend

    configure_backend(None)
    from flashmoe_jax.probe.machine import describe_machine
    from flashmoe_jax.probe.measure import measure_rates
    from flashmoe_jax.probe.model import ProbedModel

    machine = describe_machine()
    model = None
    if args.has_model:
        budgets = None if args.budget is None else [text.strip() for text in args.budget.split(",")]
        model = ProbedModel(args.directory, budgets=budgets, trace=args.trace, max_context=args.max_context)
    rates = measure_rates(args.directory, None if model is None else model.directory, args.seconds)
    result: dict[str, Any] = {
        "drive_read_bytes_per_s": {str(depth): round(rate) for depth, rate in rates.drive_read.items()},
        "memory_read_bytes_per_s": round(rates.memory_read),
        "kernel_bytes_per_s": round(rates.kernel),
        "device_copy_bytes_per_s": round(rates.device_copy),
        "machine": machine,
        "notes": list(rates.notes),
    }
    if model is not None:
        result["predictions"] = model.predictions(rates, drives)
        result["recommended"] = model.recommended(result["predictions"])
        result["notes"] += [*model.notes, *model.speed_notes(rates)]
    return result


if __name__ == "__main__":
    sys.exit(main())
