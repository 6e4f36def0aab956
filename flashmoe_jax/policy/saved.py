"""A trained policy on disk: `policy.json`, and the float32 weights of its network as an orbax checkpoint.

Owns the folder's form and what is refused about it; the rounding to whole numbers happens at load (`network.py`), for
the number of slots at hand. Invariant: a folder that exists is whole, and the same folder gives the same keep values
everywhere.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import HIDDEN, Policy, PolicyShape
from flashmoe_jax.policy.context import TrainedContext, context_policy, round_context, seen_columns
from flashmoe_jax.policy.history import MAX_INPUT
from flashmoe_jax.policy.learned import (
    LEARNED,
    PAPER_MAX_INPUT,
    paper_policy,
    paper_width,
)
from flashmoe_jax.policy.network import FloatLayer, IntegerLayer, to_integers
from flashmoe_jax.policy.shared import SHARED_WIDTH, shared_policy

FORMAT_VERSION = 1
POLICY_JSON = "policy.json"
_WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """A trained network and what must be known to use it.

    Attributes:
        kind: one of `learned.LEARNED`.
        model: sizes that it was trained for; `shared` fits every model and keeps those for information.
        arrays: float32 weights by name. `context`: the fields of `context.TrainedContext`. `paper` and `shared`, for
            affine layer i, first to last, stacked over MoE layers (`shared`: one): `kernel{i}` `[L, N, F]`, `bias{i}`
            `[L, N]` and, but for the last, `peak{i}` `[L]`, see `network.to_integers`.
        shape: of `paper`: "expert" or "layer", see `learned.py`; "" of the others.
        inputs: what it needs beside ids.
        activation: "relu" or "silu".
        blend: how the M heads of `context` are mixed: shares of the experts that have a slot, ascending, and each one's
            weights `[M]`; between two shares the weights are interpolated.
        meta: what it was trained on and how; JSON.
    """

    kind: str
    model: PolicyShape
    arrays: dict[str, np.ndarray]
    shape: str = ""
    inputs: frozenset[str] = frozenset()
    activation: str = "relu"
    blend: tuple[tuple[float, tuple[float, ...]], ...] = ((0.0, (1.0,)),)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def policy(self, model: PolicyShape, num_slots: int) -> Policy:
        """The policy for a model with so many slots per layer.

        Raises:
            ConfigError: as `check_model`.
        """
        self.check_model(model)
        if self.kind == "context":
            weight = self._head_weights(num_slots / model.num_experts)
            trained = TrainedContext(**self.arrays)
            return context_policy(round_context(trained, weight, self.model, self.inputs), self.inputs)
        networks = tuple(self._network(layer) for layer in range(len(self.arrays["kernel0"])))
        return paper_policy(networks) if self.kind == "paper" else shared_policy(networks[0], model.num_layers)

    def check_model(self, model: PolicyShape) -> None:
        """Raises ConfigError where it was trained for a model of another shape."""
        if self.kind != "shared" and self.model != model._replace(hidden_size=self.model.hidden_size):
            raise ConfigError(
                f"the {self.kind} policy is for {_described(self.model)}, the model has {_described(model)}; "
                "fit one to a trace of this model, or use --policy decayed"
            )
        if HIDDEN in self.inputs and self.model.hidden_size != model.hidden_size:
            raise ConfigError(
                f"the {self.kind} policy is for hidden states of {self.model.hidden_size}, the model's have "
                f"{model.hidden_size}; fit one to a trace of this model"
            )

    def _head_weights(self, share: float) -> np.ndarray:
        shares = [s for s, _ in self.blend]
        return np.array([np.interp(share, shares, column) for column in zip(*(w for _, w in self.blend), strict=True)])

    def _network(self, layer: int) -> tuple[IntegerLayer, ...]:
        places = range(sum(name.startswith("kernel") for name in self.arrays))
        return to_integers(
            [FloatLayer(self.arrays[f"kernel{i}"][layer], self.arrays[f"bias{i}"][layer]) for i in places],
            [float(self.arrays[f"peak{i}"][layer]) for i in places[:-1]],
            activation=self.activation,
            max_input=PAPER_MAX_INPUT if self.kind == "paper" else MAX_INPUT,
        )

    def check(self) -> None:
        """Raises ConfigError unless the arrays are those of this version's network."""
        if self.kind not in LEARNED:
            raise ConfigError(f"the kind {self.kind!r} is unknown; this version knows {', '.join(LEARNED)}")
        if self.kind == "context":
            TrainedContext(**self.arrays)
            given, wanted = self.arrays["first_kernel"].shape[2], len(seen_columns(self.model, self.inputs))
        else:
            given = self.arrays["kernel0"].shape[2]
            wanted = paper_width(self.shape, self.model) if self.kind == "paper" else SHARED_WIDTH
        if given != wanted:
            raise ConfigError(f"its network has {given} inputs and this version's {self.kind} has {wanted}")


