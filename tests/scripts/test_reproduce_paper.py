"""The numbers that the reproduction of the paper makes itself; what it calls has tests of its own."""

import json
from pathlib import Path

import numpy as np
import pytest

from flashmoe_jax.telemetry.trace import Trace
from scripts.reproduce_paper import PROMPTS, SLOTS, build_parser, report, share_touched


def trace(rows_per_prompt: list[int]) -> Trace:
    """Token i of a prompt chooses experts i and i + 1 of 16 in both layers."""
    ids = np.concatenate([np.arange(n)[:, None, None] + np.arange(2) for n in rows_per_prompt]) % 16
    rows = len(ids)
    return Trace(
        ids=np.broadcast_to(ids, (rows, 2, 2)).astype(np.int32),
        seq_id=np.repeat(np.arange(len(rows_per_prompt)), rows_per_prompt).astype(np.int32),
        phase=np.zeros(rows, np.uint8),
        step=np.arange(rows, dtype=np.int32),
        token=np.zeros(rows, np.int32),
        meta={"experts": 16, "model": "m"},
    )


def test_experts_touched_by_prompts_that_are_long_enough():
    assert share_touched(trace([4, 3, 9]), 4) == (pytest.approx(5 / 16), 2)


def test_consecutive_prompts_stand_in_for_long_ones():
    share, count = share_touched(trace([3, 3]), 6)
    assert count == 0
    assert share == pytest.approx(4 / 16)


def test_the_report_says_what_does_not_reproduce():
    rates = {
        "lru": 0.5,
        "lfu": 0.5,
        "arc": 0.5,
        "lecar": 0.5,
        "decayed": 0.5,
        "min": 0.8,
        "paper": 0.61,
        "context": 0.7,
    }
    rows = [
        {"policy": policy, "slots": slots, "hit_rate": rate, "refetch_5": None}
        for policy, rate in rates.items()
        for slots in (*SLOTS.split(","), "mean")
    ]
    args = build_parser().parse_args(["--out", "unused"])
    text = report(args, rows, trace([40, 300]), {"lru": [2.0, 2.0], "decayed": [2.0, 4.0], "/x/paper": [3.0, 3.0]})
    assert "| lru | +22.0, +22.0, +22.0, +22.0 |" in text
    assert "+51 % over lfu: the paper's network gains +22.0% at best." in text
    assert "over lru: the paper's network" not in text
    assert "| paper | 3.00 | 1.500 | 1.125 |" in text


def test_the_bundled_questions_are_512():
    lines = Path(PROMPTS).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 512
    assert all(json.loads(line)["prompt"].startswith("Question: ") for line in lines)
