"""Writes a model directory back as a Hugging Face checkpoint: `python -m checkpoints.export DIR --out HF_DIR`.

Tensors have the names of the family's published checkpoints (fused experts are written one by one) and the bits that
are stored, so a checkpoint converted with `--dtype keep` comes back identical. Invariant: every byte was checked
against the manifest on its way, and `--out` appears only when it is whole.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.progress import Advance, ConsoleReporter, Reporter, SilentReporter
from checkpoints.safetensors_writer import DEFAULT_SHARD_BYTES, NamedInfo, tensor_bytes, write_checkpoint
from checkpoints.sources import TensorInfo
from checkpoints.staging import announce_size, staged_directory
from flashmoe_jax.dense_store import find_damage, read_dense
from flashmoe_jax.engine.budget import parse_size
from flashmoe_jax.errors import CheckpointError, DamagedRecordError, FlashMoEError
from flashmoe_jax.experts.record import checksum
from flashmoe_jax.experts.shard import write_file
from flashmoe_jax.model_dir import DENSE_NAME, Manifest, ModelDirectory
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, hf_name_map

_OVERHEAD_BYTES = 16 << 20


def export(
    model_dir: Path | str,
    out_dir: Path | str,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Reporter | None = None,
) -> Path:
    """Writes safetensors, config.json and the tokenizer files to a new directory.

    Raises:
        CheckpointError: the model directory is missing or damaged, or `out_dir` exists or cannot be written.
    """
    model, out, reporter = ModelDirectory.open(model_dir), Path(out_dir), progress or SilentReporter()
    tensors = _tensors(model)
    total_bytes = sum(tensor_bytes(info) for _, info in tensors)
    announce_size(out, total_bytes + _OVERHEAD_BYTES, reporter)
    with staged_directory(out, resume_key=None) as staging, reporter.bar("exporting", total_bytes) as advance:
        write_checkpoint(staging, tensors, _values(model, advance), shard_bytes)
        for name in model.manifest.text_files:
            write_file(staging / name, _read_text_file(model.path / name))
        write_file(staging / "config.json", json.dumps(exported_config(model.manifest), indent=2).encode())
    return out


def exported_config(manifest: Manifest) -> dict[str, Any]:
    """config.json as it was; its dtype follows where the weights were cast."""
    values = dict(manifest.hf_config)
    spelling = "torch_dtype" if values.get("torch_dtype") is not None else "dtype"
    stated = str(values.get(spelling) or "bfloat16").removeprefix("torch.")
    if stated != manifest.config.weight_dtype:
        values |= {name: manifest.config.weight_dtype for name in ("dtype", "torch_dtype") if values.get(name)}
        values[spelling] = manifest.config.weight_dtype
    return values


def _tensors(model: ModelDirectory) -> list[NamedInfo]:
    names = hf_name_map(model.config)
    dense = [
        (names.hf_key(DenseTarget(path)), TensorInfo(spec.dtype, spec.shape))
        for path, spec in model.dense_specs.items()
    ]
    experts = [
        (names.hf_key(ExpertTarget(layer, expert, field.name)), TensorInfo(field.dtype, field.shape))
        for layer in range(model.config.num_moe_layers)
        for expert in range(model.config.num_experts)
        for field in model.layout.fields
    ]
    return dense + experts


def _values(model: ModelDirectory, advance: Advance) -> Iterator[np.ndarray]:
    """The tensors of `_tensors`, in its order."""
    for damage in find_damage(model.path / DENSE_NAME, model.manifest.dense_files):
        raise DamagedRecordError(f"{damage}; convert the model again")
    leaves = model.manifest.dense
    for path, weight in read_dense(model.path / DENSE_NAME, model.dense_specs):
        if checksum(weight.reshape(-1).view(np.uint8)) != leaves[path].checksum:
            raise DamagedRecordError(f"the dense weight {path} is damaged; convert the model again")
        yield weight
        advance(weight.nbytes)
    layout, num_experts = model.layout, model.config.num_experts
    # Two records: one is read while the other is written.
    records = np.empty((2, layout.record_words), layout.word_dtype)
    with model.store() as store:
        ids = [(layer, expert) for layer in range(model.config.num_moe_layers) for expert in range(num_experts)]
        coming = store.read_into(*ids[0], records[0])
        for i in range(len(ids)):
            coming.result()
            if i + 1 < len(ids):
                coming = store.read_into(*ids[i + 1], records[(i + 1) % 2])
            for field in layout.unpack(records[i % 2]).values():
                yield field
                advance(field.nbytes)


def _read_text_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; convert the model again") from None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoints.export",
        description="Write a model directory back as a Hugging Face checkpoint, bit for bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model_dir", type=Path, metavar="DIR", help="model directory made by checkpoints.convert")
    parser.add_argument("--out", type=Path, required=True, metavar="HF_DIR", help="directory to make")
    parser.add_argument("--shard-size", default="4GB", metavar="SIZE", help="most bytes of one safetensors file")
    return parser


def main(argv: Iterable[str] | None = None) -> int:
    args = build_parser().parse_args(None if argv is None else list(argv))
    try:
        out = export(args.model_dir, args.out, shard_bytes=parse_size(args.shard_size), progress=ConsoleReporter())
    except FlashMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{out}: {len(list(out.glob('*.safetensors')))} safetensors files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
