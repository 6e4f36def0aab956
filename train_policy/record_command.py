"""The subcommand `record`: prompts from a file to a trace.

Owns the options, what they mean together, and what a person is told meanwhile. The work is in `record.py`, which is
imported only when it begins. Invariant: every mistake that the options and the prompts show is refused before the
weights are read.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashmoe_jax.console import say
from flashmoe_jax.errors import ConfigError
from train_policy.prompts import FIELDS, read_prompts

if TYPE_CHECKING:
    from flashmoe_jax.text import GenerationDefaults, SamplingParams

DEFAULT_NEW_TOKENS, DEFAULT_BATCH = 64, 16


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parsers of `python -m train_policy`."""
    parser = commands.add_parser(
        "record",
        help="record which experts the tokens of many prompts choose",
        description="Generate from prompts and record which experts every token of prompt and answer chose, never the "
        "text. The trace reads as if the prompts had been generated one after the other. When interrupted, the same "
        "command goes on where it stopped.",
    )
    parser.add_argument("--model", metavar="DIR|HUB_NAME", help="as for generate (default: the bundled demo model)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="as for generate")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help=".txt, a prompt per line; or .jsonl, see --field"
    )
    parser.add_argument(
        "--field", metavar="NAME", help=f"of each .jsonl line (default: the first of {', '.join(FIELDS)} it has)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="T.npz", help="trace to write")
    parser.add_argument(
        "--max-new-tokens", type=int, default=DEFAULT_NEW_TOKENS, metavar="N", help="per prompt (default: %(default)s)"
    )
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help="cut prompts to their first N tokens")
    parser.add_argument("--prompt-limit", type=int, metavar="N", help="the first N prompts of the file only")
    parser.add_argument(
        "--batch", type=int, default=DEFAULT_BATCH, metavar="N", help="prompts side by side (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: the model's own sampling)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-text tokens")
    parser.add_argument("--router-logits", action="store_true", help="record them too, float16 [tokens, L, E]")
    parser.add_argument("--hidden", action="store_true", help="record the router's input too, float16 [tokens, L, D]")
    parser.add_argument("--domain", metavar="NAME", help="what the prompts are about; evaluate tells domains apart")
    parser.add_argument("--licence", metavar="TEXT", help="of the prompts, kept in the trace")
    parser.add_argument("--device-budget", metavar="B", help="as for generate (default: 100%%, unless --memory-limit)")
    parser.add_argument("--memory-limit", metavar="SIZE", help="as for generate")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the file's name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Records and prints where to."""
    began = time.perf_counter()
    trace = _record(args)
    num_prefill = int((trace.phase == 0).sum())
    result = {
        "trace": str(args.out),
        "prompts": trace.meta["prompts"],
        "tokens": len(trace.ids),
        "prefill_tokens": num_prefill,
        "decode_tokens": len(trace.ids) - num_prefill,
        "seconds": round(time.perf_counter() - began, 3),
    }
    say(
        f"{result['prompts']} prompts, {num_prefill} tokens of theirs and {result['decode_tokens']} generated, "
        f"{_duration(result['seconds'])}"
    )
    print(json.dumps(result) if args.json else args.out)
    return 0


