"""Untrained policies of every learned kind, for tests that need their form and not their quality."""

import numpy as np

from flashmoe_jax.policy.base import HIDDEN, PolicyShape
from flashmoe_jax.policy.learned import input_width
from flashmoe_jax.policy.network import FloatLayer
from flashmoe_jax.policy.saved import SavedPolicy

# kind, shape of the network, activation
KINDS = (
    ("context", "layer", "relu"),
    ("paper", "expert", "silu"),
    ("paper", "layer", "silu"),
    ("shared", "expert", "relu"),
)


def random_policy(
    kind: str,
    shape: str,
    model: PolicyShape,
    *,
    activation: str = "relu",
    inputs: frozenset[str] = frozenset(),
    seed: int = 0,
    heads: int = 1,
    hidden: int = 16,
    skip: bool = False,
) -> SavedPolicy:
    """Three random layers; with `skip` the last one sees the inputs too."""
    random = np.random.default_rng(seed)
    networks = 1 if kind == "shared" else model.num_layers
    width = input_width(kind, shape, model, inputs)
    outputs = model.num_experts if shape == "layer" else 1

    def layer(*size: int) -> FloatLayer:
        scale = 1 / np.sqrt(size[-1])
        return FloatLayer(
            random.normal(0, scale, (networks, *size)).astype(np.float32),
            random.normal(0, scale, (networks, *size[:-1])).astype(np.float32),
        )

    last = hidden + (width if skip else 0)
    shares = np.linspace(0, 1, heads) if heads > 1 else np.zeros(1)
    return SavedPolicy(
        kind=kind,
        shape=shape,
        model=model if HIDDEN in inputs else model._replace(hidden_size=0),
        inputs=inputs,
        activation=activation,
        layers=(layer(hidden, width), layer(hidden, hidden), layer(heads, outputs, last)),
        peaks=(np.full(networks, 2.0, np.float32), np.full(networks, 1.5, np.float32)),
        blend=tuple((float(s), tuple(row)) for s, row in zip(shares, np.eye(heads).tolist(), strict=True)),
        meta={"seed": seed},
    )
