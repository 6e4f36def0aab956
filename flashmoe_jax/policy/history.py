"""What the policy `context` remembers of the steps so far, and the decayed counts that `shared` keeps, too.

All of it is whole numbers, so that a network of whole numbers (`network.py`) gives the same keep values in the decode
step and in replay. Owns the state, its update, and how it becomes network inputs; `paper` counts as the heuristics do.
Invariant: a layer's update changes that layer's rows alone.

Uses are counted at several speeds: c' = c - (c >> k) + 2^16 for a use, an exponentially decayed count with factor
1 - 2^-k, half-lives of 1, 2.4, 5.2, 11, 22, 44, 88, 177 and 355 steps.

Every layer also says in a few numbers which set it chose last: the sum of a trained vector per chosen expert, one for
the layers above it, which look at this step's set, and one for those below, which look at the set of the step before.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from flashmoe_jax.policy.base import HIDDEN, ROUTER_LOGITS, PolicyShape
from flashmoe_jax.policy.heuristics import used_experts
from flashmoe_jax.policy.recall import NUM_RECALLS, NUM_SETS, recall_levels, remembered

MAX_INPUT = 255
SHIFTS = tuple(range(1, 10))
OWN_FEATURES = len(SHIFTS) + NUM_RECALLS  # of an expert, in `own_inputs`
_ONE = 16  # bits of a count's fraction
# Router logits are kept as steps of 1/16 below the largest, MAX_INPUT for the largest itself.
_LOGIT_STEPS = 16.0
# Moving averages of them, by the shift that updates each; 8 bits of fraction.
LOGIT_SHIFTS = (2, 4)
_LOGIT_BITS = 8
# Hidden states are normed: a step of 1/32, bounded at ±127.
_HIDDEN_STEPS, MAX_HIDDEN = 32.0, 127


class SetVectors(NamedTuple):
    """Trained vectors of a layer's experts, whole numbers in float32."""

    upward: Array  # [E, H] for the layers above, this layer included
    downward: Array  # [E, H] for the layers below
    upward_limit: Array  # [H] bound of a sum's magnitude, so that it stays exact in a batch, too
    downward_limit: Array  # [H]


class History(NamedTuple):
    """State of all layers, int32 but for the vectors; parts that a policy does not use have no elements."""

    counts: Array  # [L, K, E] decayed uses, one row per shift
    sets: Array  # [L, NUM_SETS, E] int8: 1 = chosen, the latest step first
    upward: Array  # [L, H] float32 whole numbers: of the layer's last set, for the layers above; or [L, 0]
    downward: Array  # [L, H] the same for the layers below
    logits: Array  # [L, 1 + averages, E] the last step's, then moving averages; or [L, 0, E]
    hidden: Array  # [L, D] of the last step; or [L, 0]

    @property
    def used(self) -> Array:
        """1 = chosen in the layer's last step, `[L, E]`."""
        return self.sets[..., 0, :]


def init_history(shape: PolicyShape, *, vector_size: int, inputs: frozenset[str]) -> History:
    """No step seen."""
    L, E = shape.num_layers, shape.num_experts
    return History(
        counts=jnp.zeros((L, len(SHIFTS), E), jnp.int32),
        sets=jnp.zeros((L, NUM_SETS, E), jnp.int8),
        upward=jnp.zeros((L, vector_size), jnp.float32),
        downward=jnp.zeros((L, vector_size), jnp.float32),
        logits=jnp.zeros((L, 1 + len(LOGIT_SHIFTS) if ROUTER_LOGITS in inputs else 0, E), jnp.int32),
        hidden=jnp.zeros((L, shape.hidden_size if HIDDEN in inputs else 0), jnp.int32),
    )


def update_history(
    vectors: SetVectors | None,
    state: History,
    layer: Array,
    expert_ids: Array,
    router_logits: Array | None,
    hidden: Array | None,
) -> History:
    """Counts one step of one layer; see `Policy.update`."""
    used_E = used_experts(expert_ids, state.sets.shape[2]).astype(jnp.int32)
    takes_part_B = expert_ids[:, 0] >= 0
    is_step = jnp.any(used_E > 0)
    row = History(*(a[layer] for a in state))
    upward, downward = row.upward, row.downward
    if row.upward.size:
        assert vectors is not None
        upward = _sum_of(used_E, vectors.upward, vectors.upward_limit)
        downward = _sum_of(used_E, vectors.downward, vectors.downward_limit)
    new = History(
        counts=decayed_counts(row.counts, used_E),
        sets=remembered(row.sets, used_E),
        upward=upward,
        downward=downward,
        logits=_update_logits(row.logits, router_logits, takes_part_B) if row.logits.size else row.logits,
        hidden=_mean_hidden(hidden, takes_part_B) if row.hidden.size else row.hidden,
    )
    return History(*(a.at[layer].set(jnp.where(is_step, b, old)) for a, b, old in zip(state, new, row, strict=True)))