def _record(args: argparse.Namespace) -> Any:
    _check_options(args)
    prompts = read_prompts(args.prompts, args.field, args.prompt_limit)

    from flashmoe_jax.engine.budget import Budget, parse_size
    from flashmoe_jax.engine.engine import load
    from flashmoe_jax.engine.platform import enable_compilation_cache
    from flashmoe_jax.model_dir import MANIFEST_NAME, ModelDirectory
    from flashmoe_jax.resolve import default_cache_dir, resolve_model
    from flashmoe_jax.text import GenerationDefaults, Tokenizer
    from train_policy import record as recording

    budget = args.device_budget or (None if args.memory_limit else "100%")
    if budget is not None:
        Budget.parse(budget)
    if args.memory_limit is not None:
        parse_size(args.memory_limit)
    directory = resolve_model(args.model, args.cache_dir)
    config = ModelDirectory.open(directory).config
    token_ids = recording.encode(
        prompts,
        Tokenizer.from_dir(directory).encode,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        max_position=config.max_position,
    )
    batch_size = min(args.batch, len(prompts))
    sampling = _sampling(args, GenerationDefaults.from_dir(directory))
    job = recording.Job(
        token_ids=token_ids,
        batches=recording.make_batches(token_ids, batch_size, args.max_new_tokens, config.max_position),
        batch_size=batch_size,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        ignore_eos=args.ignore_eos,
        wide_columns=("router_logits",) * args.router_logits + ("hidden",) * args.hidden,
        meta=_meta(args, len(prompts), sampling),
        identity=_identity(args, token_ids, (directory / MANIFEST_NAME).read_bytes(), sampling),
    )
    parts = recording.Parts(args.out)
    parts.open(job)
    enable_compilation_cache((args.cache_dir or default_cache_dir()) / "compiled")
    with load(
        directory,
        policy="lru",  # which changes no choice of the router, and costs least
        device_budget=budget,
        memory_limit=args.memory_limit,
        max_context=job.context,
        batch_size=batch_size,
        record_trace=True,
        record_columns=job.wide_columns,
    ) as engine:
        say(engine.plan_line())
        say(f"{len(prompts)} prompts in {len(job.batches)} batches of {batch_size}")
        try:
            with _reporting(len(prompts)) as report:
                recording.record(engine, job, parts, report)
        except KeyboardInterrupt:
            say(f"what is recorded so far is in {parts.folder}; the same command goes on from there")
            raise
        trace = recording.join(job, parts, args.out, engine.trace_meta)
    parts.remove()
    return trace


def _check_options(args: argparse.Namespace) -> None:
    for name in ("max_new_tokens", "max_prompt_tokens", "prompt_limit", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.out.suffix != ".npz":
        raise ConfigError(f"--out {args.out} does not end in .npz; a trace does")
    if args.out.exists():
        raise ConfigError(f"--out {args.out} exists; give another place, or delete it")
    try:
        with tempfile.TemporaryFile(dir=args.out.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}; choose another place") from error


def _sampling(args: argparse.Namespace, defaults: "GenerationDefaults") -> "SamplingParams":
    """The model's own, at another temperature where one is given."""
    temperature = args.temperature
    if temperature is None:
        temperature = defaults.sampling.temperature if defaults.do_sample else 0.0
    try:
        return dataclasses.replace(defaults.sampling, temperature=temperature, seed=args.seed)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None


def _meta(args: argparse.Namespace, num_prompts: int, sampling: "SamplingParams") -> dict[str, Any]:
    said = {name: getattr(args, name) for name in ("domain", "licence") if getattr(args, name) is not None}
    return {
        "prompts": num_prompts,
        "source": args.prompts.name,
        "max_new_tokens": args.max_new_tokens,
        "sampling": dataclasses.asdict(sampling),
        **said,
    }


def _identity(
    args: argparse.Namespace, token_ids: list[list[int]], manifest: bytes, sampling: "SamplingParams"
) -> dict[str, Any]:
    """What must be the same for recording to go on, by the option that a person would have changed."""
    return {
        "--model": _digest(manifest),
        "--prompts": _digest(json.dumps(token_ids).encode()),
        "--max-new-tokens": args.max_new_tokens,
        "--batch": args.batch,
        "--temperature": sampling.temperature,
        "--seed": args.seed,
        "sampling": dataclasses.asdict(sampling),
        "--ignore-eos": args.ignore_eos,
        "--router-logits": args.router_logits,
        "--hidden": args.hidden,
        "--domain": args.domain,
        "--licence": args.licence,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@contextlib.contextmanager
def _reporting(num_prompts: int) -> Iterator[Any]:
    """The forecast as a line and a bar of prompts; lines only where stderr is not a terminal."""
    from train_policy.record import Report

    console = Console(stderr=True)
    columns = (
        TextColumn("recording"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("recording", total=num_prompts)
        write: Callable[[str], None] = progress.console.print if console.is_terminal else say

        def forecast(seconds: float) -> None:
            write(f"recording takes about {_duration(seconds)} from now")

        yield Report(forecast, lambda prompts: progress.advance(task, prompts))


def _duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
