"""Networks in whole numbers: exact everywhere, and close to the floats that they were made of."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.policy.network import EXACT, MAX_WEIGHT, FloatLayer, evaluate, to_integers


def float_layers(random: np.random.Generator, widths: list[int]) -> list[FloatLayer]:
    return [
        FloatLayer(
            random.normal(0, 1 / np.sqrt(before), (after, before)).astype(np.float32),
            random.normal(0, 0.1, after).astype(np.float32),
        )
        for before, after in itertools.pairwise(widths)
    ]


def activate(z: np.ndarray, activation: str, peak: float) -> np.ndarray:
    return np.clip(z, 0, peak) if activation == "relu" else np.clip(z / (1 + np.exp(-z)), -peak, peak)


def in_floats(layers: list[FloatLayer], peaks: list[float], activation: str, x: np.ndarray) -> np.ndarray:
    for layer, peak in zip(layers[:-1], peaks, strict=True):
        x = activate(x @ layer.kernel.T + layer.bias, activation, peak)
    return x @ layers[-1].kernel.T + layers[-1].bias


def exactly(layers, x: np.ndarray) -> np.ndarray:
    """The same in int64."""
    x = x.astype(np.int64)
    for layer in layers[:-1]:
        sums = x @ layer.kernel.astype(np.int64).T + layer.bias.astype(np.int64)
        value = np.round(sums.astype(np.float32) * layer.scale)
        if len(layer.table):
            middle = len(layer.table) // 2
            x = layer.table[np.clip(value + middle, 0, len(layer.table) - 1).astype(int)].astype(np.int64)
        else:
            x = np.clip(value, 0, 255).astype(np.int64)
    return x @ layers[-1].kernel.astype(np.int64).T + layers[-1].bias.astype(np.int64)


@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    activation=st.sampled_from(["relu", "silu"]),
)
@settings(max_examples=25, deadline=None)
def test_every_program_gives_the_same_bits(seed: int, widths: list[int], activation: str):
    random = np.random.default_rng(seed)
    floats = float_layers(random, widths)
    peaks = [float(random.uniform(0.5, 3)) for _ in floats[:-1]]
    layers = to_integers(floats, peaks, activation=activation, max_input=255)
    x = random.integers(0, 256, (7, widths[0]))
    expected = exactly(layers, x)
    assert np.abs(expected).max() < EXACT
    batch = jax.jit(lambda v: evaluate(layers, v))(x.astype(np.float32))
    one_by_one = [jax.jit(lambda v: evaluate(layers, v))(row.astype(np.float32)) for row in x[:2]]
    assert np.array_equal(batch, expected)
    assert np.array_equal(np.stack(one_by_one), expected[:2])


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_rounding_keeps_the_order_of_what_differs(activation: str):
    random = np.random.default_rng(3)
    floats = float_layers(random, [300, 64, 64, 32])
    x = random.integers(0, 256, (500, 300))
    hidden = activate(x / 255 @ floats[0].kernel.T + floats[0].bias, activation, np.inf)
    peaks = [float(hidden.max()), 2.0]
    layers = to_integers(floats, peaks, activation=activation, max_input=255)
    assert all(np.abs(layer.kernel).max() <= MAX_WEIGHT for layer in layers)
    wanted = in_floats(floats, peaks, activation, x / 255)
    got = np.asarray(evaluate(layers, x.astype(np.float32)))
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(wanted, got, strict=True)]
    assert min(correlation) > 0.99


def test_a_network_of_one_layer_is_rounded_as_finely_as_sums_allow():
    layers = to_integers(
        [FloatLayer(np.ones((1, 40000), np.float32), np.zeros(1, np.float32))], [], activation="relu", max_input=255
    )
    assert layers[0].kernel.max() == 1
    assert 40000 * 255 * layers[0].kernel.max() < EXACT
