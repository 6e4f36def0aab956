"""The compiled guard keeps its bound at every prefix of any trace, and decides as plain Python does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import trace_of

from flashmoe_jax.engine.guard import OUTSIDE
from flashmoe_jax.telemetry.trace import DECODE, PREFILL
from train_policy.replay_slots import SlotRun, replay_guarded
from train_policy.replay_steps import Mode, Steps, make_steps

EXPERTS, TOP_K = 9, 2


class PlainGuard:
    """One layer: lists, sorting and the rules as `engine/guard.py` states them."""

    def __init__(self, num_slots: int, window: int):
        self.allowance = 100 * window * TOP_K
        self.ours: list[int | None] = [None] * num_slots
        self.shadow: list[int | None] = [None] * num_slots
        self.debt, self.is_fallback = 0, False
        self.reads = self.shadow_reads = self.falls = self.returns = self.fallback_steps = 0

    def step(self, experts: list[int], learned: np.ndarray, decayed: np.ndarray) -> tuple[int, int]:
        """Reads of one step, and the shadow's."""
        shadow_reads = self.admit(self.shadow, experts, decayed)
        reads = sum(e not in self.ours for e in experts)
        self.debt = max(self.debt + 100 * reads - 101 * shadow_reads, -self.allowance)
        before = self.is_fallback
        self.is_fallback = self.debt > (self.allowance // 2 if before else self.allowance)
        self.falls += self.is_fallback and not before
        self.returns += before and not self.is_fallback
        self.fallback_steps += self.is_fallback and bool(experts)
        worth = learned
        if self.is_fallback:
            worth = np.array([decayed[e] - (0 if e in self.shadow else OUTSIDE) for e in range(EXPERTS)])
        self.admit(self.ours, experts, worth)
        self.reads += reads
        self.shadow_reads += shadow_reads
        return reads, shadow_reads

    @staticmethod
    def admit(slots: list[int | None], experts: list[int], worth: np.ndarray) -> int:
        missed = sorted((e for e in experts if e not in slots), key=lambda e: (-worth[e], e))
        places = [s for s, e in enumerate(slots) if e is None]
        others = [s for s, e in enumerate(slots) if e is not None and e not in experts]
        places += sorted(others, key=lambda s: (worth[slots[s]], s))
        for expert, place in zip(missed, places, strict=False):
            slots[place] = expert
        return len(missed)

    def hostile(self, random: np.random.Generator, count: int) -> list[int]:
        """Whom the shadow holds and we do not; if there is nobody, those whom we do not hold."""
        ours, shadow = {e for e in self.ours if e is not None}, {e for e in self.shadow if e is not None}
        first = shadow - ours or set(range(EXPERTS)) - ours
        order = [*random.permutation(sorted(first)), *random.permutation(sorted(set(range(EXPERTS)) - first))]
        return sorted(int(e) for e in order[:count])


def steps_of(asked: list[list[int]], is_prompt: np.ndarray | None = None, *, reset_every: int | None = None) -> Steps:
    """Steps of one layer that ask for these experts, each a batch step or a prompt of rows of TOP_K."""
    rows, step, phase = [], [], []
    for i, experts in enumerate(asked):
        padded = experts + [-1] * (-len(experts) % TOP_K)
        for first in range(0, max(len(padded), 1), TOP_K):
            rows.append([padded[first : first + TOP_K] or [-1] * TOP_K])
            step.append(i)
            phase.append(PREFILL if is_prompt is not None and is_prompt[i] else DECODE)
    place = np.arange(len(step)) - np.searchsorted(step, step)
    # The rows of a step are of sequences of their own; every so often others, and prompts are not to be joined.
    seq_id = place + (0 if reset_every is None else 100 * (np.array(step) // reset_every))
    seq_id = np.where(np.array(phase) == PREFILL, 10**5 + place + 100 * np.array(step), seq_id)
    trace = trace_of(np.array(rows), EXPERTS, seq_id=seq_id, phase=phase, step=step)
    steps = make_steps(trace, Mode.ENGINE, reset=reset_every is not None)
    assert steps.num_steps == len(asked)
    return steps


def run_guarded(steps: Steps, keeps: tuple[np.ndarray, np.ndarray], num_slots: int, window: int) -> SlotRun:
    pairs = zip(*(np.array_split(keep[:, None].astype(np.float32), 3) for keep in keeps), strict=True)
    return replay_guarded(
        steps, list(pairs), [num_slots], num_staging=2, allowed_reads=window * TOP_K, log_victims=True
    )[0]


def assert_bounded(run: SlotRun, num_slots: int, window: int) -> None:
    assert run.ledgers is not None
    reads, shadow_reads = np.cumsum(run.ledgers[0], axis=0).T
    assert (100 * reads <= 101 * shadow_reads + 100 * (num_slots + window * TOP_K)).all()


@pytest.mark.parametrize("num_slots", [1, 2, 4, 7, 9])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 300),
    window=st.sampled_from([1, 3, 64]),
    largest=st.sampled_from([TOP_K, EXPERTS]),
    num_values=st.sampled_from([2, 1000]),
    prompt_share=st.sampled_from([0.0, 0.05]),
    reset_every=st.sampled_from([None, 40]),
)
@settings(max_examples=40, deadline=None)
def test_the_bound_holds_on_random_traces(
    num_slots: int,
    seed: int,
    num_steps: int,
    window: int,
    largest: int,
    num_values: int,
    prompt_share: float,
    reset_every: int | None,
):
    random = np.random.default_rng(seed)
    likely = random.dirichlet(np.full(EXPERTS, 0.5)) * 0.9 + 0.1 / EXPERTS
    asked = [
        sorted(random.choice(EXPERTS, random.integers(0, largest + 1), replace=False, p=likely).tolist())
        for _ in range(num_steps)
    ]
    decayed = random.integers(0, num_values, (num_steps, EXPERTS)) * (20 / num_values)
    # The policy keeps what is asked for least, mostly.
    learned = -likely + random.random((num_steps, EXPERTS)) * random.choice([0.0, 0.2])
    steps = steps_of(asked, random.random(num_steps) < prompt_share, reset_every=reset_every)
    run = run_guarded(steps, (learned, decayed), num_slots, window)
    assert_bounded(run, num_slots, window)
    assert run.ledgers is not None and run.guard is not None
    assert run.decode.misses[0] == run.ledgers[0][:, 0].sum()
    assert run.guard.shadow_reads[0] == run.ledgers[0][:, 1].sum()


@pytest.mark.parametrize("num_slots", [1, 2, 4, 7])
@given(
    seed=st.integers(0, 2**32 - 1),
    window=st.sampled_from([1, 5]),
    largest=st.sampled_from([TOP_K, 6]),
    hostility=st.sampled_from([0.5, 0.95, 1.0]),
    good_until=st.sampled_from([0, 100]),
)
@settings(max_examples=10, deadline=None)
def test_the_bound_holds_against_an_adversary(
    num_slots: int, seed: int, window: int, largest: int, hostility: float, good_until: int
):
    """Who asks for what only the shadow holds, of a policy that lets just that go; first it may earn credit."""
    random = np.random.default_rng(seed)
    plain = PlainGuard(num_slots, window)
    asked, learned, decayed, ledger = [], [], [], []
    for step in range(500):
        count = int(random.integers(1, largest + 1))
        is_hostile = step >= good_until and random.random() < hostility
        experts = plain.hostile(random, count) if is_hostile else sorted(random.permutation(EXPERTS)[:count].tolist())
        asked.append(experts)
        decayed.append(random.integers(0, 20, EXPERTS).astype(np.float32))
        learned.append(np.array([random.integers(3) - 5.0 * (e in plain.shadow) for e in range(EXPERTS)], np.float32))
        ledger.append(plain.step(experts, learned[-1], decayed[-1]))
    run = run_guarded(steps_of(asked), (np.array(learned), np.array(decayed)), num_slots, window)
    assert_bounded(run, num_slots, window)
    assert run.ledgers is not None and run.guard is not None and run.expert_of_slot is not None
    assert run.ledgers[0].tolist() == [list(pair) for pair in ledger]
    assert [int(of_layer[0]) for of_layer in run.guard] == [
        500,
        plain.fallback_steps,
        plain.falls,
        plain.returns,
        plain.shadow_reads,
    ]
    assert run.expert_of_slot[0].tolist() == plain.ours
    # With one expert in the only slot, or as many as fit asked for together, there is nothing to choose.
    assert plain.falls > 0 or num_slots <= TOP_K


def test_a_policy_as_good_as_decayed_never_falls():
    random = np.random.default_rng(3)
    asked = [sorted(random.permutation(EXPERTS)[:TOP_K].tolist()) for _ in range(300)]
    keep = random.random((300, EXPERTS))
    run = run_guarded(steps_of(asked), (keep, keep), 4, 1)
    assert run.guard is not None
    assert run.guard.falls[0] == run.guard.fallback_steps[0] == 0
    assert run.decode.misses[0] == run.guard.shadow_reads[0]
