"""The subcommand `fit`: traces to a policy.

Owns the options, what they mean together, and what a person is told meanwhile. The work is in `fit.py` and `static.py`,
imported only when it begins. Invariant: stdout carries the result alone, and nothing is written before training ends.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashmoe_jax.console import say
from flashmoe_jax.errors import ConfigError

if TYPE_CHECKING:
    from train_policy import fit

KINDS = ("static", "paper", "context", "shared")
LABELS = ("distance", "victim", "reuse")
SHAPES = ("layer", "expert")
INPUTS = ("router_logits", "hidden")
DEFAULT_TEST = "20%"
_MAX_SEED = 2**31 - 1


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parsers of `python -m train_policy`."""
    parser = commands.add_parser(
        "fit",
        help="fit a policy to traces",
        description="Train an eviction policy on traces. Some prompts are left out for evaluate, and some of the "
        "others say when to stop. Every token is one step, caches and counters carry over from prompt to prompt.",
        epilog="static: the popular experts stay. paper: FlashMoE's network. context: a network over the whole layer "
        "that sees what all layers chose. shared: one network for the experts of all layers and models.",
    )
    parser.add_argument(
        "--trace", type=Path, nargs="+", required=True, metavar="T", help="traces (.npz) of one model (shared: of any)"
    )
    parser.add_argument("--kind", choices=KINDS, required=True, help="what to train, see below")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="folder to write the policy to")
    target.add_argument("--into", type=Path, metavar="MODEL", help="model directory to install it in")
    parser.add_argument(
        "--label",
        choices=LABELS,
        help="what the network says of an expert: the distance of its next use (default for paper), whether Belady "
        "would keep it, or how soon it is used again (default for the others)",
    )
    parser.add_argument("--shape", choices=SHAPES, help="of paper: a network per layer (default) or per expert")
    parser.add_argument(
        "--inputs",
        metavar="NAME,NAME",
        help=f"of context, beside ids: {', '.join(INPUTS)}; the traces must have them (default: none)",
    )
    parser.add_argument(
        "--test-prompts",
        metavar="P%|N,N-N",
        help=f"prompts of each trace to leave out for evaluate: a share, or numbers (default: {DEFAULT_TEST})",
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="experts per layer (default: of the trace's meta, else its largest id)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the prompts, at the most")
    parser.add_argument("--hidden-units", type=int, metavar="N", help="of context and shared, a hidden layer's width")
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, batches and dropout (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fits and prints where to."""
    _check_options(args)
    if args.kind == "static":
        from train_policy.static import fit_static

        written = fit_static(args.trace, out=args.out, into=args.into)
        print(json.dumps({"policy": str(written), "kind": "static"}) if args.json else written)
        return 0
    result = _fit(args)
    print(json.dumps(result) if args.json else result["policy"])
    return 0


def _check_options(args: argparse.Namespace) -> None:
    only_for = {
        "label": ("paper", "context", "shared"),
        "shape": ("paper",),
        "inputs": ("context",),
        "hidden_units": ("context", "shared"),
        "epochs": ("paper", "context", "shared"),
        "test_prompts": ("paper", "context", "shared"),
        "experts": ("paper", "context", "shared"),
        "seed": ("paper", "context", "shared"),
    }
    for name, kinds in only_for.items():
        if getattr(args, name) is not None and args.kind not in kinds:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has an effect with --kind {' or '.join(kinds)} only; leave it out")
    for name, least, most in (
        ("experts", 1, None),
        ("epochs", 1, None),
        ("hidden_units", 1, 4096),
        ("seed", 0, _MAX_SEED),
    ):
        value = getattr(args, name)
        if value is not None and (value < least or (most is not None and value > most)):
            bound = f"{least} to {most}" if most is not None else f"at least {least}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {bound}")
    if args.inputs is not None and (unknown := set(_names(args.inputs)) - set(INPUTS)):
        raise ConfigError(f"--inputs {', '.join(sorted(unknown))}: unknown; choose of {', '.join(INPUTS)}")
    if args.into is not None and args.experts is not None:
        raise ConfigError("--experts has no effect with --into, whose model says how many there are; leave it out")


def _names(text: str) -> list[str]:
    return [name.strip().replace("-", "_") for name in text.split(",")]


def _fit(args: argparse.Namespace) -> dict[str, Any]:
    try:
        import numba  # noqa: F401
        import optax  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"fit needs {error.name}; install it with: pip install 'flashmoe-jax[train]'") from None
    import dataclasses

    from flashmoe_jax.policy.base import PolicyShape
    from flashmoe_jax.policy.saved import save_policy
    from train_policy import fit
    from train_policy.labels import Label

    model = None
    folder = args.out
    if args.into is not None:
        from flashmoe_jax.model_dir import POLICY_NAME, ModelDirectory

        config = ModelDirectory.open(args.into).config
        model = PolicyShape(config.num_moe_layers, config.num_experts, config.experts_per_token)
        folder = args.into / POLICY_NAME / args.kind
    elif folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    recipe = fit.RECIPES[args.kind]
    changes: dict[str, Any] = {
        "label": Label(args.label) if args.label else None,
        "shape": args.shape,
        "epochs": args.epochs,
        "hidden_units": args.hidden_units,
    }
    recipe = dataclasses.replace(recipe, **{name: value for name, value in changes.items() if value is not None})
    with _reporting() as report:
        fitted = fit.fit(
            args.trace,
            args.kind,
            recipe,
            seed=args.seed or 0,
            test_prompts=args.test_prompts or DEFAULT_TEST,
            inputs=frozenset(_names(args.inputs)) if args.inputs else frozenset(),
            num_experts=model.num_experts if model else args.experts,
            model=None if args.kind == "shared" else model,
            report=report,
        )
    save_policy(folder, fitted.saved)
    for closed in fitted.gap_closed:
        say(
            "of the gap from LRU to MIN, on the prompts that said when to stop, it closes "
            + ", ".join(f"{share:.3f} at {slots} slots" for slots, share in closed.items())
        )
    say(f"{fitted.num_steps} tokens, {fitted.epochs} epochs, {fitted.seconds:.0f} s")
    return {
        "policy": str(folder),
        "kind": args.kind,
        "label": recipe.label.value,
        "gap_closed": [{str(slots): round(share, 4) for slots, share in c.items()} for c in fitted.gap_closed],
        "tokens": fitted.num_steps,
        "epochs": fitted.epochs,
        "seconds": round(fitted.seconds, 3),
    }


@contextlib.contextmanager
def _reporting() -> Iterator[Callable[["fit.Progress"], None]]:
    """Progress on stderr: a bar on a terminal, a line per epoch elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[note]}"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=None, note="preparing")
        write: Callable[[str], None] = progress.console.print if console.is_terminal else say

        def report(now: "fit.Progress") -> None:
            progress.update(task, total=now.num_steps, completed=now.step, note=f"epoch {now.epoch}")
            if now.gap_closed is not None:
                write(f"epoch {now.epoch}: {now.gap_closed:.4f} of the gap from LRU to MIN")

        yield report
