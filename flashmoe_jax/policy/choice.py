"""From what the user calls a policy to the policy itself: names, folders, and `auto`.

Owns where learned policies are found: in a model directory under `policy/<kind>`, in a folder that the user names, and,
for `shared`, in this package. Invariant: a learned policy that is asked for or found is used or refused, never
passed over.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.heuristics import HEURISTICS, heuristic, static_policy
from flashmoe_jax.policy.learned import LEARNED
from flashmoe_jax.policy.popularity import STATIC_NAME, load_popularity
from flashmoe_jax.policy.saved import POLICY_JSON, SavedPolicy, load_saved

AUTO = "auto"
POLICIES = (*HEURISTICS, "static")
NAMES = (AUTO, *LEARNED, *POLICIES)
SHIPPED = Path(__file__).parent / "shipped"


@dataclasses.dataclass(frozen=True)
class ChosenPolicy:
    """A policy that fits the model; what it is exactly can depend on the number of slots."""

    kind: str
    source: str  # where a learned one comes from, for people; "" for the others
    of_slots: Callable[[int], Policy]
    is_learned: bool = False

    def __str__(self) -> str:
        return f"{self.kind} ({self.source})" if self.source else self.kind


def check_policy_name(name: str) -> None:
    """Raises ConfigError unless `name` is a policy or a folder with one; cheap, for use before anything is loaded."""
    if name not in NAMES and not (Path(name) / POLICY_JSON).is_file():
        raise ConfigError(
            f"policy {name!r} is unknown; choose one of {', '.join(NAMES)}, or give a folder that fit --out wrote"
        )


def choose_policy(
    name: str, model: PolicyShape, folder: Path | None = None, popularity: np.ndarray | None = None
) -> ChosenPolicy:
    """Finds a policy for a model.

    Args:
        name: one of NAMES, or a folder with a learned policy.
        model: sizes of the model.
        folder: `policy` of the model directory; it need not exist.
        popularity: uses per expert `[L, E]`, for `static`; None for what `folder` brings.

    Raises:
        ConfigError: unknown name, no such policy for this model, or one of another model.
    """
    check_policy_name(name)
    if name == AUTO:
        return _auto(model, folder)
    if name in HEURISTICS:
        return ChosenPolicy(name, "", lambda _: heuristic(name))
    if name == "static":
        static = make_static(model, _popularity(folder) if popularity is None else popularity)
        return ChosenPolicy(name, "", lambda _: static)
    if name not in LEARNED:
        return _learned(load_saved(Path(name)), model, f"of {name}")
    saved = _own(name, folder)
    if saved is not None:
        return _learned(saved, model, "of the model directory")
    if name == "shared":
        return _learned(load_saved(SHIPPED / "shared"), model, "shipped with this package")
    raise ConfigError(
        f"the model directory brings no {name} policy; fit one to a recorded trace with: python -m train_policy fit "
        f"--kind {name} --trace T --into MODEL, or use --policy auto"
    )


def make_static(model: PolicyShape, popularity: np.ndarray | None) -> Policy:
    """The `static` policy for a model.

    Raises:
        ConfigError: popularity missing or of another model's shape.
    """
    if popularity is None:
        raise ConfigError(
            "policy static needs the popularity of the experts; record a trace with --trace FILE and give it with "
            "--policy-trace FILE"
        )
    if popularity.shape != (model.num_layers, model.num_experts):
        raise ConfigError(
            f"the popularity is of {popularity.shape[0]} layers x {popularity.shape[1]} experts, the model has "
            f"{model.num_layers} x {model.num_experts}; use a trace of this model"
        )
    return static_policy(popularity)


def _auto(model: PolicyShape, folder: Path | None) -> ChosenPolicy:
    """The model directory's own policy, else the shipped one, else `decayed`."""
    for kind in LEARNED:
        if (saved := _own(kind, folder)) is not None:
            return _learned(saved, model, "of the model directory")
    if (SHIPPED / "shared" / POLICY_JSON).is_file():
        return _learned(load_saved(SHIPPED / "shared"), model, "shipped with this package")
    return choose_policy("decayed", model)


def _own(kind: str, folder: Path | None) -> SavedPolicy | None:
    if folder is None or not (folder / kind / POLICY_JSON).is_file():
        return None
    return load_saved(folder / kind)


def _learned(saved: SavedPolicy, model: PolicyShape, source: str) -> ChosenPolicy:
    saved.check_model(model)
    return ChosenPolicy(saved.kind, source, lambda num_slots: saved.policy(model, num_slots), True)


def _popularity(folder: Path | None) -> np.ndarray | None:
    path = folder / STATIC_NAME if folder is not None else None
    return load_popularity(path) if path is not None and path.exists() else None
