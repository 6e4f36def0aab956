"""A recorded run of the engine and the replay of its trace agree, count by count, victim by victim, slot by slot.

A step that holds a policy compiles for seconds, once per number of slots and batch size. So that it need not be once
per policy too, the engine gets one policy that calls the score function its parameters name.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax import Array, lax
from random_policies import random_policy
from tiny_models import tiny_hf_config, write_hf_checkpoint

import flashmoe_jax
from checkpoints.convert import convert
from flashmoe_jax.engine import engine as engine_module
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.policy import POLICIES, ChosenPolicy, Policy, PolicyShape, make_policy
from flashmoe_jax.policy.base import HIDDEN, ROUTER_LOGITS
from flashmoe_jax.policy.learned import LEARNED
from flashmoe_jax.policy.saved import SavedPolicy
from flashmoe_jax.telemetry.counters import StageCounters
from flashmoe_jax.telemetry.trace import load_trace
from train_policy.replay import Replayer, Result, summary
from train_policy.replay_slots import Counts
from train_policy.replay_steps import Mode, joined

# Prompts ask for more experts than the staging ring has rows; three sequences ask for more than the fewest slots.
EXPERTS, TOP_K, LAYERS, BATCH = 16, 2, 2, 3
SLOTS = (TOP_K, 5, 11)
POPULARITY = np.random.default_rng(5).integers(0, 50, (LAYERS, EXPERTS)).astype(np.float32)
_OF_NAME = {name: make_policy(name, PolicyShape(LAYERS, EXPERTS, TOP_K), POPULARITY) for name in POLICIES}


GUARD_WINDOW = 1


def _score_wrongly(params: tuple[()], state: Any, layer: Array) -> Array:
    """What `decayed` would let go first stays."""
    return -_OF_NAME["decayed"].score(params, state, layer)


WRONG = dataclasses.replace(_OF_NAME["decayed"], name="wrong", score=_score_wrongly, is_learned=True)


def chosen(policy: Policy) -> ChosenPolicy:
    return ChosenPolicy(policy.name, "", lambda _: policy, policy.is_learned)


def _score_of_any(params: tuple[Array, Array], state: Any, layer: Array) -> Array:
    kind, popularity = params
    scores = [
        lambda policy=policy: policy.score(popularity if policy.name == "static" else (), state, layer)
        for policy in _OF_NAME.values()
    ]
    return lax.switch(kind, scores)


def any_policy(name: str) -> Policy:
    """The policy called `name`, of which all share one compiled step; they differ in the score alone."""
    chosen = _OF_NAME[name]
    assert all(p.init is chosen.init and p.update is chosen.update for p in _OF_NAME.values())
    return Policy(
        "any",
        chosen.init,
        chosen.update,
        _score_of_any,
        tuple((np.int32(POLICIES.index(name)), counts) for counts in POPULARITY),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    hf_config = tiny_hf_config("olmoe", num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS)
    return convert(write_hf_checkpoint(folder / "hf", hf_config), folder / "model")


def use(engine: Engine, batch: int, seed: int) -> None:
    """Several conversations one after the other, with tokens at random; sequences of a batch end at different times."""
    random = np.random.default_rng(seed)
    for turns in (1, 2):
        session = engine.session(batch, context=64)
        for _ in range(turns):
            session.prefill([random.integers(3, 67, random.integers(1, 15)).tolist() for _ in range(batch)])
            ends = random.integers(4, 11, batch)
            for step in range(max(ends)):
                session.decode(random.integers(3, 67, batch), step < ends)


def assert_equal(counts: Counts, counters: StageCounters) -> None:
    assert counts.hits.sum() == counters.hits
    assert counts.misses.sum() == counters.misses
    assert counts.evictions.sum() == counters.evictions
    assert counts.refetches.sum() == counters.refetches


def assert_replay_equals_the_run(
    policy: str | Policy | SavedPolicy,
    slots: int,
    batch: int,
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: tuple[str, ...] = (),
) -> None:
    """Runs the engine with the policy that `_policy` gives, records, replays `policy`."""
    with flashmoe_jax.load(
        model,
        device_budget=f"{slots}slots",
        record_columns=columns,
        max_context=64,
        batch_size=BATCH,
        record_trace=True,
        prefetch="off",  # a replay has no look-ahead reads
    ) as engine:
        victims: list[list[int]] = [[] for _ in range(LAYERS)]
        watch = engine.memory.refetch.evicted

        def evicted(layer: int, experts: np.ndarray, token: int, stage: StageCounters) -> None:
            victims[layer] += [int(e) for e in experts]
            watch(layer, experts, token, stage)

        monkeypatch.setattr(engine.memory.refetch, "evicted", evicted)
        use(engine, batch, seed=slots)
        engine.save_trace(folder / "trace.npz")
        decode, prefill = engine.memory.decode_counters, engine.memory.prefill_counters
        residents = np.asarray(engine.memory.state.residency.expert_of_slot)
        num_staging = engine.plan.num_staging
        guard = engine.memory.guard_watch
    trace = joined([load_trace(folder / "trace.npz")])
    replayer = Replayer(
        trace, mode=Mode.ENGINE, num_staging=num_staging, counts=POPULARITY, guard=True, guard_window=GUARD_WINDOW
    )
    run = replayer.replay(policy, [slots], log_victims=True)[0].run
    assert run.victims is not None
    assert_equal(run.decode, decode)
    assert_equal(run.prefill, prefill)
    assert replayer.steps.num_rows.tolist() == [decode.tokens, prefill.tokens]
    assert [v[:, 1].tolist() for v in run.victims] == victims
    assert np.array_equal(run.expert_of_slot, residents)
    if guard is None:
        assert run.guard is None
        return
    assert run.guard is not None
    counted = (guard.num_layer_steps, guard.num_fallback_steps, guard.num_falls, guard.num_returns)
    assert tuple(int(of_layers.sum()) for of_layers in run.guard[:4]) == counted
    # With as many slots as a token needs there is no choice to be wrong in.
    assert guard.num_falls > 0 or slots == TOP_K or policy is not WRONG
    result = Result("wrong", slots, run)
    assert summary(result, result, replayer.steps)["fallback_share"] == guard.fallback_share


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_equals_the_recorded_run(
    policy: str, slots: int, batch: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_module, "_policy", lambda *_: chosen(any_policy(policy)))
    assert_replay_equals_the_run(policy, slots, batch, model, tmp_path, monkeypatch)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("slots", SLOTS)
def test_replay_equals_the_recorded_run_under_guard(
    slots: int, batch: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A policy so bad that the guard has to step in."""
    monkeypatch.setattr(engine_module, "_policy", lambda *_: chosen(WRONG))
    monkeypatch.setattr(engine_module, "WINDOW_STEPS", GUARD_WINDOW)
    assert_replay_equals_the_run(WRONG, slots, batch, model, tmp_path, monkeypatch)


