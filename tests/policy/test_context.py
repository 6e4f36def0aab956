"""The context network in whole numbers against its floats, and its bounds."""

import jax
import numpy as np
import pytest
from random_policies import random_policy

from flashmoe_jax.policy.base import HIDDEN, ROUTER_LOGITS, Policy, PolicyShape
from flashmoe_jax.policy.context import TrainedContext, context_keep, round_context, seen_columns
from flashmoe_jax.policy.history import OWN_FEATURES, History, own_inputs, sets_around
from flashmoe_jax.policy.network import EXACT

MODEL = PolicyShape(4, 16, 3, 10)
INPUTS = frozenset({ROUTER_LOGITS, HIDDEN})


def states(policy: Policy, steps: int, batch: int = 1) -> list[History]:
    """The state after each of some random steps."""
    random = np.random.default_rng(0)
    update = jax.jit(policy.update)
    state, seen = policy.init(MODEL), []
    for _ in range(steps):
        for layer in range(MODEL.num_layers):
            ids = np.argsort(random.random((batch, MODEL.num_experts)))[:, : MODEL.top_k].astype(np.int32)
            logits = random.normal(0, 3, (batch, MODEL.num_experts)).astype(np.float32)
            hidden = random.normal(0, 1, (batch, MODEL.hidden_size)).astype(np.float32)
            state = update(policy.layer_params(layer), state, np.int32(layer), ids, logits, hidden)
        seen.append(state)
    return seen


def in_floats(trained: TrainedContext, layer: int, own: np.ndarray, sets: np.ndarray) -> np.ndarray:
    seen = own[seen_columns(MODEL, INPUTS)]
    h1 = np.clip(trained.first_kernel[layer] @ seen + sets + trained.first_bias[layer], 0, trained.first_peak[layer])
    h2 = trained.second_kernel[layer] @ h1 + trained.second_bias[layer]
    h2 = np.clip(h2, 0, trained.second_peak[layer])
    counts = own[: OWN_FEATURES * MODEL.num_experts].reshape(OWN_FEATURES, -1)
    h3 = np.clip(trained.own_kernel[layer] @ counts + trained.own_bias[layer][:, None], 0, trained.own_peak[layer])
    alike = trained.own[layer, 0] @ counts + trained.own_last[layer, 0] @ h3
    return trained.last_kernel[layer, 0] @ h2 + trained.last_bias[layer, 0] + alike


def test_rounding_keeps_the_order_of_what_differs():
    saved = random_policy("context", MODEL, inputs=INPUTS, hidden=32)
    trained = TrainedContext(**saved.arrays)
    policy = saved.policy(MODEL, 4)
    correlations = []
    for state in states(policy, 12)[4:]:
        for layer, params in enumerate(policy.params):
            own = own_inputs(History(*(np.asarray(a[layer]) for a in state)))
            got = np.asarray(context_keep(params, own, sets_around(state, np.int32(layer))))
            sets = sum(
                (trained.upward if m <= layer else trained.downward)[m, np.asarray(state.used[m]) > 0].sum(axis=0)
                for m in range(MODEL.num_layers)
            )
            correlations.append(np.corrcoef(got, in_floats(trained, layer, np.asarray(own) / 255, sets))[0, 1])
            assert np.array_equal(got, np.round(got))
    assert min(correlations) > 0.98


def test_no_sum_reaches_what_float32_cannot_hold():
    saved = random_policy("context", MODEL, inputs=INPUTS, hidden=32)
    worst = {name: np.abs(a) * 50 for name, a in saved.arrays.items()}
    networks = round_context(TrainedContext(**worst), np.ones(1), MODEL, INPUTS)
    sets = sum(np.maximum(n.vectors.upward_limit, n.vectors.downward_limit) for n in networks)
    largest = np.full(networks[0].first.kernel.shape[1], 255.0)
    largest[-MODEL.hidden_size :] = 127
    for network in networks:
        first = network.first.kernel @ largest + network.first.bias + sets
        assert first.max() < EXACT
        assert (network.second.kernel.sum(axis=1) * 255.0 + network.second.bias).max() < EXACT
        assert (network.own_first.kernel.sum(axis=1) * 255.0 + network.own_first.bias).max() < EXACT
        alike = (network.own.sum() + network.own_last.sum()) * 255.0
        last = network.last.kernel.sum(axis=1) * 255.0 + network.last.bias + alike
        assert last.max() < EXACT


@pytest.mark.parametrize("batch", [1, 4])
def test_set_vectors_are_bounded_and_of_the_last_set(batch: int):
    policy = random_policy("context", MODEL, inputs=INPUTS).policy(MODEL, 4)
    state = states(policy, 3, batch)[-1]
    for layer, params in enumerate(policy.params):
        used = np.asarray(state.used[layer]) > 0
        limit = params.vectors.upward_limit
        expected = np.clip(params.vectors.upward[used].sum(axis=0), -limit, limit)
        assert np.array_equal(state.upward[layer], expected)
    if batch == 1:  # a single sequence never meets the bound
        assert used.sum() == MODEL.top_k
        assert np.array_equal(state.upward[layer], params.vectors.upward[used].sum(axis=0))


def test_equal_sizes_share_what_is_compiled():
    one, two = (random_policy("context", MODEL, seed=seed).policy(MODEL, 4) for seed in (0, 1))
    assert one == two and hash(one) == hash(two)
    assert one != random_policy("context", MODEL, hidden=8).policy(MODEL, 4)
