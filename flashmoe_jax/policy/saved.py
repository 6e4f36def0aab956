"""A trained policy on disk: `policy.json`, and the float32 weights of its network as an orbax checkpoint.

Owns the folder's form and what is refused about it; the rounding to whole numbers happens at load (`network.py`), for
the number of slots at hand. Invariant: a folder that exists is whole, and the same folder gives the same keep values
everywhere.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.policy.history import MAX_INPUT
from flashmoe_jax.policy.learned import LEARNED, PAPER_MAX_INPUT, input_width, learned_policy
from flashmoe_jax.policy.network import FloatLayer, to_integers

FORMAT_VERSION = 1
POLICY_JSON = "policy.json"
_WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """A trained network and what must be known to use it.

    Attributes:
        kind: one of `learned.LEARNED`.
        shape: "layer" or "expert", see `learned.py`.
        model: sizes that it was trained for; `shared` fits every model and keeps those for information.
        inputs: what it needs beside ids.
        activation: "relu" or "silu".
        layers: per affine layer, first to last, kernel `[L, N, F]` and bias `[L, N]`; L = 1 for `shared`. The last
            layer's are `[L, M, N, F]` and `[L, M, N]`: M heads.
        peaks: `[L]` per layer but the last, see `network.to_integers`.
        blend: how the heads are mixed: shares of the experts that have a slot, ascending, and each one's weights `[M]`;
            between two shares the weights are interpolated.
        meta: what it was trained on and how; JSON.
    """

    kind: str
    shape: str
    model: PolicyShape
    inputs: frozenset[str]
    activation: str
    layers: tuple[FloatLayer, ...]
    peaks: tuple[np.ndarray, ...]
    blend: tuple[tuple[float, tuple[float, ...]], ...] = ((0.0, (1.0,)),)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def policy(self, model: PolicyShape, num_slots: int) -> Policy:
        """The policy for a model with so many slots per layer.

        Raises:
            ConfigError: it was trained for a model of another shape.
        """
        if self.kind != "shared" and self.model != model._replace(hidden_size=self.model.hidden_size):
            raise ConfigError(
                f"the {self.kind} policy is for {_described(self.model)}, the model has {_described(model)}; "
                "fit one to a trace of this model, or use --policy decayed"
            )
        if self.inputs and self.model.hidden_size not in (0, model.hidden_size):
            raise ConfigError(
                f"the {self.kind} policy is for hidden states of {self.model.hidden_size}, the model's have "
                f"{model.hidden_size}; fit one to a trace of this model"
            )
        weight = self._head_weights(num_slots / model.num_experts)
        num_networks = len(self.layers[0].kernel)
        networks = [self._network(layer, weight) for layer in range(num_networks)]
        params = tuple(networks * model.num_layers if num_networks == 1 else networks)
        return learned_policy(self.kind, self.inputs, params)

    def _head_weights(self, share: float) -> np.ndarray:
        shares = [s for s, _ in self.blend]
        return np.array([np.interp(share, shares, column) for column in zip(*(w for _, w in self.blend), strict=True)])

    def _network(self, layer: int, head_weight: np.ndarray) -> Any:
        floats = [FloatLayer(a.kernel[layer], a.bias[layer]) for a in self.layers[:-1]]
        last = self.layers[-1]
        mixed = FloatLayer(
            np.tensordot(head_weight, last.kernel[layer], 1), np.tensordot(head_weight, last.bias[layer], 1)
        )
        return to_integers(
            [*floats, mixed],
            [float(peak[layer]) for peak in self.peaks],
            activation=self.activation,
            max_input=PAPER_MAX_INPUT if self.kind == "paper" else MAX_INPUT,
        )


def save_policy(folder: str | os.PathLike[str], saved: SavedPolicy) -> None:
    """Writes a policy folder; one of that name is replaced only when the new one is whole."""
    from flashmoe_jax.dense_store import save_dense

    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part"))
    try:
        arrays = _arrays(saved)
        save_dense((part / _WEIGHTS).absolute(), arrays.items())
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


@functools.lru_cache(maxsize=16)
def load_saved(folder: Path) -> SavedPolicy:
    """Reads a policy folder.

    Raises:
        ConfigError: none, a newer one, or a damaged one.
    """
    from flashmoe_jax.dense_store import read_dense
    from flashmoe_jax.errors import CheckpointError
    from flashmoe_jax.models.weights import WeightSpec

    try:
        text = json.loads((folder / POLICY_JSON).read_text(encoding="utf-8"))
        if text["format_version"] > FORMAT_VERSION:
            raise ConfigError(
                f"{folder} is of policy format {text['format_version']} and this version reads up to {FORMAT_VERSION}; "
                "update flashmoe-jax or fit the policy again"
            )
        specs = {name: WeightSpec(tuple(shape), "float32") for name, shape in text["weights"].items()}
        arrays = dict(read_dense((folder / _WEIGHTS).absolute(), specs))
        if _digest(arrays) != text["digest"]:
            raise ConfigError(f"{folder}: the weights are not those that were saved; fit the policy again")
        saved = _from_arrays(text, arrays)
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no policy ({POLICY_JSON} is missing); write one with fit --out") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, CheckpointError) as error:
        raise ConfigError(f"{folder} is not a whole policy ({error}); fit it again") from None
    if saved.kind not in LEARNED:
        raise ConfigError(f"{folder} is of the unknown kind {saved.kind!r}; this version knows {', '.join(LEARNED)}")
    width = input_width(saved.kind, saved.shape, saved.model, saved.inputs)
    if saved.layers[0].kernel.shape[-1] != width:
        raise ConfigError(
            f"{folder} has a network of {saved.layers[0].kernel.shape[-1]} inputs and this version's {saved.kind} has "
            f"{width}; fit it again"
        )
    return saved


def _arrays(saved: SavedPolicy) -> dict[str, np.ndarray]:
    arrays = {}
    for place, layer in enumerate(saved.layers):
        arrays[f"layer{place}.kernel"] = np.asarray(layer.kernel, np.float32)
        arrays[f"layer{place}.bias"] = np.asarray(layer.bias, np.float32)
    for place, peak in enumerate(saved.peaks):
        arrays[f"layer{place}.peak"] = np.asarray(peak, np.float32)
    return arrays


def _from_arrays(text: dict[str, Any], arrays: dict[str, np.ndarray]) -> SavedPolicy:
    num_layers = sum(name.endswith(".kernel") for name in arrays)
    return SavedPolicy(
        kind=text["kind"],
        shape=text["shape"],
        model=PolicyShape(**text["model"]),
        inputs=frozenset(text["inputs"]),
        activation=text["activation"],
        layers=tuple(FloatLayer(arrays[f"layer{i}.kernel"], arrays[f"layer{i}.bias"]) for i in range(num_layers)),
        peaks=tuple(arrays[f"layer{i}.peak"] for i in range(num_layers - 1)),
        blend=tuple((share, tuple(weights)) for share, weights in text["blend"]),
        meta=text["trained"],
    )


def _digest(arrays: dict[str, np.ndarray]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        hashed.update(name.encode())
        hashed.update(np.ascontiguousarray(arrays[name], "<f4").tobytes())
    return hashed.hexdigest()


def _described(model: PolicyShape) -> str:
    return f"{model.num_layers} layers x {model.num_experts} experts, {model.top_k} per token"