def save_policy(folder: str | os.PathLike[str], saved: SavedPolicy) -> None:
    """Writes a policy folder; one of that name is replaced only when the new one is whole."""
    from flashmoe_jax.dense_store import save_dense

    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part"))
    try:
        arrays = {name: np.asarray(a, np.float32) for name, a in saved.arrays.items()}
        save_dense((part / _WEIGHTS).absolute(), arrays.items())
        # It names a folder of this machine, and a policy is made to be given away.
        (part / _WEIGHTS / "commit_success.txt").unlink(missing_ok=True)
        description = {
            "format_version": FORMAT_VERSION,
            "kind": saved.kind,
            "shape": saved.shape,
            "model": saved.model._asdict(),
            "inputs": sorted(saved.inputs),
            "activation": saved.activation,
            "blend": [[share, list(weights)] for share, weights in saved.blend],
            "weights": {name: list(a.shape) for name, a in arrays.items()},
            "digest": _digest(arrays),
            "trained": saved.meta,
        }
        (part / POLICY_JSON).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        part.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_saved(folder: Path) -> SavedPolicy:
    """Reads a policy folder.

    Raises:
        ConfigError: none, a newer one, or a damaged one.
    """
    from flashmoe_jax.dense_store import read_dense
    from flashmoe_jax.models.weights import WeightSpec

    try:
        text = json.loads((folder / POLICY_JSON).read_text(encoding="utf-8"))
        if text["format_version"] > FORMAT_VERSION:
            raise ConfigError(
                f"it is of policy format {text['format_version']} and this version reads up to {FORMAT_VERSION}; "
                "update flashmoe-jax"
            )
        specs = {name: WeightSpec(tuple(shape), "float32") for name, shape in text["weights"].items()}
        arrays = dict(read_dense((folder / _WEIGHTS).absolute(), specs))
        if _digest(arrays) != text["digest"]:
            raise ConfigError("the weights are not those that were saved")
        saved = SavedPolicy(
            kind=text["kind"],
            model=PolicyShape(**text["model"]),
            arrays=arrays,
            shape=text["shape"],
            inputs=frozenset(text["inputs"]),
            activation=text["activation"],
            blend=tuple((share, tuple(weights)) for share, weights in text["blend"]),
            meta=text["trained"],
        )
        saved.check()
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no policy ({POLICY_JSON} is missing); write one with fit --out") from None
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if type(error) is ConfigError:
            raise ConfigError(f"{folder}: {error}; fit it again") from None
        raise ConfigError(f"{folder} is not a whole policy ({error}); fit it again") from None
    return saved


def _digest(arrays: dict[str, np.ndarray]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        hashed.update(name.encode())
        hashed.update(np.ascontiguousarray(arrays[name], "<f4").tobytes())
    return hashed.hexdigest()


def _described(model: PolicyShape) -> str:
    return f"{model.num_layers} layers x {model.num_experts} experts, {model.top_k} per token"
