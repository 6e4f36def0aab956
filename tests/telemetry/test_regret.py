"""MIN of the gauge against plain Python, against trying everything, and against replay; and what its window holds."""

import functools
import threading
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.telemetry import regret as regret_module
from flashmoe_jax.telemetry.regret import RegretGauge, min_misses
from flashmoe_jax.telemetry.trace import DECODE, Trace

EXPERTS = 6


def plain_min(start: list[int], steps: list[set[int]]) -> int:
    """Belady's choice, step by step: who is asked for last, or never, leaves; of equals the higher id."""
    held, num_slots, misses = {e for e in start if e >= 0}, len(start), 0
    for t, asked in enumerate(steps):
        missed = asked - held
        misses += len(missed)

        def next_use(expert: int, t: int = t) -> tuple[int, int]:
            later = (i for i, step in enumerate(steps[t + 1 :]) if expert in step)
            return next(later, 10**6), expert

        if len(asked) > num_slots:
            stay = asked & held
            held = stay | set(sorted(missed, key=next_use)[: num_slots - len(stay)])
        elif missed:
            held = asked | set(sorted(held - asked, key=next_use)[: num_slots - len(asked)])
    return misses


def fewest_misses(start: list[int], steps: list[set[int]]) -> int:
    """By trying all decisions; every step's experts fit."""

    @functools.cache
    def best(t: int, held: frozenset[int]) -> int:
        if t == len(steps):
            return 0
        asked = frozenset(steps[t])
        others = held - asked
        room = len(start) - len(asked)
        choices = [others] if len(others) <= room or asked <= held else map(frozenset, combinations(others, room))
        return len(asked - held) + min(best(t + 1, asked | stay) for stay in choices)

    return best(0, frozenset(e for e in start if e >= 0))


def random_case(seed: int, num_slots: int, num_steps: int, most: int, num_layers: int = 1):
    """Residents `[L, R]` and experts asked for `[T, L, E]`."""
    random = np.random.default_rng(seed)
    start = np.full((num_layers, num_slots), -1)
    for row in start:
        held = random.permutation(EXPERTS)[: random.integers(0, num_slots + 1)]
        row[: len(held)] = held
    asked = np.zeros((num_steps, num_layers, EXPERTS), bool)
    for t in range(num_steps):
        for layer in range(num_layers):
            asked[t, layer, random.permutation(EXPERTS)[: random.integers(0, most + 1)]] = True
    return start, asked


def as_sets(asked_TE: np.ndarray) -> list[set[int]]:
    return [set(np.flatnonzero(row).tolist()) for row in asked_TE]


@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.integers(1, EXPERTS),
    num_steps=st.integers(1, 40),
    most=st.integers(1, EXPERTS),
)
@settings(max_examples=150, deadline=None)
def test_equals_plain_python(seed: int, num_slots: int, num_steps: int, most: int):
    start, asked = random_case(seed, num_slots, num_steps, most, num_layers=3)
    expected = [plain_min(start[layer].tolist(), as_sets(asked[:, layer])) for layer in range(3)]
    assert min_misses(start, asked).tolist() == expected


