"""What goes where: every tensor of a checkpoint matched with a dense weight or with a field of an expert.

Owns the checks that need no bytes: unknown, missing, duplicate and wrong-shaped tensors, and dtypes. Invariant: a
plan that exists covers every weight of the config exactly once.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from checkpoints.sources import TensorInfo
from flashmoe_jax.config import WEIGHT_DTYPES, ModelConfig
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.experts.record import RecordLayout, numpy_dtype
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, FusedExpertsTarget, Target, hf_name_map
from flashmoe_jax.models.weights import dense_weight_specs, expert_field_specs

KEEP = "keep"
# Buffers that some writers save among the weights; they follow from config.json.
_NOT_WEIGHTS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


class Piece(NamedTuple):
    """A run of elements of one source tensor, `[first, first + prod(shape))` in row order."""

    key: str
    first: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """Source of every weight, and what it is stored as."""

    config: ModelConfig  # its weight_dtype is that of the stored experts
    layout: RecordLayout
    dense: Mapping[str, Piece]  # by path
    dense_dtypes: Mapping[str, str]
    experts: list[list[dict[str, Piece]]]  # [moe layer][expert][field]
    tied_copy: str | None  # a second tensor that must equal the embedding
    ignored: list[str]

    @property
    def dense_bytes(self) -> int:
        return sum(
            math.prod(piece.shape) * numpy_dtype(self.dense_dtypes[path]).itemsize for path, piece in self.dense.items()
        )

    @property
    def expert_bytes(self) -> int:
        return sum(len(layer) for layer in self.experts) * self.layout.record_bytes


def plan_conversion(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    dtype: str = KEEP,
    locate: Callable[[str], Target] | None = None,
) -> ConversionPlan:
    """Matches tensors with weights.

    Args:
        config: from config.json.
        tensors: everything the source holds.
        dtype: `keep`, or what floating-point weights are cast to.
        locate: what a name means; by default the names of the family's Hugging Face checkpoints.

    Raises:
        CheckpointError: an unknown, missing, duplicate or wrong-shaped tensor, or a dtype that cannot be stored.
    """
    if dtype not in (KEEP, *WEIGHT_DTYPES):
        raise CheckpointError(f"--dtype is {dtype}; allowed: {', '.join((KEEP, *WEIGHT_DTYPES))}")
    names = hf_name_map(config)
    builder = _Builder(config)
    ignored = [key for key in tensors if _NOT_WEIGHTS.fullmatch(key)]
    for key in sorted(set(tensors) - set(ignored)):
        builder.add(key, tensors[key], (locate or names.locate)(key))
    builder.refuse_missing()
    pieces = [piece for layer in builder.experts for fields in layer for piece in fields.values()]
    expert_dtype = _expert_dtype(pieces, dtype)
    dense_dtypes = {path: _stored_dtype(piece, dtype) for path, piece in builder.dense.items()}
    return ConversionPlan(
        config=dataclasses.replace(config, weight_dtype=expert_dtype),
        layout=RecordLayout.for_experts(expert_field_specs(config), expert_dtype),
        dense=builder.dense,
        dense_dtypes=dense_dtypes,
        experts=builder.experts,
        tied_copy=builder.tied_copy,
        ignored=ignored,
    )


class _Builder:
    """Places pieces one by one and refuses what does not fit."""

    def __init__(self, config: ModelConfig):
        self._names = hf_name_map(config)
        self._dense_shapes = {path: spec.shape for path, spec in dense_weight_specs(config).items()}
        self._field_shapes = dict(expert_field_specs(config))
        self._num_experts = config.num_experts
        self._found: dict[str, Piece] = {}
        self.experts: list[list[dict[str, Piece]]] = [
            [{} for _ in range(config.num_experts)] for _ in range(config.num_moe_layers)
        ]
        self.tied_copy: str | None = None

    @property
    def dense(self) -> dict[str, Piece]:
        return {path: self._found[path] for path in self._dense_shapes}

    def add(self, key: str, info: TensorInfo, target: Target) -> None:
        if isinstance(target, DenseTarget):
            self._add_dense(key, info, target.path)
        elif isinstance(target, ExpertTarget):
            shape = self._field_shapes[target.field]
            _check_shape(key, f"layer {target.moe_layer} expert {target.expert} {target.field}", info.shape, shape)
            self._add_expert(target, Piece(key, 0, shape, info.dtype))
        else:
            self._add_fused(key, info, target)

    def refuse_missing(self) -> None:
        missing = [
            f"{self._names.hf_key(DenseTarget(path))} ({path}) {list(shape)}"
            for path, shape in self._dense_shapes.items()
            if path not in self._found
        ]
        for layer, experts in enumerate(self.experts):
            for expert, fields in enumerate(experts):
                missing += [
                    f"{self._names.hf_key(ExpertTarget(layer, expert, field))} {list(shape)}"
                    for field, shape in self._field_shapes.items()
                    if field not in fields
                ]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"the checkpoint lacks {', '.join(missing[:3])}{more}; "
                "check that it is complete and that config.json belongs to it"
            )

    def _add_dense(self, key: str, info: TensorInfo, path: str) -> None:
        _check_shape(key, path, info.shape, self._dense_shapes[path])
        piece = Piece(key, 0, info.shape, info.dtype)
        other = self._found.get(path)
        if other is None:
            self._found[path] = piece
            return
        # With tied embeddings some writers save the head as well; the bytes are compared on conversion.
        if path == "embedder.embedding" and "lm_head.weight" in (key, other.key):
            self.tied_copy = "lm_head.weight"
            if key != "lm_head.weight":
                self._found[path] = piece
            return
        raise CheckpointError(
            f"{other.key} {list(other.shape)} and {key} {list(info.shape)} are both {path}; keep one of them"
        )

    def _add_expert(self, target: ExpertTarget, piece: Piece) -> None:
        fields = self.experts[target.moe_layer][target.expert]
        if target.field in fields:
            other = fields[target.field]
            raise CheckpointError(
                f"{other.key} {list(other.shape)} and {piece.key} {list(piece.shape)} both hold {target.field} of "
                f"layer {target.moe_layer} expert {target.expert}; keep one of them"
            )
        fields[target.field] = piece

    def _add_fused(self, key: str, info: TensorInfo, target: FusedExpertsTarget) -> None:
        shapes = [self._field_shapes[field] for field in target.fields]
        whole = (self._num_experts, sum(shape[0] for shape in shapes), shapes[0][1])
        _check_shape(key, f"layer {target.moe_layer} {'+'.join(target.fields)} of all experts", info.shape, whole)
        first = 0
        for expert in range(self._num_experts):
            for field, shape in zip(target.fields, shapes, strict=True):
                self._add_expert(
                    ExpertTarget(target.moe_layer, expert, field), Piece(key, first, tuple(shape), info.dtype)
                )
                first += math.prod(shape)


def _check_shape(key: str, what: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(given) != tuple(wanted):
        raise CheckpointError(f"{key} is {list(given)}; by config.json {what} is {list(wanted)}")


def _expert_dtype(pieces: Iterable[Piece], dtype: str) -> str:
    first_key: dict[str, str] = {}
    for piece in pieces:
        first_key.setdefault(_stored_dtype(piece, dtype), piece.key)
    if len(first_key) > 1:
        examples = ", ".join(f"{key} is {name}" for name, key in first_key.items())
        raise CheckpointError(
            f"experts are stored in several dtypes ({examples}); convert with --dtype bfloat16 or float32"
        )
    return next(iter(first_key))


def _stored_dtype(piece: Piece, dtype: str) -> str:
    if piece.dtype not in (*WEIGHT_DTYPES, "float64"):
        raise CheckpointError(
            f"{piece.key} is {piece.dtype}; weights must be {', '.join(WEIGHT_DTYPES)}: use the unquantised checkpoint"
        )
    if dtype == KEEP and piece.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{piece.key} is {piece.dtype}; convert with --dtype bfloat16 or float32")
    return piece.dtype if dtype == KEEP else dtype


def empty_like_source(piece: Piece) -> np.ndarray:
    """Uninitialised memory for a piece in its stored dtype."""
    return np.empty(piece.shape, numpy_dtype(piece.dtype))
