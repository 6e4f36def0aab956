"""The options of `flashmoe probe`, and what is refused before anything is measured. Imports no JAX."""

import argparse
import re
from pathlib import Path

from flashmoe_jax.console import OneLineParser
from flashmoe_jax.errors import BudgetError, ConfigError
from flashmoe_jax.resolve import default_cache_dir

MANIFEST_NAME = "manifest.json"  # of a model directory; model_dir.MANIFEST_NAME, which costs an import of JAX


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="flashmoe probe",
        description="Measure this machine's drive, memory, expert kernel and device copy, and predict from that how "
        "fast a model decodes under which memory budget.",
        epilog="Rates are medians in bytes per second. The report goes to stdout, progress to stderr.",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="a model directory, whose experts are read and whose speed is predicted; or any directory on the drive to "
        "measure, with OLMoE's record of 12 MiB (default: the user's cache directory)",
    )
    parser.add_argument(
        "--drive",
        metavar="RATE,...",
        help="predict for these drives too, such as 2GB/s,3.5GB/s,7.4GB/s",
    )
    parser.add_argument(
        "--budget",
        metavar="B,...",
        help="budgets to predict: 4GiB (the whole process on the CPU, everything on the device elsewhere), 25%% or "
        "16slots (default: from the smallest to all experts resident, as far as memory is free)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.npz",
        help="routing of this model on your own text (flashmoe generate --trace), from which hit rates are computed",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens that the KV cache has room for (default: the model's own maximum, at most 4096)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="time for each number of reads in flight (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of tables")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Refuses what has no effect or no meaning; sets `args.directory` and `args.has_model`.

    Raises:
        FlashMoEError: one clear line.
    """
    if args.directory is None:
        args.directory = default_cache_dir()
        try:
            args.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{args.directory} cannot be made ({error.strerror}); give a directory") from error
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory} is no directory; give a model directory, or one on the drive to measure")
    args.has_model = (args.directory / MANIFEST_NAME).is_file()
    for name in ("drive", "budget", "trace", "max_context"):
        if getattr(args, name) is not None and not args.has_model:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for predictions, which need a model directory, and {args.directory} is "
                "none; make one with: python -m checkpoints.convert --hf DIR --out DIR"
            )
    if not 0 < args.seconds <= 60:
        raise ConfigError(f"--seconds {args.seconds:g} is out of range; give more than 0 and at most 60")
    if args.trace is not None and not args.trace.is_file():
        raise ConfigError(f"--trace {args.trace} does not exist; record one with flashmoe generate --trace FILE.npz")


def parse_rates(text: str) -> dict[str, int]:
    """Bytes per second of `2GB/s,3.5GB/s`, by what was written.

    Raises:
        ConfigError: anything else.
    """
    from flashmoe_jax.engine.budget import parse_size

    rates = {}
    for part in (part.strip() for part in text.split(",")):
        size = re.fullmatch(r"(.*?\d.*?[A-Za-z])\s*/\s*s", part)
        try:
            rates[part] = parse_size(size[1] if size else "")
        except BudgetError:
            raise ConfigError(
                f"drive rate {part!r} in --drive {text} is not understood; write for example 2GB/s,3.5GB/s or 800MB/s"
            ) from None
        if rates[part] < 1:
            raise ConfigError(f"drive rate {part!r} is nothing; give more than 0B/s")
    return rates
