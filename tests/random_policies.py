"""Untrained policies of every learned kind, for tests that need their form and not their quality."""

import numpy as np

from flashmoe_jax.policy.base import HIDDEN, PolicyShape
from flashmoe_jax.policy.context import seen_columns
from flashmoe_jax.policy.history import OWN_FEATURES
from flashmoe_jax.policy.learned import paper_width
from flashmoe_jax.policy.saved import SavedPolicy
from flashmoe_jax.policy.shared import SHARED_WIDTH

# kind, shape of the network
KINDS = (("context", ""), ("paper", "expert"), ("paper", "layer"), ("shared", ""))


def random_policy(
    kind: str,
    model: PolicyShape,
    *,
    shape: str = "",
    inputs: frozenset[str] = frozenset(),
    seed: int = 0,
    heads: int = 1,
    hidden: int = 16,
    shares_second: bool = False,
) -> SavedPolicy:
    """Three random layers."""
    random = np.random.default_rng(seed)
    L, E = model.num_layers, model.num_experts

    def weights(*size: int) -> np.ndarray:
        return random.normal(0, 1 / np.sqrt(size[-1]), size).astype(np.float32)

    if kind == "context":
        arrays = {
            "upward": weights(L, E, hidden),
            "downward": weights(L, E, hidden),
            "first_kernel": weights(L, hidden, len(seen_columns(model, inputs))),
            "first_bias": weights(L, hidden),
            "second_kernel": weights(1 if shares_second else L, hidden, hidden),
            "second_bias": weights(L, hidden),
            "last_kernel": weights(L, heads, E, hidden),
            "last_bias": weights(L, heads, E),
            "own": weights(L, heads, OWN_FEATURES),
            "own_kernel": weights(L, 4, OWN_FEATURES),
            "own_bias": weights(L, 4),
            "own_last": weights(L, heads, 4),
            "first_peak": np.full(L, 2.0, np.float32),
            "second_peak": np.full(L, 1.5, np.float32),
            "own_peak": np.full(L, 1.0, np.float32),
        }
    else:
        networks = 1 if kind == "shared" else L
        width = SHARED_WIDTH if kind == "shared" else paper_width(shape, model)
        outputs = E if shape == "layer" else 1
        arrays = {}
        for i, (before, after) in enumerate(((width, hidden), (hidden, hidden), (hidden, outputs))):
            arrays |= {f"kernel{i}": weights(networks, after, before), f"bias{i}": weights(networks, after)}
        arrays |= {f"peak{i}": np.full(networks, 2.0, np.float32) for i in range(2)}
    shares = np.linspace(0, 1, heads) if heads > 1 else np.zeros(1)
    return SavedPolicy(
        kind=kind,
        shape=shape,
        model=model if HIDDEN in inputs else model._replace(hidden_size=0),
        inputs=inputs,
        activation="silu" if kind == "paper" else "relu",
        arrays=arrays,
        blend=tuple((float(s), tuple(row)) for s, row in zip(shares, np.eye(heads).tolist(), strict=True)),
        meta={"seed": seed},
    )
