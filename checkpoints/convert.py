"""Converts a checkpoint to a model directory: `python -m checkpoints.convert --hf DIR --out DIR`.

Owns the order of the conversion and its memory: of the dense weights a group at a time, of the experts two. Invariant:
`--out` appears only when every byte in it is on the drive (`staging.py`); until then finished layers wait beside it,
so that a second run goes on where a killed one stopped.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from checkpoints.orbax_source import OrbaxNames, OrbaxSource, config_path
from checkpoints.plan import KEEP, ConversionPlan, Piece, empty_like_source, plan_conversion
from checkpoints.progress import Advance, ConsoleReporter, Reporter, SilentReporter, format_bytes
from checkpoints.sources import SafetensorsSource, TensorSource, read_json
from checkpoints.staging import announce_size, staged_directory
from flashmoe_jax.config import WEIGHT_DTYPES, ModelConfig
from flashmoe_jax.dense_store import list_files, save_dense
from flashmoe_jax.errors import CheckpointError, FlashMoEError
from flashmoe_jax.experts.record import checksum, numpy_dtype
from flashmoe_jax.experts.shard import ARRAY_NAME, ShardWriter, shard_bytes, shard_key, write_array_metadata, write_file
from flashmoe_jax.model_dir import DENSE_NAME, POLICY_NAME, TEXT_FILES, DenseLeaf, Manifest

# Manifest, array metadata, orbax metadata and tokenizer files, beside the weights.
_OVERHEAD_BYTES = 32 << 20
_DONE_NAME = ".done"  # folder in the staged directory: what is finished, one file per part


def convert(hf_dir: Path | str, out_dir: Path | str, dtype: str = KEEP, progress: Reporter | None = None) -> Path:
    """Converts a Hugging Face directory of a supported family.

    Args:
        hf_dir: config.json, safetensors, and tokenizer files if there are any.
        out_dir: the model directory to make; must not exist.
        dtype: `keep` the stored dtypes, or cast every weight to `bfloat16`, `float16` or `float32`.
        progress: where to report; silent if None.

    Returns:
        `out_dir`.

    Raises:
        CheckpointError: the source is incomplete or does not fit its config.json, or `out_dir` cannot be written.
        ConfigError: the model is not supported.
    """
    hf_dir = Path(hf_dir)
    hf_config = read_json(hf_dir / "config.json")
    config = ModelConfig.from_hf(hf_config)
    source = SafetensorsSource(hf_dir)
    try:
        plan = plan_conversion(config, source.tensors, dtype)
        _convert(source, plan, hf_config, hf_dir, Path(out_dir), progress or SilentReporter())
    finally:
        source.close()
    return Path(out_dir)


def convert_orbax(
    orbax_dir: Path | str, out_dir: Path | str, dtype: str = KEEP, progress: Reporter | None = None
) -> Path:
    """As `convert`, from an orbax checkpoint; `orbax_source.py` says what it may look like."""
    orbax_dir = Path(orbax_dir)
    config_file = config_path(orbax_dir)
    hf_config = read_json(config_file)
    config = ModelConfig.from_hf(hf_config)
    source = OrbaxSource(orbax_dir)
    try:
        plan = plan_conversion(config, source.tensors, dtype, OrbaxNames(config).locate)
        _convert(source, plan, hf_config, config_file.parent, Path(out_dir), progress or SilentReporter())
    finally:
        source.close()
    return Path(out_dir)


def _convert(
    source: TensorSource,
    plan: ConversionPlan,
    hf_config: Mapping[str, object],
    text_dir: Path,
    out: Path,
    reporter: Reporter,
) -> None:
    description = source.describe()
    num_experts = plan.config.num_experts
    shards_bytes = plan.config.num_moe_layers * shard_bytes(num_experts, plan.layout.record_bytes)
    announce_size(out, plan.dense_bytes + shards_bytes + _OVERHEAD_BYTES, reporter)
    if plan.ignored:
        reporter.say(f"leaving out {len(plan.ignored)} tensors that are no weights, as {plan.ignored[0]}")
    resume_key = json.dumps([description, plan.layout.to_json(), dict(plan.dense_dtypes)], sort_keys=True)
    with (
        staged_directory(out, resume_key=resume_key) as staging,
        reporter.bar("converting", plan.dense_bytes + plan.expert_bytes) as advance,
    ):
        done = _Done(staging / _DONE_NAME)
        dense = _write_dense(source, plan, staging, done, advance)
        checksums = tuple(
            tuple(_write_layer(source, plan, layer, staging, done, advance))
            for layer in range(plan.config.num_moe_layers)
        )
        write_array_metadata(staging / ARRAY_NAME, plan.config.num_moe_layers, num_experts, plan.layout, description)
        manifest = Manifest(
            config=plan.config,
            hf_config=hf_config,
            layout=plan.layout,
            checksums=checksums,
            dense=dense,
            dense_files=list_files(staging / DENSE_NAME),
            text_files=_copy_text_files(text_dir, staging),
            source=description,
            created_by=created_by(),
        )
        _copy_policies(text_dir, staging)
        done.clear()
        manifest.write(staging)


class _Done:
    """What a killed run had finished; a part is recorded after its bytes are on the drive."""

    def __init__(self, directory: Path):
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def get(self, part: str) -> list | dict | None:
        try:
            return json.loads((self._directory / f"{part}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, part: str, values: list | dict) -> None:
        write_file(self._directory / f"{part}.json", json.dumps(values).encode())

    def clear(self) -> None:
        shutil.rmtree(self._directory)


def _write_dense(
    source: TensorSource, plan: ConversionPlan, staging: Path, done: _Done, advance: Advance
) -> dict[str, DenseLeaf]:
    finished = done.get(DENSE_NAME)
    if isinstance(finished, dict):
        advance(plan.dense_bytes)
        return {path: DenseLeaf(tuple(shape), dtype, check) for path, (shape, dtype, check) in finished.items()}
    # Orbax writes beside the directory and renames, so leftovers of a killed run have another name.
    for leftover in staging.glob(f"{DENSE_NAME}*"):
        shutil.rmtree(leftover)
    keys = [piece.key for piece in plan.dense.values()]
    source.begin([*keys, *([plan.tied_copy] if plan.tied_copy else [])])
    if plan.tied_copy:
        _check_tied_copy(source, plan)
    leaves: dict[str, DenseLeaf] = {}

    def weights() -> Iterator[tuple[str, np.ndarray]]:
        for path, piece in plan.dense.items():
            weight = np.empty(piece.shape, numpy_dtype(plan.dense_dtypes[path]))
            _read(source, piece, weight)
            leaves[path] = DenseLeaf(piece.shape, plan.dense_dtypes[path], checksum(weight.reshape(-1).view(np.uint8)))
            yield path, weight
            advance(weight.nbytes)

    save_dense(staging.absolute() / DENSE_NAME, weights())
    source.begin([])
    _sync_tree(staging / DENSE_NAME)
    done.put(DENSE_NAME, {path: list(leaf) for path, leaf in leaves.items()})
    return leaves


def _check_tied_copy(source: TensorSource, plan: ConversionPlan) -> None:
    assert plan.tied_copy is not None
    embedding = plan.dense["embedder.embedding"]
    info = source.tensors[plan.tied_copy]
    copy = Piece(plan.tied_copy, 0, info.shape, info.dtype)
    contents = []
    for piece in (embedding, copy):
        array = empty_like_source(piece)
        source.read_into(piece.key, piece.first, array)
        contents.append((piece.dtype, checksum(array.reshape(-1).view(np.uint8))))
        del array
    if contents[0] != contents[1]:
        raise CheckpointError(
            f"config.json sets tie_word_embeddings, but {plan.tied_copy} differs from {embedding.key}; "
            "set it to false to use both"
        )


def _write_layer(
    source: TensorSource, plan: ConversionPlan, layer: int, staging: Path, done: _Done, advance: Advance
) -> list[str]:
    """Writes the shard of one layer and returns its checksums by expert."""
    experts = plan.experts[layer]
    finished = done.get(f"layer-{layer}")
    if isinstance(finished, list):
        advance(len(experts) * plan.layout.record_bytes)
        return finished
    source.begin([fields[field.name].key for fields in experts for field in plan.layout.fields])
    checksums = []
    # Two records: one is read while the other is written.
    records = np.zeros((2, plan.layout.record_words), plan.layout.word_dtype)
    path = staging / ARRAY_NAME / shard_key(layer)
    with (
        ThreadPoolExecutor(1) as reader,
        ShardWriter(path, len(experts), plan.layout.record_bytes) as writer,
    ):
        coming = reader.submit(_read_record, source, plan, experts[0], records[0])
        for expert in range(len(experts)):
            coming.result()
            words = records[expert % 2]
            if expert + 1 < len(experts):
                following = records[(expert + 1) % 2]
                coming = reader.submit(_read_record, source, plan, experts[expert + 1], following)
            writer.append(expert, words)
            checksums.append(checksum(words))
            advance(words.nbytes)
    done.put(f"layer-{layer}", checksums)
    return checksums


def _read_record(source: TensorSource, plan: ConversionPlan, fields: Mapping[str, Piece], words: np.ndarray) -> None:
    for name, view in plan.layout.unpack(words).items():
        _read(source, fields[name], view)


def _read(source: TensorSource, piece: Piece, out: np.ndarray) -> None:
    """Reads a piece and casts it where `out` has another dtype (to the nearest, ties to even)."""
    if numpy_dtype(piece.dtype) == out.dtype:
        source.read_into(piece.key, piece.first, out)
        return
    stored = empty_like_source(piece)
    source.read_into(piece.key, piece.first, stored)
    out[...] = stored.astype(out.dtype)


def _copy_text_files(directory: Path, staging: Path) -> tuple[str, ...]:
    names = tuple(name for name in TEXT_FILES if (directory / name).is_file())
    for name in names:
        write_file(staging / name, (directory / name).read_bytes())
    return names


def _copy_policies(directory: Path, staging: Path) -> None:
    """Trained policies that a source brings along in `policy/`; they are no part of what the manifest promises."""
    if not (directory / POLICY_NAME).is_dir():
        return
    for path in sorted((directory / POLICY_NAME).rglob("*")):
        target = staging / path.relative_to(directory)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, path.read_bytes())


def _sync_tree(directory: Path) -> None:
    """Waits until every file of a directory is on the drive."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def created_by() -> str:
    """Name and version of this program, for the manifest."""
    try:
        return f"flashmoe_jax {importlib.metadata.version('flashmoe-jax')}"
    except importlib.metadata.PackageNotFoundError:
        return "flashmoe_jax, not installed"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoints.convert",
        description="Convert a checkpoint to a model directory: orbax dense weights, expert store, manifest.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face directory: config.json and safetensors")
    source.add_argument("--orbax", type=Path, metavar="DIR", help="orbax checkpoint with a config.json in or beside it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="model directory to make")
    parser.add_argument("--dtype", choices=(KEEP, *WEIGHT_DTYPES), default=KEEP, help="dtype of the converted weights")
    return parser


def main(argv: Iterable[str] | None = None) -> int:
    args = build_parser().parse_args(None if argv is None else list(argv))
    reporter = ConsoleReporter()
    try:
        if args.hf is not None:
            out = convert(args.hf, args.out, args.dtype, reporter)
        else:
            out = convert_orbax(args.orbax, args.out, args.dtype, reporter)
        manifest = Manifest.read(out)
    except FlashMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    print(
        f"{out}: {manifest.config.family}, {manifest.config.num_moe_layers} x {manifest.config.num_experts} experts "
        f"of {format_bytes(manifest.layout.record_bytes)}, dense {format_bytes(manifest.dense_bytes)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
