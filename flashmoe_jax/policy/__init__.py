"""Eviction policies: `make_policy` turns a name into the pure functions of `Policy`."""

import json
import os
from typing import Any

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.npz import read_npz
from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import HEURISTICS, heuristic, static_policy

POLICIES = (*HEURISTICS, "static")
STATIC_NAME = "static.npz"  # in the policy folder of a model directory

__all__ = [
    "POLICIES",
    "STATIC_NAME",
    "Policy",
    "PolicyShape",
    "check_policy_name",
    "load_popularity",
    "make_policy",
    "save_popularity",
]


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


def save_popularity(path: str | os.PathLike[str], popularity: np.ndarray, meta: dict[str, Any]) -> None:
    """Writes popularity `[L, E]` as the parameters of a `static` policy; `meta` says where it comes from."""
    np.savez_compressed(path, popularity=popularity.astype(np.float32), meta=np.array(json.dumps(meta)))


def load_popularity(path: str | os.PathLike[str]) -> np.ndarray:
    """Popularity `[L, E]` float32 as `save_popularity` wrote it.

    Raises:
        ConfigError: not such a file.
    """
    try:
        return read_npz(path)["popularity"].astype(np.float32)
    except (FileNotFoundError, ConfigError, KeyError) as error:
        raise ConfigError(f"{os.fspath(path)} is not a static policy ({error}); fit it again") from None
