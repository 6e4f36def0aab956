"""FlashMoE's experiments (arXiv 2601.17063) with this package, beside the numbers that the paper reports.

On TriviaQA questions: hit rates of the paper's network, of `context` and of the policies that the paper compares with;
how often evicted experts are asked for again within 5 tokens; which share of a layer's experts a prompt of 32 or 256
tokens touches; decode speed under each policy, in turns in one run. The bundled model stands in for OLMoE-1B-7B unless
`--model` names another: what depends on the model will differ, and the report says so line by line. Everything that is
made is kept in `--out`, where the same command goes on.
"""

import argparse
import contextlib
import csv
import io
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.console import guarded, say
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.telemetry.trace import PREFILL, Trace, load_trace
from train_policy.__main__ import main as train_policy

PROMPTS = Path(__file__).parent.parent / "checkpoints" / "demo" / "prompts" / "trivia.jsonl"
SLOTS = "12.5%,25%,37.5%,50%"
COMPARED = ("lru", "lfu", "arc", "lecar")
# What the paper reports on OLMoE-1B-7B: hit rate of its network over each policy's, "up to".
PAPER_GAIN = {"lru": 21, "lfu": 51, "arc": 28, "lecar": 21}
PAPER_REFETCH = {"lru": 34.2, "min": 0.1}
PAPER_TOUCHED = {32: 47, 256: 67}
PAPER_SPEED = {"OLMoE-1B-7B": 22, "Qwen3-30B-A3B": 7}  # per cent over LRU


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="model directory (default: the bundled model)")
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, metavar="FILE", help="(default: the bundled questions)"
    )
    parser.add_argument("--prompt-limit", type=int, default=512, metavar="N", help="prompts used (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (default %(default)s)")
    parser.add_argument("--device-budget", default="25%", metavar="B", help="when decoding is timed (default 25%%)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed answers per policy (default 5)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for traces, policies, report.md")
    return parser


def _run(*words: str | Path) -> str:
    """A subcommand of the training command; its stdout."""
    say(f"-- train_policy {' '.join(map(str, words))}")
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        if train_policy([str(word) for word in words]) != 0:
            raise ConfigError("that step failed; see above")
    return stdout.getvalue()


