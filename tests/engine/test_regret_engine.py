"""`regret` and the guard's counters of a running engine, through prompts, rewinds, two sessions and failures."""

from collections.abc import Iterable

import numpy as np
import pytest
from tiny_engines import BATCH, HALF, TinyModel, make_engine, random_prompts

from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.engine.session import Session
from flashmoe_jax.telemetry import regret as regret_module
from flashmoe_jax.telemetry.regret import min_misses

BLOCK = 6


class Watch:
    """Decode steps since the last prompt, as seen from outside the engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.forget()

    def forget(self) -> None:
        self.starts: list[np.ndarray] = []
        self.asked: list[np.ndarray] = []
        self.missed: list[np.ndarray] = []

    def step(self, session: Session, tokens, active=None) -> None:
        before = np.array(self.engine.memory.state.residency.expert_of_slot)
        session.decode(np.asarray(tokens), active)
        config = self.engine.config
        trace = self.engine.trace()
        rows = trace.ids[trace.step == trace.step.max()]
        asked = np.zeros((config.num_moe_layers, config.num_experts), bool)
        for layer in range(config.num_moe_layers):
            asked[layer, rows[:, layer].reshape(-1)] = True
        held = np.zeros_like(asked)
        layer, slot = np.nonzero(before >= 0)
        held[layer, before[layer, slot]] = True
        self.starts.append(before)
        self.asked.append(asked)
        self.missed.append(np.count_nonzero(asked & ~held, axis=1))

    def check(self) -> None:
        if not self.asked:
            assert self.engine.stats()["regret"] is None
            return
        first = max(0, (len(self.asked) - 1) // BLOCK - 1) * BLOCK
        best = min_misses(self.starts[first], np.stack(self.asked[first:]))
        missed = np.sum(self.missed[first:], axis=0)
        expected = np.mean(missed[best > 0] / best[best > 0]) if (best > 0).any() else None
        assert self.engine.stats()["regret"] == pytest.approx(expected)


def decode_all(session: Session, tokens: Iterable[int]) -> None:
    for token in tokens:
        session.decode(np.array([token]))


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret_module, "BLOCK_STEPS", BLOCK)


def test_regret_is_that_of_the_recorded_steps(mixed: TinyModel):
    with make_engine(mixed, slots=HALF, record_trace=True) as engine:
        random, watch = np.random.RandomState(0), Watch(engine)
        watch.check()
        first, second = engine.session(BATCH), engine.session(1)
        first.prefill(random_prompts(mixed.config, 0, [5, 2, 1, 7]))
        for step in range(2 * BLOCK + 3):
            watch.step(first, random.randint(3, 60, BATCH), np.arange(BATCH) <= step % BATCH)
            watch.check()
        # Another session's prompt changes the slots as one's own does.
        second.prefill(random_prompts(mixed.config, 1, [9]))
        watch.forget()
        watch.check()
        for _ in range(BLOCK + 1):
            watch.step(second, random.randint(3, 60, 1))
            watch.step(first, random.randint(3, 60, BATCH))
        watch.check()
        # Going back changes a session, not the slots.
        second.rewind(0, 4)
        watch.step(second, random.randint(3, 60, 1))
        first.decode(random.randint(3, 60, BATCH), np.zeros(BATCH, bool))
        watch.check()


def test_a_step_that_fails_starts_the_window_anew(mixed: TinyModel, monkeypatch: pytest.MonkeyPatch):
    with make_engine(mixed, slots=HALF, record_trace=True) as engine:
        session, watch = engine.session(1), Watch(engine)
        session.prefill([[3, 4, 5]])
        for token in range(5, 9):
            watch.step(session, [token])
        watch.check()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.memory.fetcher, "wait_for_some", interrupt)
            with pytest.raises(KeyboardInterrupt):
                decode_all(session, range(9, 60))
        assert engine.stats()["regret"] is None
        watch.forget()
        session.prefill([[7]])
        for token in range(5, 9):
            watch.step(session, [token])
        watch.check()