@given(seed=st.integers(0, 2**32 - 1), num_slots=st.integers(1, 4), num_steps=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_nobody_misses_less(seed: int, num_slots: int, num_steps: int):
    start, asked = random_case(seed, num_slots, num_steps, num_slots)
    assert min_misses(start, asked)[0] == fewest_misses(start[0].tolist(), as_sets(asked[:, 0]))


def test_equals_replay():
    pytest.importorskip("numba")
    from train_policy.replay import Replayer

    random = np.random.default_rng(0)
    ids = np.stack([[random.permutation(16)[:3] for _ in range(2)] for _ in range(200)])
    zeros = np.zeros(200, np.int32)
    trace = Trace(ids, zeros, np.full(200, DECODE, np.uint8), np.arange(200, dtype=np.int32), zeros, {"experts": 16})
    asked = np.zeros((200, 2, 16), bool)
    np.put_along_axis(asked, ids, True, axis=2)
    for num_slots in (3, 7, 16):
        run = Replayer(trace).replay("min", [num_slots])[0].run
        assert min_misses(np.full((2, num_slots), -1), asked).tolist() == run.decode.misses.tolist()


class Run:
    """Steps at random through a gauge of two layers and four slots, and what was recorded of them."""

    def __init__(self, gauge: RegretGauge):
        self.gauge, self.random = gauge, np.random.default_rng(0)
        self.ids: list[np.ndarray] = []
        self.missed: list[np.ndarray] = []
        self.starts: list[np.ndarray | None] = []

    def step(self, batch: int = 1) -> None:
        start = np.stack([self.random.permutation(EXPERTS)[:4] for _ in range(2)])
        taken: list[np.ndarray] = []

        def snapshot() -> np.ndarray:
            taken.append(start)
            return start

        ids = np.stack([[self.random.permutation(EXPERTS)[:2] for _ in range(2)] for _ in range(batch)])
        missed = self.random.integers(0, 3, 2)
        self.gauge.begin_step(snapshot)
        self.gauge.end_step(ids, missed.tolist())
        self.ids.append(ids)
        self.missed.append(missed)
        self.starts.append(taken[0] if taken else None)

    def expected(self, first: int) -> float | None:
        """Of the window from step `first` on; None where MIN misses nothing."""
        start = self.starts[first]
        assert start is not None
        ratios = []
        for layer in range(2):
            steps = [set(ids[:, layer].reshape(-1).tolist()) - {-1} for ids in self.ids[first:]]
            best = plain_min(start[layer].tolist(), steps)
            if best:
                ratios.append(sum(int(m[layer]) for m in self.missed[first:]) / best)
        return float(np.mean(ratios)) if ratios else None


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regret_module, "BLOCK_STEPS", 8)
    gauge = RegretGauge(2, EXPERTS)
    yield gauge
    gauge.close()


def test_the_window_begins_at_a_block(gauge: RegretGauge):
    run = Run(gauge)
    assert gauge.value() is None
    for step in range(1, 40):
        run.step(batch=1 + step % 3)
        first = max(0, (step - 1) // 8 - 1) * 8
        assert 8 <= step - first <= 16 or first == 0
        assert gauge.value() == pytest.approx(run.expected(first)), step
    assert [i for i, start in enumerate(run.starts) if start is not None] == [0, 8, 16, 24, 32]


def test_a_prompt_starts_the_window_anew(gauge: RegretGauge):
    run = Run(gauge)
    for _ in range(13):
        run.step()
    gauge.restart()
    assert gauge.value() is None
    for _ in range(3):
        run.step()
    assert gauge.value() == pytest.approx(run.expected(13))


def test_sequences_that_take_no_part_ask_for_nothing(gauge: RegretGauge):
    gauge.begin_step(lambda: np.full((2, 4), -1))
    gauge.end_step(np.array([[[0, 1], [2, 3]], [[-1, -1], [-1, -1]]]), [2, 2])
    assert gauge.value() == 1.0


def test_whole_blocks_are_computed_in_the_background(gauge: RegretGauge):
    run = Run(gauge)
    for _ in range(8):
        run.step()
    assert gauge._pending is not None
    assert gauge._pending.result(timeout=60) == gauge.latest == pytest.approx(run.expected(0))


def test_a_failure_in_the_background_does_not_reach_decode(gauge: RegretGauge, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    run = Run(gauge)
    monkeypatch.setattr(regret_module, "min_misses", fail)
    for _ in range(30):
        run.step()
    with pytest.raises(RuntimeError, match="broken"):
        gauge.value()


def test_close_joins_the_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regret_module, "BLOCK_STEPS", 8)
    gauge = RegretGauge(2, EXPERTS)
    run = Run(gauge)
    for _ in range(8):
        run.step()
    gauge.close()
    gauge.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("regret")]
