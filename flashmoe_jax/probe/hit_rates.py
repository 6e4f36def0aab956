"""How many of a token's experts a layer finds in so many slots: from a trace, from popularity, or by assumption.

Owns the step from routing to the distribution of misses per token and layer, which `predict.py` turns into time.
Invariant: more slots never make more misses, in any of the three; with as many slots as experts there are none.
"""

import math
from typing import Protocol

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.telemetry.trace import DECODE, Trace


class MissModel(Protocol):
    """What is known of a model's routing."""

    source: str  # where it comes from, for a person

    def miss_shares(self, slots: int) -> np.ndarray:
        """Share of (token, layer) pairs by the number of experts missed, `[X + 1]` float64, adding up to 1."""


def hit_rate(model: MissModel, slots: int) -> float:
    """Share of the accesses that find their expert."""
    shares = model.miss_shares(slots)
    return float(1 - shares @ np.arange(len(shares)) / (len(shares) - 1))


class UniformRouting:
    """Every expert as likely as any other, whatever came before: what no policy can use. Hit rate slots ÷ experts."""

    def __init__(self, num_experts: int, experts_per_token: int):
        self._experts, self._top_k = num_experts, experts_per_token
        self.source = (
            "hit rates assume that experts are chosen evenly and independently, a lower bound (slots ÷ experts): "
            "routing of real text repeats itself; record a trace and give it with --trace FILE"
        )

    def miss_shares(self, slots: int) -> np.ndarray:
        """Hypergeometric: X of E experts are chosen, of which E - R are missing."""
        E, X, missing = self._experts, self._top_k, self._experts - slots
        ways = [math.comb(missing, m) * math.comb(slots, X - m) for m in range(X + 1)]
        return np.array([way / math.comb(E, X) for way in ways])


class PopularRouting:
    """The most popular experts of each layer resident for good, choices independent.

    Args:
        popularity: uses `[L, E]`.
    """

    def __init__(self, popularity: np.ndarray, experts_per_token: int, source: str):
        uses = -np.sort(-popularity.astype(np.float64), axis=1)
        uses += uses.sum(axis=1, keepdims=True) == 0  # a layer without uses counts as even
        # Share of a layer's accesses to its r most popular experts, for r = 0 ... E.
        self._hits = np.pad(np.cumsum(uses, axis=1) / uses.sum(axis=1, keepdims=True), ((0, 0), (1, 0)))
        self._top_k, self.source = experts_per_token, source

    def miss_shares(self, slots: int) -> np.ndarray:
        """Binomial in each layer, averaged over the layers."""
        X = self._top_k
        miss_L = np.clip(1 - self._hits[:, slots], 0, 1)
        return np.array([np.mean(math.comb(X, m) * miss_L**m * (1 - miss_L) ** (X - m)) for m in range(X + 1)])


class TracedRouting:
    """LRU on a recorded trace.

    Args:
        trace: of one model; prompts fill the slots, decoded tokens count (all do where none is marked as decoded).
        source: what it is called in the report.

    Raises:
        ConfigError: a trace of another model, or an empty one.
    """

    def __init__(self, trace: Trace, num_layers: int, num_experts: int, experts_per_token: int, source: str):
        ids = trace.ids
        if ids.shape[1:] != (num_layers, experts_per_token) or ids.max(initial=-1) >= num_experts:
            raise ConfigError(
                f"the trace has {ids.shape[1]} layers with {ids.shape[2]} experts per token and ids up to "
                f"{ids.max(initial=-1)}, the model {num_layers} with {experts_per_token} of {num_experts}; use a trace "
                "of this model"
            )
        is_decoded = trace.phase == DECODE
        distance = stack_distances(ids, num_experts)[is_decoded if is_decoded.any() else slice(None)]
        distance = distance.reshape(-1, ids.shape[2])
        self._distance = distance[(distance >= 0).all(axis=1)]
        if not len(self._distance):
            raise ConfigError("the trace holds no token with its experts; record a longer one")
        self._top_k, self.source = ids.shape[2], source

    def miss_shares(self, slots: int) -> np.ndarray:
        """Counted."""
        misses = np.count_nonzero(self._distance >= slots, axis=1)
        return np.bincount(misses, minlength=self._top_k + 1) / len(misses)


def stack_distances(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """How many experts of the layer were used more recently than this one, before each access.

    With `R` slots under LRU the access hits if that is below `R`: one pass gives the hits of every number of slots
    (Mattson et al., 1970). All experts of a token and layer are asked for at once, as in a decode step. The stack
    starts with all experts in the order of their ids, as if the slots had been filled before.

    Args:
        ids: `[tokens, L, X]` int, -1 = missing.

    Returns:
        `[tokens, L, X]` int32; -1 where the id is missing.
    """
    num_tokens, L, _ = ids.shape
    # Larger is more recent; all different, so that no two experts share a place.
    order = np.arange(num_experts, 0, -1, dtype=np.int64)
    recency = np.tile(order - num_experts, (L, 1))
    layer = np.arange(L)[:, None]
    distance = np.full(ids.shape, -1, np.int32)
    for token in range(num_tokens):
        id_LX = ids[token]
        is_there = id_LX >= 0
        known = np.where(is_there, id_LX, 0)
        more_recent = np.count_nonzero(recency[:, None, :] > recency[layer, known][:, :, None], axis=2)
        distance[token] = np.where(is_there, more_recent, -1)
        rows, ranks = np.nonzero(is_there)
        used = id_LX[rows, ranks]
        recency[rows, used] = (token + 1) * num_experts + order[used]
    return distance
