"""The report of an evaluation: `report.md` and `rows.csv`.

Owns words and tables; numbers come from `figures.py`. Invariant: every table says over which prompts, and every share
carries its interval where one was asked for.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train_policy.evaluate import ALL, BLOCK_TOKENS
from train_policy.figures import MEAN, Evaluation, Figures, rows

TITLES = {
    "hit_rate": "hit rate",
    "reads_per_token": "reads per token and layer",
    "gap_lru": "LRU→MIN closed",
    "gap_decayed": "decayed→MIN closed",
    "reads_saved": "reads saved against decayed",
    "refetch_5": "re-fetched within 5 tokens",
    "good_decisions": "good decisions",
    "good_decisions_lru": "LRU's in the same states",
    "regret": "misses ÷ MIN's",
}
_MAIN = (
    "hit_rate",
    "gap_lru",
    "gap_decayed",
    "reads_saved",
    "refetch_5",
    "good_decisions",
    "good_decisions_lru",
    "regret",
)
_WORDS = """\
*LRU→MIN closed* is the share of the misses that LRU has more than MIN which the policy avoids; *decayed→MIN closed* the
same from decayed frequency (half-life 16 tokens). *Reads saved* is the share of decayed's misses that the policy does
not have. A *good decision* evicts an expert that MIN might have evicted in the same state: where n leave at a step,
fewer than n of the experts that might have left are used later. *LRU's in the same states* is the share of good
decisions that LRU would have made in the states that the policy came into. MIN knows the future; it is a ceiling, not a
policy. Experts of a token and layer are requested together, and none of them leaves for another."""


def markdown(evaluation: Evaluation, command: str, images: Sequence[str]) -> str:
    """The report.

    Args:
        evaluation: what to report.
        command: that made it.
        images: file names of plots beside the report.
    """
    main = evaluation.figures[0]
    parts = [
        "# Evaluation of eviction policies",
        f"```console\n$ {command}\n```",
        _tests_table(evaluation),
        _policies_table(evaluation),
        f"## Mean over {_and(main.slots[:-1])} slots per layer" + _of(main),
        _main_table(evaluation, main),
        _interval_note(evaluation),
        _WORDS,
        "## By number of slots" + _of(main),
        _by_slots(evaluation, main, "hit_rate"),
        _by_slots(evaluation, main, "gap_lru"),
        _by_slots(evaluation, main, "reads_saved"),
    ]
    if len(evaluation.tests) > 1:
        parts += ["## By what it was trained on and tested on", _domains_table(evaluation, "gap_lru")]
        parts += [_domains_table(evaluation, "reads_saved")]
    if images:
        parts += ["## Plots", "\n".join(f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in images)]
    return "\n\n".join(parts) + "\n"


def main_table(evaluation: Evaluation) -> str:
    """The table that a person at a terminal wants."""
    return _main_table(evaluation, evaluation.figures[0])


def csv_text(evaluation: Evaluation) -> str:
    """`rows.csv`; empty where a number is not known."""
    table = rows(evaluation)
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _of(figures: Figures) -> str:
    return ", all tests together" if figures.name == ALL else ""


def _tests_table(evaluation: Evaluation) -> str:
    cells = [["test", "trace", "prompts that count", "tokens", "layers x experts", "slots per layer"]]
    for test in evaluation.tests:
        slots = ", ".join(str(number) for number in test.slots.values())
        shape = f"{test.num_layers} x {test.num_experts}"
        cells.append([test.name, test.file, test.note, f"{test.tokens.sum():,}", shape, slots])
    return _table(cells, num_left=3)


def _policies_table(evaluation: Evaluation) -> str:
    cells = [["policy", "trained on", "sees beside the ids"]]
    cells += [[c.name, c.domains, ", ".join(sorted(c.inputs)) or "nothing"] for c in evaluation.candidates]
    return _table(cells, num_left=3)


def _main_table(evaluation: Evaluation, figures: Figures) -> str:
    place = figures.slots.index(MEAN)
    cells = [["policy", *(TITLES[name] for name in _MAIN)]]
    for column, policy in enumerate(evaluation.policies):
        numbers = [_number(figures, name, place, column) for name in _MAIN]
        cells.append([_emphasised(evaluation, policy), *numbers])
    return _table(cells)


def _by_slots(evaluation: Evaluation, figures: Figures, metric: str) -> str:
    cells = [[TITLES[metric], *figures.slots]]
    for column, policy in enumerate(evaluation.policies):
        numbers = [_number(figures, metric, place, column) for place in range(len(figures.slots))]
        cells.append([_emphasised(evaluation, policy), *numbers])
    return _table(cells)


def _domains_table(evaluation: Evaluation, metric: str) -> str:
    tests = evaluation.figures[1:]
    cells = [[TITLES[metric], "trained on", *(figures.name for figures in tests)]]
    for candidate in evaluation.candidates:
        column = evaluation.policies.index(candidate.name)
        numbers = [_number(figures, metric, len(figures.slots) - 1, column) for figures in tests]
        cells.append([_emphasised(evaluation, candidate.name), candidate.domains, *numbers])
    return _table(cells, num_left=2)


def _interval_note(evaluation: Evaluation) -> str:
    if not evaluation.num_draws:
        return "No intervals were asked for."
    if min(len(test.tokens) for test in evaluation.tests) < 2:
        return f"There is no interval where a test has one prompt of at most {BLOCK_TOKENS} tokens."
    return (
        f"In brackets: 95 % intervals, {evaluation.num_draws:,} bootstrap draws of prompts, the same for all policies."
    )


def _emphasised(evaluation: Evaluation, policy: str) -> str:
    return f"**{policy}**" if policy in (candidate.name for candidate in evaluation.candidates) else policy


def _number(figures: Figures, metric: str, place: int, column: int) -> str:
    value, low, high = (part[metric][place, column] for part in (figures.value, figures.low, figures.high))
    if np.isnan(value):
        return "-"
    # Where nothing varies there is nothing to say about how much.
    shown = [f"{round(float(number), 3) + 0.0:.3f}" for number in (value, low, high)]
    return shown[0] if np.isnan(low) or low == high else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _table(cells: Sequence[Sequence[Any]], num_left: int = 1) -> str:
    """A Markdown table; the first columns to the left, numbers to the right."""
    marks = ["---" if i < num_left else "--:" for i in range(len(cells[0]))]
    escaped = [[str(cell).replace("|", "\\|") for cell in line] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [escaped[0], marks, *escaped[1:]])


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