def prepare(args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """Records and fits what is not there yet: the trace, and the policies `paper` and `context`."""
    trace = args.out / "trivia.npz"
    model = ["--model", args.model] if args.model else []
    if not trace.exists():
        _run(
            *("record", *model, "--prompts", args.prompts, "--prompt-limit", args.prompt_limit, "--out", trace),
            *("--max-new-tokens", args.max_new_tokens, "--domain", "trivia"),
        )
    policies = []
    for kind in ("paper", "context"):
        folder = args.out / kind
        if not folder.exists():
            _run("fit", "--kind", kind, "--trace", trace, "--out", folder)
        policies.append(folder)
    return trace, policies


def hit_rates(trace: Path, policies: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Rows of `evaluate` on the questions that were held out."""
    against = ",".join((*COMPARED, "decayed", "min"))
    text = _run(
        *("evaluate", "--policy", *policies, "--trace", trace, "--slots", SLOTS),
        *("--against", against, "--out", out / "evaluation", "--json"),
    )
    return json.loads(text)


def share_touched(trace: Trace, num_tokens: int) -> tuple[float, int]:
    """Mean share of a layer's experts that `num_tokens` tokens ask for, and how many prompts were long enough.

    Where no prompt is, consecutive tokens of several prompts stand in, and the second number is 0.
    """
    experts = trace.meta["experts"]
    prompts = [np.flatnonzero((trace.seq_id == s) & (trace.phase == PREFILL)) for s in np.unique(trace.seq_id)]
    spans = [rows[:num_tokens] for rows in prompts if len(rows) >= num_tokens]
    long_enough = len(spans)
    if not spans:
        rows = np.concatenate(prompts)
        spans = [rows[i : i + num_tokens] for i in range(0, len(rows) - num_tokens + 1, num_tokens)]
    shares = [
        np.mean([len(np.unique(trace.ids[rows, layer])) / experts for layer in range(trace.ids.shape[1])])
        for rows in spans
    ]
    return float(np.mean(shares)), long_enough


def decode_speeds(args: argparse.Namespace, policies: Sequence[Path]) -> dict[str, list[float]]:
    """Tokens/s of decode per policy, answers in turns; the first round warms up and is left out."""
    import flashmoe_jax

    texts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()[: args.rounds + 1]]
    names = ["lru", "decayed", *map(str, policies)]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                flashmoe_jax.load(args.model, device_budget=args.device_budget, policy=name, max_context=512)
            )
            for name in names
        }
        for turn, text in enumerate(texts):
            prompt = next(iter(text.values()))
            for name, engine in engines.items():
                pieces = engine.generate(prompt, max_new_tokens=args.max_new_tokens, ignore_eos=True)
                next(iter(pieces))
                began = time.perf_counter()
                num_tokens = sum(piece.token_id is not None for piece in pieces)
                if turn:
                    speeds[name].append(num_tokens / (time.perf_counter() - began))
    return speeds


def report(args: argparse.Namespace, rows: list[dict[str, Any]], trace: Trace, speeds: dict[str, list[float]]) -> str:
    """Markdown."""
    by_key = {(row["policy"], row["slots"]): row for row in rows}
    slots = [s for s in dict.fromkeys(row["slots"] for row in rows) if s != "mean"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    model = trace.meta.get("model", "?")
    lines = [
        f"# FlashMoE's experiments with {model}",
        "",
        f"{len(np.unique(trace.seq_id))} TriviaQA prompts, {len(trace.ids)} tokens; hit rates on the prompts held out.",
        "",
        "## Hit rate",
        "| policy | " + " | ".join(f"{s} slots" for s in slots) + " |",
        "|---" * (len(slots) + 1) + "|",
    ]
    for policy in policies:
        cells = [f"{by_key[policy, s]['hit_rate']:.1%}" for s in slots]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Gain over each policy, in per cent of its hit rate, at each number of slots; the paper's is `up to`:",
        "",
    ]
    lines += [
        "| over | " + " | ".join(("paper's network", "context", "MIN", "the paper reports")) + " |",
        "|---" * 5 + "|",
    ]
    for policy, reported in PAPER_GAIN.items():
        gains = []
        for ours in ("paper", "context", "min"):
            ratios = [by_key[ours, s]["hit_rate"] / by_key[policy, s]["hit_rate"] - 1 for s in slots]
            gains.append(", ".join(f"{100 * r:+.1f}" for r in ratios))
        lines.append(f"| {policy} | " + " | ".join(gains) + f" | +{reported} |")
    lines += ["", "## Asked for again within 5 tokens of eviction", "| policy | here | the paper |", "|---|---|---|"]
    for policy, reported in PAPER_REFETCH.items():
        values = [by_key[policy, s]["refetch_5"] for s in slots]
        cells = ", ".join("-" if v is None else f"{v:.1%}" for v in values)
        lines.append(f"| {policy} | {cells} | {reported} % |")
    lines += ["", "## Experts that a prompt touches", "| tokens | here | prompts | the paper |", "|---|---|---|---|"]
    for num_tokens, reported in PAPER_TOUCHED.items():
        share, count = share_touched(trace, num_tokens)
        source = str(count) if count else "none so long: consecutive prompts"
        lines.append(f"| {num_tokens} | {share:.0%} | {source} | {reported} % |")
    lines += [
        "",
        f"## Decode speed, {args.device_budget} of the experts in slots",
        "| policy | tokens/s | ÷ lru | ÷ decayed |",
    ]
    lines.append("|---|---|---|---|")
    for name, values in speeds.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, speeds[base], strict=True)) for base in ("lru", "decayed")
        ]
        shown = Path(name).name
        lines.append(f"| {shown} | {statistics.median(values):.2f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    reported_speeds = ", ".join(f"+{gain} % on {of}" for of, gain in PAPER_SPEED.items())
    lines += [
        "",
        f"The paper reports {reported_speeds} over LRU.",
        "",
        "## What does not reproduce",
        *_differences(by_key, slots),
    ]
    return "\n".join(lines) + "\n"


def _differences(by_key: dict[tuple[str, str], dict[str, Any]], slots: Sequence[str]) -> list[str]:
    """Sentences about claims that these numbers do not bear out."""
    lines = []
    for policy, reported in PAPER_GAIN.items():
        gains = {
            ours: max(by_key[ours, s]["hit_rate"] / by_key[policy, s]["hit_rate"] - 1 for s in slots)
            for ours in ("paper", "min")
        }
        if gains["paper"] < reported / 100:
            bound = " MIN itself gains less." if gains["min"] < reported / 100 else ""
            lines.append(
                f"- +{reported} % over {policy}: the paper's network gains {gains['paper']:+.1%} at best.{bound}"
            )
    return lines or ["Nothing of the hit rates."]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Everything, in order; prints the report."""
    args.out.mkdir(parents=True, exist_ok=True)
    path, policies = prepare(args)
    rows = hit_rates(path, policies, args.out)
    speeds = decode_speeds(args, policies)
    with open(args.out / "speeds.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("policy", "tokens_per_s"), *((Path(n).name, v) for n, vs in speeds.items() for v in vs)]
        )
    text = report(args, rows, load_trace(path), speeds)
    (args.out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
