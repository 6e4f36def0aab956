"""Eviction policies: `make_policy` turns a name into the pure functions of `Policy`."""

import os

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import HEURISTICS, heuristic, static_policy

POLICIES = (*HEURISTICS, "static")

__all__ = ["POLICIES", "Policy", "PolicyShape", "check_policy_name", "make_policy"]


def check_policy_name(name: str) -> None:
    """Raises ConfigError unless `name` is a policy; cheap, for use before anything is loaded."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is unknown; choose one of {', '.join(POLICIES)}")


def make_policy(name: str, shape: PolicyShape, popularity: np.ndarray | None = None) -> Policy:
    """The policy called `name` for a model of `shape`.

    Args:
        name: one of POLICIES.
        shape: of the model.
        popularity: uses per expert `[L, E]`, for `static` only.

    Raises:
        ConfigError: unknown name, or popularity missing or of another model's shape.
    """
    check_policy_name(name)
    if name != "static":
        return heuristic(name)
    if popularity is None:
        raise ConfigError(
            "policy static needs the popularity of the experts; record a trace with --trace FILE and give it with "
            "--policy-trace FILE"
        )
    if popularity.shape != (shape.num_layers, shape.num_experts):
        raise ConfigError(
            f"the popularity is of {popularity.shape[0]} layers x {popularity.shape[1]} experts, the model has "
            f"{shape.num_layers} x {shape.num_experts}; use a trace of this model"
        )
    return static_policy(popularity)


def load_popularity(path: str | os.PathLike[str]) -> np.ndarray:
    """Popularity `[L, E]` float32 from `policy/static.npz` of a model directory."""
    with np.load(path) as archive:
        return archive["popularity"].astype(np.float32)
