"""Eviction policies: `choose_policy` turns what the user asks for into the pure functions of `Policy`."""

import numpy as np

from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.choice import NAMES, POLICIES, ChosenPolicy, check_policy_name, choose_policy
from flashmoe_jax.policy.popularity import STATIC_NAME, load_popularity, save_popularity

__all__ = [
    "NAMES",
    "POLICIES",
    "STATIC_NAME",
    "ChosenPolicy",
    "Policy",
    "PolicyShape",
    "check_policy_name",
    "choose_policy",
    "load_popularity",
    "make_policy",
    "save_popularity",
]


def make_policy(name: str, shape: PolicyShape, popularity: np.ndarray | None = None) -> Policy:
    """The heuristic or `static` policy called `name`; see `choose_policy`.

    Raises:
        ConfigError: unknown name, or popularity missing or of another model's shape.
    """
    return choose_policy(name, shape, popularity=popularity).of_slots(shape.num_experts)
