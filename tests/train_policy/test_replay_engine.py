"""A recorded run of the engine and the replay of its trace agree, count by count, victim by victim, slot by slot.

A step that holds a policy compiles for seconds, once per number of slots and batch size. So that it need not be once
per policy too, the engine gets one policy that calls the score function its parameters name.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax import Array, lax
from tiny_models import tiny_hf_config, write_hf_checkpoint

import flashmoe_jax
from checkpoints.convert import convert
from flashmoe_jax.engine import engine as engine_module
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.policy import POLICIES, Policy, PolicyShape, make_policy
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
    policy: str | Policy, slots: int, batch: int, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the engine with the policy that `_policy` gives, records, replays `policy`."""
    with flashmoe_jax.load(
        model,
        device_budget=f"{slots}slots",
        max_context=64,
        batch_size=BATCH,
        record_trace=True,
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
    assert guard.num_falls > 0 or slots == TOP_K
    result = Result("wrong", slots, run)
    assert summary(result, result, replayer.steps)["fallback_share"] == guard.fallback_share


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_equals_the_recorded_run(
    policy: str, slots: int, batch: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_module, "_policy", lambda *_: any_policy(policy))
    assert_replay_equals_the_run(policy, slots, batch, model, tmp_path, monkeypatch)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("slots", SLOTS)
def test_replay_equals_the_recorded_run_under_guard(
    slots: int, batch: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A policy so bad that the guard has to step in."""
    monkeypatch.setattr(engine_module, "_policy", lambda *_: WRONG)
    monkeypatch.setattr(engine_module, "WINDOW_STEPS", GUARD_WINDOW)
    assert_replay_equals_the_run(WRONG, slots, batch, model, tmp_path, monkeypatch)
