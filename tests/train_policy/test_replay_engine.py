"""A recorded run of the engine and the replay of its trace agree, count by count and slot by slot."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_hf_config, write_hf_checkpoint

import flashmoe_jax
from checkpoints.convert import convert
from flashmoe_jax import SamplingParams
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.policy import POLICIES
from flashmoe_jax.telemetry.counters import StageCounters
from flashmoe_jax.telemetry.trace import load_trace, popularity
from train_policy.replay import Replayer
from train_policy.replay_slots import Counts
from train_policy.replay_steps import Mode, joined

# Prompts ask for more experts than the staging ring has rows; three sequences ask for more than the fewest slots.
EXPERTS, TOP_K, LAYERS, BATCH = 16, 2, 2, 3
SLOTS = (TOP_K, 5, 11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    hf_config = tiny_hf_config("olmoe", num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS)
    return convert(write_hf_checkpoint(folder / "hf", hf_config), folder / "model")


@pytest.fixture(scope="module")
def popular(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace for `static`."""
    path = tmp_path_factory.mktemp("popular") / "trace.npz"
    with flashmoe_jax.load(model, device_budget="5slots", policy="lru", max_context=64, record_trace=True) as engine:
        use(engine, batch=1, seed=9)
        engine.save_trace(path)
    return path


def use(engine: Engine, batch: int, seed: int) -> None:
    """Several prompts one after the other; sequences of a batch end at different times."""
    random = np.random.default_rng(seed)
    for turn in range(4):
        prompts = [random.integers(3, 67, random.integers(1, 15)).tolist() for _ in range(batch)]
        sampling = SamplingParams(temperature=1.5, seed=seed + turn)
        stop_ids = random.permutation(67)[:4].tolist() if batch > 1 else []
        for _ in engine.generate(prompts, max_new_tokens=20, sampling=sampling, stop_token_ids=stop_ids):
            pass


def assert_equal(counts: Counts, counters: StageCounters) -> None:
    assert counts.hits.sum() == counters.hits
    assert counts.misses.sum() == counters.misses
    assert counts.evictions.sum() == counters.evictions
    assert counts.refetches.sum() == counters.refetches


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_equals_the_recorded_run(
    policy: str, slots: int, batch: int, model: Path, popular: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy_trace = popular if policy == "static" else None
    with flashmoe_jax.load(
        model,
        device_budget=f"{slots}slots",
        policy=policy,
        policy_trace=policy_trace,
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
        engine.save_trace(tmp_path / "trace.npz")
        decode, prefill = engine.memory.decode_counters, engine.memory.prefill_counters
        residents = np.asarray(engine.memory.state.residency.expert_of_slot)
        num_staging = engine.plan.num_staging
    trace = joined([load_trace(tmp_path / "trace.npz")])
    counts = popularity(load_trace(popular), LAYERS, EXPERTS) if policy == "static" else None
    replayer = Replayer(trace, mode=Mode.ENGINE, num_staging=num_staging, counts=counts)
    run = replayer.replay(policy, [slots], log_victims=True)[0].run
    assert run.victims is not None
    assert_equal(run.decode, decode)
    assert_equal(run.prefill, prefill)
    assert replayer.steps.num_rows.tolist() == [decode.tokens, prefill.tokens]
    assert [v[:, 1].tolist() for v in run.victims] == victims
    assert np.array_equal(run.expert_of_slot, residents)
