"""The directory of a converted model: its manifest, and the way to its dense weights and its expert store.

Owns the names of the files within and the manifest's form; the bytes belong to `dense_store.py` and
`experts/store.py`. Invariant: the directory was renamed into place after everything in it was written, so one that
has a manifest is whole, and the manifest describes every byte of weights in it, checksums included.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.dense_store import Shardings, StoredFile, find_damage, load_dense
from flashmoe_jax.errors import CheckpointError, ConfigError
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.experts.shard import ARRAY_NAME, write_file
from flashmoe_jax.experts.store import ExpertStore
from flashmoe_jax.models.weights import WeightSpec, dense_weight_specs
from flashmoe_jax.plain_arrays import find_plain, read_plain

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
DENSE_NAME = "dense"
POLICY_NAME = "policy"  # eviction policies trained for this model, if any
# Everything that turns text into ids and back; copied as it is when present.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


class DenseLeaf(NamedTuple):
    """One dense weight as it is stored."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str  # xxh3-64 of its bytes in row order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` says."""

    config: ModelConfig
    hf_config: Mapping[str, Any]  # config.json as it was
    layout: RecordLayout
    checksums: tuple[tuple[str, ...], ...]  # [MoE layer][expert], of whole padded records
    dense: Mapping[str, DenseLeaf]  # by dotted path
    dense_files: Mapping[str, StoredFile]  # by name within the folder of dense weights
    text_files: tuple[str, ...]
    source: Mapping[str, Any]  # fingerprint and kind of what was converted
    created_by: str

    @property
    def expert_bytes(self) -> int:
        """Bytes of all records, padding included."""
        return self.config.num_moe_layers * self.config.num_experts * self.layout.record_bytes

    @property
    def dense_bytes(self) -> int:
        return sum(jax.numpy.dtype(leaf.dtype).itemsize * _size(leaf.shape) for leaf in self.dense.values())

    def write(self, directory: Path) -> None:
        values = {
            "format_version": FORMAT_VERSION,
            "created_by": self.created_by,
            "source": dict(self.source),
            "config": self.config.to_dict(),
            "hf_config": dict(self.hf_config),
            "text_files": list(self.text_files),
            "dense": {
                "total_bytes": self.dense_bytes,
                "leaves": {path: leaf._asdict() for path, leaf in self.dense.items()},
                "files": self.dense_files,
            },
            "experts": {
                "total_bytes": self.expert_bytes,
                "layout": self.layout.to_json(),
                "checksums": self.checksums,
            },
        }
        write_file(directory / MANIFEST_NAME, json.dumps(values, indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Reads and checks a manifest.

        Raises:
            CheckpointError: no model directory, a newer format, or a damaged manifest.
        """
        path = directory / MANIFEST_NAME
        try:
            values = json.loads(path.read_bytes())
            version = values["format_version"]
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{directory} is not a model directory ({MANIFEST_NAME} is missing); "
                "make one with: python -m checkpoints.convert --hf DIR --out DIR"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path} is damaged; convert the model again") from None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{directory} has format {version}, made by {values.get('created_by', 'an unknown version')}; "
                f"this version reads format {FORMAT_VERSION}: install a newer flashmoe_jax, or convert the model again"
                if isinstance(version, int) and version > FORMAT_VERSION
                else f"{directory} has format {version}; this version reads format {FORMAT_VERSION}: "
                "convert the model again"
            )
        try:
            manifest = cls._from_values(values)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointError | ConfigError):
                raise
            raise CheckpointError(f"{path} is damaged ({error!r}); convert the model again") from None
        manifest._check(path)
        return manifest

    @classmethod
    def _from_values(cls, values: Mapping[str, Any]) -> "Manifest":
        return cls(
            config=ModelConfig.from_dict(values["config"]),
            hf_config=values["hf_config"],
            layout=RecordLayout.from_json(values["experts"]["layout"]),
            checksums=tuple(tuple(layer) for layer in values["experts"]["checksums"]),
            dense={
                path: DenseLeaf(tuple(leaf["shape"]), leaf["dtype"], leaf["checksum"])
                for path, leaf in values["dense"]["leaves"].items()
            },
            dense_files={name: StoredFile(*file) for name, file in values["dense"]["files"].items()},
            text_files=tuple(values["text_files"]),
            source=values["source"],
            created_by=values["created_by"],
        )

    def _check(self, path: Path) -> None:
        shapes = {name: spec.shape for name, spec in dense_weight_specs(self.config).items()}
        rows = [len(layer) for layer in self.checksums]
        if {name: leaf.shape for name, leaf in self.dense.items()} != shapes or rows != [
            self.config.num_experts
        ] * self.config.num_moe_layers:
            raise CheckpointError(f"{path} contradicts itself: weights and config differ; convert the model again")


class ModelDirectory:
    """A converted model, open for reading; holds no weights."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "ModelDirectory":
        """Reads the manifest only.

        Raises:
            CheckpointError: no model directory, a newer format, or a damaged manifest.
        """
        directory = Path(path)
        return cls(directory, Manifest.read(directory))

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def layout(self) -> RecordLayout:
        return self.manifest.layout

    @property
    def dense_specs(self) -> dict[str, WeightSpec]:
        """Shape and stored dtype of every dense weight; the dtype may differ from weight to weight."""
        return {path: WeightSpec(leaf.shape, leaf.dtype) for path, leaf in self.manifest.dense.items()}

    @property
    def array_path(self) -> Path:
        return self.path / ARRAY_NAME

    def store(self, **options: Any) -> ExpertStore:
        """Opens the expert store: metadata and shard indexes, no expert. Options as for `ExpertStore.open`."""
        return ExpertStore.open(self.path, self.layout, self.manifest.checksums, **options)

    def load_dense(self, sharding: Shardings | None = None) -> dict[str, jax.Array]:
        """Reads the dense weights straight to the device, by dotted path.

        To one device as plain files (`plain_arrays.py`) where they are such, else through orbax (`dense_store.py`).

        Raises:
            CheckpointError: a file is missing or cut short, or cannot be read.
        """
        damage = next(find_damage(self.path / DENSE_NAME, self.manifest.dense_files), None)
        if damage is not None:
            raise CheckpointError(f"{damage}; convert the model again")
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            arrays = find_plain(self.path / DENSE_NAME, self.dense_specs)
            if arrays is not None:
                (device,) = sharding.device_set
                checksums = {path: leaf.checksum for path, leaf in self.manifest.dense.items()}
                try:
                    return read_plain(arrays, checksums, device)
                except (ValueError, OSError) as error:
                    raise CheckpointError(f"{error}; convert the model again") from None
        return load_dense(self.path / DENSE_NAME, self.dense_specs, sharding)


def is_model_directory(path: Path) -> bool:
    """Whether `path` holds a manifest."""
    return (path / MANIFEST_NAME).is_file()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
