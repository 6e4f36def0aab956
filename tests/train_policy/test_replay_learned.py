"""Replay of learned policies: keep values equal those of the decode step, one step at a time, bit for bit."""

import jax
import numpy as np
import pytest
from random_policies import KINDS, random_policy

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import HIDDEN, ROUTER_LOGITS, PolicyShape
from flashmoe_jax.telemetry.trace import Trace
from train_policy import replay_learned
from train_policy.replay_learned import learned_keep
from train_policy.replay_steps import Mode, make_steps

LAYERS, EXPERTS, TOP_K, HIDDEN_SIZE = 5, 12, 3, 7
MODEL = PolicyShape(LAYERS, EXPERTS, TOP_K, HIDDEN_SIZE)


def random_trace(rows: int, seed: int = 0) -> Trace:
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((rows, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int32)
    ids[rows // 2, 1] = -1  # a layer may be missing
    return Trace(
        ids=ids,
        seq_id=np.repeat(np.arange(rows // 10 + 1), 10)[:rows].astype(np.int32),
        phase=np.ones(rows, np.uint8),
        step=np.arange(rows, dtype=np.int32),
        token=np.zeros(rows, np.int32),
        meta={"experts": EXPERTS},
        router_logits=random.normal(0, 3, (rows, LAYERS, EXPERTS)).astype(np.float16),
        hidden=random.normal(0, 1, (rows, LAYERS, HIDDEN_SIZE)).astype(np.float16),
    )


def as_engine(trace: Trace, prompt: int) -> Trace:
    """Two sequences side by side, each a prompt and then decode steps."""
    half = len(trace.ids) // 2
    phase, step, seq = [], [], []
    for _ in range(2):
        phase += [0] * prompt
    phase += [1] * (2 * (half - prompt))
    seq = [0] * prompt + [1] * prompt + [0, 1] * (half - prompt)
    step = [0] * (2 * prompt) + list(np.repeat(np.arange(1, half - prompt + 1), 2))
    rows = trace.take(slice(0, 2 * half))
    return rows._replace(phase=np.array(phase, np.uint8), step=np.array(step, np.int32), seq_id=np.array(seq, np.int32))


def expected_keep(policy, trace: Trace, shown: list[list[list[int]]], fresh: set[int]) -> np.ndarray:
    """Step after step, layer after layer, as the engine does: a step is a list of updates, an update one of rows."""
    update, score = jax.jit(policy.update), jax.jit(policy.score)
    blank = policy.init(MODEL)
    state, keep = blank, []
    for number, updates in enumerate(shown):
        if number in fresh:
            state = blank
        scores = []
        for layer in range(LAYERS):
            for rows in updates:
                batch = (trace.ids[rows, layer], trace.router_logits[rows, layer], trace.hidden[rows, layer])
                state = update(policy.layer_params(layer), state, np.int32(layer), *batch)
            scores.append(np.asarray(score(policy.layer_params(layer), state, np.int32(layer))))
        keep.append(scores)
    return np.array(keep)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay_learned, "_chunk_size", lambda *_: 16)


INPUTS = [frozenset(), frozenset({ROUTER_LOGITS}), frozenset({ROUTER_LOGITS, HIDDEN})]
CASES = [(kind, INPUTS[0]) for kind in KINDS] + [(KINDS[0], inputs) for inputs in INPUTS[1:]]


@pytest.mark.parametrize(("kind", "inputs"), CASES)
@pytest.mark.parametrize("reset", [False, True])
def test_every_token_a_step(kind: tuple[str, str], inputs: frozenset[str], reset: bool):
    name, shape = kind
    trace = random_trace(45)
    policy = random_policy(name, MODEL, shape=shape, inputs=inputs).policy(MODEL, 4)
    keep = np.concatenate(list(learned_keep([policy], make_steps(trace, reset=reset), TOP_K)))[:, 0]
    fresh = set(range(0, 45, 10)) if reset else set()
    expected = expected_keep(policy, trace, [[[i]] for i in range(45)], fresh)
    assert keep.dtype == np.float32
    assert np.array_equal(keep, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_batches(kind: tuple[str, str]):
    name, shape = kind
    trace = as_engine(random_trace(60, seed=1)._replace(ids=random_trace(64, seed=1).ids[:60]), prompt=6)
    trace = trace._replace(ids=np.maximum(trace.ids, 0))
    inputs = INPUTS[2] if name == "context" else INPUTS[0]
    policy = random_policy(name, MODEL, shape=shape, inputs=inputs, shares_second=True).policy(MODEL, 4)
    keep = np.concatenate(list(learned_keep([policy], make_steps(trace, Mode.ENGINE), TOP_K)))[:, 0]
    shown = [[[t, 6 + t] for t in range(6)]] + [[[i, i + 1]] for i in range(12, 60, 2)]
    assert np.array_equal(keep, expected_keep(policy, trace, shown, set()))


@pytest.mark.parametrize("missing", [ROUTER_LOGITS, HIDDEN])
def test_a_trace_without_the_inputs_is_refused(missing: str):
    trace = random_trace(20)._replace(**{missing: None})
    policy = random_policy("context", MODEL, inputs=INPUTS[2]).policy(MODEL, 4)
    flag = "--" + missing.replace("_", "-")
    with pytest.raises(ConfigError, match=f"the trace has none; record one with {flag}"):
        list(learned_keep([policy], make_steps(trace), TOP_K))
