"""The policy that comes with the package."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.choice import SHIPPED, choose_policy
from flashmoe_jax.policy.recall import NUM_SETS, recalled
from flashmoe_jax.policy.saved import load_saved
from flashmoe_jax.policy.shared import init_shared, shared_inputs, update_shared

MODELS = [PolicyShape(2, 8, 2), PolicyShape(3, 64, 8, 2048), PolicyShape(2, 128, 8), PolicyShape(1, 512, 10)]


def test_auto_takes_it_for_a_model_without_its_own(tmp_path: Path):
    chosen = choose_policy("auto", MODELS[0], tmp_path / "policy")
    assert str(chosen) == "shared (shipped with this package)" and chosen.is_learned


@pytest.mark.parametrize("model", MODELS)
def test_it_fits_every_model(model: PolicyShape):
    policy = choose_policy("shared", model).of_slots(model.top_k)
    update, score = jax.jit(policy.update), jax.jit(policy.score)
    state = policy.init(model)
    for step in range(3):
        for layer in range(model.num_layers):
            ids = (np.arange(model.top_k, dtype=np.int32)[None] + step) % model.num_experts
            state = update(policy.layer_params(layer), state, np.int32(layer), ids, None, None)
    keep = np.asarray(score(policy.layer_params(0), state, np.int32(0)))
    assert keep.shape == (model.num_experts,) and np.array_equal(keep, np.round(keep))
    assert keep[0] > keep[-1]  # used, and never used


def test_it_says_what_it_was_trained_on():
    meta = load_saved(SHIPPED / "shared").meta
    assert {t["name"] for t in meta["traces"]} == {
        f"{name}.npz" for name in ("stories", "problems", "python", "italian", "trivia")
    }
    assert "/" not in json.dumps(meta["traces"]).replace("://", "")


def test_what_followed_a_like_set_is_recalled():
    model = PolicyShape(1, 8, 2)
    state = init_shared(model)
    update = jax.jit(update_shared)
    # 0 and 1 are followed by 2 and 3; 4 and 5 by 6 and 7.
    for pair in ((0, 1), (2, 3), (4, 5), (6, 7), (0, 1)):
        state = update((), state, np.int32(0), np.array([pair], np.int32), None, None)
    found = np.asarray(recalled(state.sets[0].astype(np.float32)))
    assert found[0].tolist() == [0, 0, 4, 4, 0, 0, 0, 0]
    # Two to four steps after the first: once each, but the last of them is this step itself.
    assert found[2].tolist() == [4, 4, 0, 0, 4, 4, 4, 4]


def test_the_densest_routing_stays_whole():
    """Every expert of a large layer in every step: the sums are exact, and do not overflow."""
    num_experts = 512
    sets = np.ones((NUM_SETS, num_experts), np.float32)
    found = np.asarray(recalled(sets))
    assert found.max() < 2**24 and np.array_equal(found, np.round(found))
    counts = np.full((9, num_experts), 2**16, np.int32) << np.arange(1, 10, dtype=np.int32)[:, None]
    inputs = np.asarray(shared_inputs(jax.numpy.asarray(counts), jax.numpy.asarray(sets, np.int8)))
    assert np.all(inputs == 32)  # each at the mean
