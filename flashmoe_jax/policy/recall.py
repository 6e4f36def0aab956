"""What followed in the past: a layer's latest sets, and which experts came after those that are like this step's.

A text that repeats itself is foreseen this way without one trained weight per expert. Owns the memory of sets and what
is recalled from it. Invariant: all numbers are whole, made of whole numbers by one division, root or product at a time,
so that they are the same in every program.
"""

import jax.numpy as jnp
from jax import Array, lax

MAX_LEVEL = 255
# Sets of a layer that are remembered, this step's among them.
NUM_SETS = 64
NUM_RECALLS = 3
# Experts that two sets have in common, at the most: of a larger number the sums below would not be exact.
_MAX_COMMON = 170
_LATER = (2, 3, 4)  # steps after a similar one that count together
# An expert at the layer's mean has this level.
_PER_MEAN = 32


def remembered(sets_WE: Array, used_E: Array) -> Array:
    """The latest sets with one more, int8, the latest first."""
    return jnp.concatenate([used_E[None].astype(jnp.int8), sets_WE[:-1]])


def recall_levels(sets_WE: Array) -> Array:
    """`recalled`, relative to the layer's mean: float32 `[NUM_RECALLS, E]` from 0 to MAX_LEVEL."""
    return relative_levels(recalled_counts(sets_WE))


def recalled_counts(sets_WE: Array) -> Array:
    """`recalled` as int32, small enough to be summed over the experts of a layer."""
    recalled_CE = recalled(sets_WE.astype(jnp.float32)).astype(jnp.int32)
    # A sum over more than 128 experts would overflow, which a large batch can all choose.
    return recalled_CE // max(sets_WE.shape[1] // 128, 1)


def relative_levels(value_FE: Array) -> Array:
    """Roots of whole numbers, relative to their mean over the layer's experts: from 0 to MAX_LEVEL, float32.

    A cold start, a sparse and a dense model look alike.
    """
    total_F1 = jnp.maximum(jnp.sum(value_FE, axis=1, keepdims=True), 1).astype(jnp.float32)
    ratio_FE = value_FE.astype(jnp.float32) * value_FE.shape[1] / total_F1
    return jnp.clip(jnp.round(_PER_MEAN * jnp.sqrt(ratio_FE)), 0, MAX_LEVEL)


def recalled(sets_WE: Array) -> Array:
    """What followed the sets that are like this step's.

    A set of the past weighs the square of the number of experts in common. Three sums over the past are made of the
    sets that came right after; of the same with the step before compared, too; and of those two to four steps after.

    Args:
        sets_WE: the latest first, float32 0 or 1.

    Returns:
        Weights by which each expert followed, whole numbers below 2^24, float32 `[NUM_RECALLS, E]`.
    """
    # Row i: what the set of i steps ago has in common with this one, and with the one before this.
    common_W2 = jnp.minimum(lax.dot(sets_WE, sets_WE[:2].T, precision=lax.Precision.HIGHEST), _MAX_COMMON)
    common_W = common_W2[1:, 0]
    earlier_W = jnp.concatenate([common_W2[2:, 1], jnp.zeros(1)])
    weight_W = common_W * common_W
    both_W = 2 * common_W + earlier_W
    # A set i steps ago was followed by that of i - 1 steps ago.
    later_W = sum(_moved(weight_W, steps - 1) for steps in _LATER)
    weights_CW = jnp.stack([weight_W, both_W * both_W, later_W])
    return lax.dot(weights_CW, sets_WE[:-1], precision=lax.Precision.HIGHEST)


def _moved(weight_W: Array, steps: int) -> Array:
    """Weights of the sets so many steps later; those that are yet to come have none."""
    return jnp.concatenate([weight_W[steps:], jnp.zeros(steps)])
