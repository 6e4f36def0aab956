"""The eviction network as it is scored: a few affine layers in integers, exact in every program and on every backend.

Engine and replay must choose the same victims, yet a float product has other last bits in another program, batch or
backend. So a trained network is rounded to integers: inputs, weights and biases are whole numbers held in float32, and
no sum of products reaches 2^24, below which float32 holds every whole number. Such a product is exact in whatever
order it is summed, and the same for one row in the decode step as for thousands in replay. Between two layers a sum is
multiplied once by a power or fraction, rounded, and bounded; that single product is rounded the same everywhere.

Owns the integer form, how floats become it, and its evaluation. Invariant: `evaluate` of the same layers and inputs
gives the same bits everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Whole numbers up to here are exact in float32; weights also fit the 11 bits of an accelerator's TF32.
EXACT = 2**24
MAX_WEIGHT = 2**11 - 1
MAX_ACTIVATION = 255
# Entries of a tabled activation, and the pre-activations they span.
TABLE_SIZE = 512
TABLE_RANGE = 8.0


class FloatLayer(NamedTuple):
    """A trained affine layer, float32."""

    kernel: np.ndarray  # [N, F]
    bias: np.ndarray  # [N]


class IntegerLayer(NamedTuple):
    """One layer in whole numbers, all arrays float32."""

    kernel: Array  # [N, F]
    bias: Array  # [N]
    scale: Array  # scalar: from a sum to an activation, or to an entry of `table`; 0 for the last layer
    table: Array  # [TABLE_SIZE] of activations, or empty: clipped at 0 and MAX_ACTIVATION


def evaluate(layers: Sequence[IntegerLayer], inputs: Array) -> Array:
    """Outputs of the last layer, whole numbers in float32.

    Args:
        layers: as `to_integers` gives them.
        inputs: float32 `[..., F]` whole numbers.
    """
    x = inputs
    for layer in layers[:-1]:
        x = activate(layer, affine(layer, x))
    return affine(layers[-1], x)


def affine(layer: IntegerLayer, x: Array) -> Array:
    """Sums of a layer, before it is activated."""
    sums = lax.dot_general(x, layer.kernel, (((x.ndim - 1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return sums + layer.bias


def activate(layer: IntegerLayer, sums: Array) -> Array:
    """Activations, whole numbers up to MAX_ACTIVATION."""
    value = jnp.round(sums * layer.scale)
    if layer.table.shape[0]:
        index = jnp.clip(value + TABLE_SIZE // 2, 0, TABLE_SIZE - 1).astype(jnp.int32)
        return jnp.asarray(layer.table)[index]
    return jnp.clip(value, 0, MAX_ACTIVATION)


def to_integers(
    layers: Sequence[FloatLayer],
    peaks: Sequence[float],
    *,
    activation: str,
    max_input: int,
) -> tuple[IntegerLayer, ...]:
    """Rounds a trained network.

    Args:
        layers: first to last.
        peaks: of every layer but the last: activations beyond it are cut off there. With few steps between 0 and the
            peak, one that is rarely reached is better than the largest seen.
        activation: "relu" or "silu", after every layer but the last.
        max_input: bound of the inputs as whole numbers; it stood for 1 in training.

    Returns:
        Layers for `evaluate`, numpy arrays. The last layer's outputs are in a unit of their own: order is all that is
        kept.
    """
    unit, bound = 1 / max_input, max_input
    result = []
    for place, layer in enumerate(layers):
        is_last = place == len(layers) - 1
        scaled = layer.kernel.astype(np.float64) * unit  # for inputs as whole numbers
        steps = _steps_per_one(scaled, layer.bias, bound)
        kernel, bias = np.round(scaled * steps), np.round(layer.bias.astype(np.float64) * steps)
        assert np.all(np.abs(kernel).sum(axis=1) * bound + np.abs(bias) < EXACT)
        table = np.zeros(0, np.float32)
        scale = 0.0
        if not is_last:
            next_unit = peaks[place] / MAX_ACTIVATION
            if activation == "silu":
                scale = TABLE_SIZE / (2 * TABLE_RANGE) / steps
                table = _silu_table(next_unit)
            else:
                scale = 1 / (steps * next_unit)
            unit, bound = next_unit, MAX_ACTIVATION
        result.append(
            IntegerLayer(kernel.astype(np.float32), bias.astype(np.float32), np.float32(scale), table)  # type: ignore[arg-type]
        )
    return tuple(result)


def _steps_per_one(kernel: np.ndarray, bias: np.ndarray, bound: int) -> float:
    """The finest whole-number grid, in steps per 1, that keeps every sum below EXACT and every weight small."""
    largest_sum = float(np.max(np.abs(kernel).sum(axis=1) * bound + np.abs(bias), initial=1e-30))
    largest_weight = float(np.max(np.abs(kernel), initial=1e-30))
    rounding = (kernel.shape[1] * bound + 1) / 2  # what rounding every weight up could add
    return min((EXACT - 1 - rounding) / largest_sum, MAX_WEIGHT / largest_weight)


def _silu_table(unit: float) -> np.ndarray:
    z = (np.arange(TABLE_SIZE) - TABLE_SIZE // 2) * (2 * TABLE_RANGE / TABLE_SIZE)
    return np.clip(np.round(z / (1 + np.exp(-z)) / unit), -MAX_ACTIVATION, MAX_ACTIVATION).astype(np.float32)
