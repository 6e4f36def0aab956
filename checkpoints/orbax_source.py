"""An orbax checkpoint as a source of tensors.

Owns reading of the tree and the meaning of its names. Invariant: a tensor is in memory from its first read until all
of it was read, so that few are at once when they are read in the order announced by `begin`.

The tree is a nested dict, in one of two forms:

- Hugging Face names, as one flat dict or nested at any of their dots (`{"model": {"embed_tokens": {"weight": ...`);
- ours: `dense`, nested at the dots of the paths of `flashmoe_jax.models.weights`, and `experts`, either
  `experts.LAYER.EXPERT.FIELD` or, all experts of a layer in one array `[E, ...]`, `experts.LAYER.FIELD`, where LAYER
  counts the layers that have experts.

`config.json` stands in the checkpoint's directory or in its parent.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from checkpoints.sources import TensorInfo, fingerprint
from flashmoe_jax.config import ModelConfig
from flashmoe_jax.dense_store import flatten, quiet_orbax
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, FusedExpertsTarget, Target, hf_name_map
from flashmoe_jax.models.weights import dense_weight_specs, expert_field_specs

_GROUP_BYTES = 128 << 20  # loaded by one call


class OrbaxSource:
    """The arrays of an orbax checkpoint, by the dotted path of their names."""

    def __init__(self, directory: Path):
        self._directory = directory.absolute()
        try:
            with quiet_orbax():
                tree = ocp.metadata(self._directory).metadata
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).split("\n")[0][:200]
            raise CheckpointError(f"{directory} is not an orbax checkpoint ({reason})") from None
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{directory} holds a {type(tree).__name__}; a nested dict of arrays is needed")
        self._leaves = _paths(tree)
        self._tensors = {key: TensorInfo(str(leaf.dtype), tuple(leaf.shape)) for key, leaf in self._leaves.items()}
        self._tree = tree
        self._order: list[str] = []
        self._loaded: dict[str, np.ndarray] = {}
        self._unread: dict[str, int] = {}  # elements of loaded tensors

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def describe(self) -> dict[str, Any]:
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        return {"kind": "orbax", "fingerprint": fingerprint(files)}

    def begin(self, keys: Iterable[str]) -> None:
        self._order = list(dict.fromkeys(keys))
        self._loaded, self._unread = {}, {}

    def read_into(self, key: str, first: int, out: np.ndarray) -> None:
        if key not in self._loaded:
            self._load_from(key)
        out[...] = self._loaded[key].reshape(-1)[first : first + out.size].reshape(out.shape)
        # Every element is read once; an array of all experts stays until the last of them was.
        self._unread[key] -= out.size
        if self._unread[key] <= 0:
            del self._loaded[key]

    def close(self) -> None:
        self._loaded = {}

    def _load_from(self, key: str) -> None:
        """Loads an announced tensor and those announced after it, as far as a group reaches."""
        group: list[str] = []
        num_bytes = 0
        for following in self._order[self._order.index(key) :]:
            info = self._tensors[following]
            num_bytes += math.prod(info.shape) * np.dtype(info.dtype).itemsize
            if following in self._loaded or (group and num_bytes > _GROUP_BYTES):
                break
            group.append(following)
        abstract = _replace(self._tree, lambda key, leaf: _abstract(leaf) if key in group else ocp.PLACEHOLDER)
        try:
            with quiet_orbax():
                loaded = flatten(ocp.load(self._directory, abstract))
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).split("\n")[0][:200]
            raise CheckpointError(f"{self._directory} cannot be read ({reason})") from None
        self._loaded |= {name: loaded[name] for name in group}
        self._unread |= {name: loaded[name].size for name in group}


class OrbaxNames:
    """What a path in an orbax tree means, in either of the two forms."""

    def __init__(self, config: ModelConfig):
        self._hf = hf_name_map(config)
        self._dense = set(dense_weight_specs(config))
        fields = "|".join(name for name, _ in expert_field_specs(config))
        self._expert = re.compile(rf"experts\.(?P<layer>\d+)\.((?P<expert>\d+)\.)?(?P<field>{fields})")
        self._config = config

    def locate(self, key: str) -> Target:
        """As `NameMap.locate`, for both forms."""
        if key.startswith("dense.") and key.removeprefix("dense.") in self._dense:
            return DenseTarget(key.removeprefix("dense."))
        if match := self._expert.fullmatch(key):
            layer, expert = int(match["layer"]), match["expert"]
            if layer >= self._config.num_moe_layers or int(expert or 0) >= self._config.num_experts:
                raise CheckpointError(
                    f"{key} is beyond the {self._config.num_moe_layers} layers with {self._config.num_experts} experts "
                    "of config.json"
                )
            if expert is None:
                return FusedExpertsTarget(layer, (match["field"],))
            return ExpertTarget(layer, int(expert), match["field"])
        return self._hf.locate(key)


def config_path(directory: Path) -> Path:
    """Where the config.json of an orbax checkpoint is."""
    here = directory / "config.json"
    return here if here.is_file() else directory.absolute().parent / "config.json"


def _paths(tree: Mapping[str, Any]) -> dict[str, Any]:
    leaves = flatten(tree)
    odd = [key for key, leaf in leaves.items() if not hasattr(leaf, "shape")]
    if odd:
        raise CheckpointError(f"{odd[0]} in the orbax checkpoint is no array; only weights are converted")
    return leaves


def _replace(tree: Mapping[str, Any], make: Any, prefix: str = "") -> dict[str, Any]:
    return {
        name: _replace(value, make, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else make(f"{prefix}{name}", value)
        for name, value in tree.items()
    }


def _abstract(leaf: Any) -> np.ndarray:
    # A numpy array asks orbax for one; broadcast, it takes no memory itself.
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