def networks(hidden_size: int) -> dict[str, SavedPolicy]:
    """Random ones of every kind; `context` sees router logits and hidden states, too."""
    size, inputs = PolicyShape(LAYERS, EXPERTS, TOP_K, hidden_size), frozenset({ROUTER_LOGITS, HIDDEN})
    return {
        "context": random_policy("context", size, inputs=inputs, heads=3),
        "paper": random_policy("paper", size, shape="expert"),
        "shared": random_policy("shared", size),
    }


class AnyNetwork:
    """Policies with networks that share one compiled step: they keep each other's state and differ in the score."""

    def __init__(self, saved: dict[str, SavedPolicy], slots: int):
        model = saved["context"].model
        self.policies = [of_kind.policy(model, slots) for of_kind in saved.values()]
        self.kinds = list(saved)

    def policy(self, kind: str) -> Policy:
        params = [
            (np.int32(self.kinds.index(kind)), *of_kinds)
            for of_kinds in zip(*(p.params for p in self.policies), strict=True)
        ]
        inputs = self.policies[0].inputs
        return Policy("any", self.init, self.update, self.score, tuple(params), is_learned=True, inputs=inputs)

    def init(self, shape: PolicyShape) -> Any:
        return tuple(p.init(shape) for p in self.policies)

    def update(self, params: Any, state: Any, *step: Any) -> Any:
        return tuple(p.update(of_p, s, *step) for p, of_p, s in zip(self.policies, params[1:], state, strict=True))

    def score(self, params: Any, state: Any, layer: Array) -> Array:
        scores = [
            lambda p=p, of_p=of_p, s=s: p.score(of_p, s, layer)
            for p, of_p, s in zip(self.policies, params[1:], state, strict=True)
        ]
        return lax.switch(params[0], scores)


@pytest.fixture(scope="module")
def any_network(model: Path) -> Callable[[int], AnyNetwork]:
    saved = networks(ModelDirectory.open(model).config.hidden_size)
    return functools.lru_cache(lambda slots: AnyNetwork(saved, slots))


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("kind", LEARNED)
def test_replay_equals_the_recorded_run_of_a_network(
    kind: str, slots: int, batch: int, model: Path, any_network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = any_network(slots).policy(kind)
    monkeypatch.setattr(engine_module, "_policy", lambda *_: chosen(policy))
    monkeypatch.setattr(engine_module, "WINDOW_STEPS", GUARD_WINDOW)
    saved = networks(ModelDirectory.open(model).config.hidden_size)[kind]
    columns = ("router_logits", "hidden")
    assert_replay_equals_the_run(saved, slots, batch, model, tmp_path, monkeypatch, columns)