def decayed_counts(counts_KE: Array, used_E: Array) -> Array:
    """Counts of a layer after a step that used `used_E`, 1 or 0."""
    shift_K1 = jnp.array(SHIFTS, jnp.int32)[:, None]
    left_KE = counts_KE - lax.shift_right_arithmetic(counts_KE, jnp.broadcast_to(shift_K1, counts_KE.shape))
    return left_KE + (used_E.astype(jnp.int32) << _ONE)


def _sum_of(used_E: Array, vector_EH: Array, limit_H: Array) -> Array:
    total_H = lax.dot(used_E.astype(jnp.float32), vector_EH, precision=lax.Precision.HIGHEST)
    return jnp.clip(total_H, -limit_H, limit_H)


def _update_logits(row: Array, router_logits: Array | None, takes_part_B: Array) -> Array:
    """Of a batch, what the sequence that wants an expert most says of it."""
    assert router_logits is not None
    # As a trace stores them, so that a replay of the trace sees the same.
    logits_BE = router_logits.astype(jnp.float16).astype(jnp.float32)
    below_BE = logits_BE - jnp.max(logits_BE, axis=1, keepdims=True)
    level_BE = jnp.clip(MAX_INPUT + jnp.round(below_BE * _LOGIT_STEPS), 0, MAX_INPUT).astype(jnp.int32)
    level_E = jnp.max(jnp.where(takes_part_B[:, None], level_BE, 0), axis=0)
    means = [row[1 + i] + (((level_E << _LOGIT_BITS) - row[1 + i]) >> shift) for i, shift in enumerate(LOGIT_SHIFTS)]
    return jnp.stack([level_E, *means])


def _mean_hidden(hidden: Array | None, takes_part_B: Array) -> Array:
    assert hidden is not None
    value_BD = hidden.astype(jnp.float16).astype(jnp.float32) * _HIDDEN_STEPS
    level_BD = jnp.clip(jnp.round(value_BD), -MAX_HIDDEN, MAX_HIDDEN).astype(jnp.int32)
    total_D = jnp.sum(jnp.where(takes_part_B[:, None], level_BD, 0), axis=0)
    return total_D // jnp.maximum(jnp.sum(takes_part_B.astype(jnp.int32)), 1)


def count_levels(counts: Array) -> Array:
    """Square roots of the decayed shares of steps, `[..., K, E]` from 0 to MAX_INPUT, float32."""
    full = jnp.array([2.0 ** -(_ONE + shift) for shift in SHIFTS], jnp.float32)[:, None]
    return jnp.clip(jnp.round(MAX_INPUT * jnp.sqrt(counts.astype(jnp.float32) * full)), 0, MAX_INPUT)


def own_inputs(row: History) -> Array:
    """What a network over a layer sees of the layer itself.

    Counts and what is recalled, OWN_FEATURES rows of E; then router logits and hidden state where they are kept.

    Args:
        row: of the layer, without the layer axis.

    Returns:
        float32 `[own_width]` whole numbers.
    """
    parts = [count_levels(row.counts).reshape(-1), recall_levels(row.sets).reshape(-1)]
    if row.logits.size:
        averages = lax.shift_right_arithmetic(row.logits[1:], jnp.full_like(row.logits[1:], _LOGIT_BITS))
        parts += [row.logits[0].astype(jnp.float32), averages.astype(jnp.float32).reshape(-1)]
    parts.append(row.hidden.astype(jnp.float32))
    return jnp.concatenate(parts)


def own_width(shape: PolicyShape, inputs: frozenset[str]) -> int:
    """How many inputs `own_inputs` gives."""
    logits = 1 + len(LOGIT_SHIFTS) if ROUTER_LOGITS in inputs else 0
    return (OWN_FEATURES + logits) * shape.num_experts + (shape.hidden_size if HIDDEN in inputs else 0)


def sets_around(state: History, layer: Array) -> Array:
    """Sum of the vectors of every layer's last set, as `layer` sees them, float32 `[H]`.

    Layers are visited in order: the sets up to `layer` are those of this step, the ones above those of the step before.
    """
    is_below_L1 = (jnp.arange(state.upward.shape[0]) <= layer)[:, None]
    return jnp.sum(jnp.where(is_below_L1, state.upward, state.downward), axis=0)
