"""What a network is trained to say of every expert at every step, from the future of the trace.

Three labels. `distance` is the paper's: steps to the next use, clamped; a regression. `reuse` is e^(-(steps - 1)/τ) for
several horizons τ: few slots ask about the next few steps, many slots about many. `victim` is Belady's choice itself:
whether an expert is among the R that are used soonest, for several R; MIN's victims are the residents that are not.
Owns distances, targets and losses; knows no network. Invariant: a loss is least where keep values order experts as MIN
does.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from train_policy.policies.optimal import NEVER, next_use, write_distances
from train_policy.replay_steps import Steps

FAR = 255  # so many steps away or more, or never
# The paper's clamp in experts of a layer, as its public stand-in has it (github malmong/CECAR).
_CLAMP = 0.75
HORIZONS = (2.0, 8.0, 16.0)
VICTIM_SHARES = (0.125, 0.25, 0.375, 0.5)  # of the experts that have a slot
_CHUNK_STEPS = 8192


class Label(enum.Enum):
    """What is predicted."""

    DISTANCE = "distance"
    VICTIM = "victim"
    REUSE = "reuse"


@dataclasses.dataclass(frozen=True)
class Target:
    """A label for a model with so many experts per layer.

    Attributes:
        is_single: whether the network has one head only; it learns the second of the shares, or a horizon that
            suits the model.
    """

    label: Label
    num_experts: int
    top_k: int
    is_single: bool = False

    @property
    def num_heads(self) -> int:
        """M."""
        if self.label is Label.DISTANCE or self.is_single:
            return 1
        return len(HORIZONS if self.label is Label.REUSE else VICTIM_SHARES)

    @property
    def first_guess(self) -> float:
        """A keep value to begin with."""
        return -1.0 if self.label is Label.DISTANCE else -2.0

    def boundaries(self, distance: np.ndarray) -> np.ndarray:
        """For `victim`, how far the last expert that stays is: uint8 `[..., M]` of distances `[..., E]`."""
        if self.label is not Label.VICTIM:
            return np.zeros((*distance.shape[:-1], 0), np.uint8)
        shares = VICTIM_SHARES[1:2] if self.is_single else VICTIM_SHARES
        last = [min(max(round(share * self.num_experts), self.top_k), self.num_experts) - 1 for share in shares]
        return np.partition(distance, sorted(set(last)), axis=-1)[..., last]

    def loss(self, keep: Array, distance: Array, boundary: Array) -> Array:
        """Mean loss of keep values `[..., M, E]`; distance uint8 `[..., E]`, boundary uint8 `[..., M]`."""
        away = distance[..., None, :].astype(jnp.float32)
        if self.label is Label.DISTANCE:
            clamp = _CLAMP * self.num_experts
            return jnp.mean(jnp.square(keep + jnp.minimum(away, clamp) / clamp))
        if self.label is Label.REUSE:
            # One head asks about as many steps as it takes to choose as many experts as a layer has.
            own = self.num_experts / self.top_k
            horizon = jnp.array([own] if self.is_single else HORIZONS, jnp.float32)[:, None]
            wanted = jnp.exp((1 - away) / horizon)
        else:
            wanted = ((away <= boundary[..., None]) & (away < FAR)).astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(keep) - wanted * keep)  # cross-entropy of logits


def distances(steps: Steps) -> np.ndarray:
    """Steps from every step to every expert's next use, uint8 `[L, S, E]`, FAR at the most."""
    num_experts, num_steps = steps.num_experts, steps.num_steps
    result = np.empty((steps.num_layers, num_steps, num_experts), np.uint8)
    chunk = np.empty((_CHUNK_STEPS, 1, num_experts), np.float32)
    for layer, requests in enumerate(steps.layers):
        coming, upcoming = next_use(requests, num_experts), np.full(num_experts, NEVER)
        experts, place = np.unique(requests.ids, return_index=True)
        upcoming[experts] = np.searchsorted(requests.start, place, side="right") - 1  # their first uses
        for begin in range(0, num_steps, _CHUNK_STEPS):
            end = min(begin + _CHUNK_STEPS, num_steps)
            write_distances(requests, coming, begin, end, upcoming, 0, chunk)
            result[layer, begin:end] = np.minimum(chunk[: end - begin, 0], FAR)
    return result
