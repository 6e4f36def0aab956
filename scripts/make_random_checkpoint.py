"""Writes a random Hugging Face checkpoint of any real size, for tests of size and speed.

    python scripts/make_random_checkpoint.py --config config.json --out DIR --seed N

Weights are normal with the config's `initializer_range`, norms are 1, token embeddings are 64 times larger: otherwise
all tokens look alike to the routers. Values come from a table of 65,536 normal quantiles indexed by 16 random bits,
which is as fine as bfloat16 and four times as fast as drawing normals; the bits of a tensor depend on the seed and
its name only. Only one tensor is in memory.

At the end it prints the consecutive-token expert overlap: the mean share of a token's experts that its predecessor
chose too. It is measured by the real forward pass of the first layers (`models.reference`) over random tokens.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import xxhash

from checkpoints.plan import ConversionPlan, Piece, plan_conversion
from checkpoints.progress import Advance, ConsoleReporter, Reporter
from checkpoints.safetensors_writer import DEFAULT_SHARD_BYTES, NamedInfo, tensor_bytes, write_checkpoint
from checkpoints.sources import SafetensorsSource, TensorInfo, read_json
from checkpoints.staging import announce_size, staged_directory
from flashmoe_jax.config import ModelConfig
from flashmoe_jax.engine.budget import parse_size
from flashmoe_jax.errors import FlashMoEError
from flashmoe_jax.experts.record import numpy_dtype
from flashmoe_jax.experts.shard import write_file
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, hf_name_map
from flashmoe_jax.models.reference import reference_forward
from flashmoe_jax.models.weights import dense_weight_specs, expert_field_specs

EMBEDDING_SCALE = 64
_BLOCK_VALUES = 4 << 20  # drawn at a time
_OVERHEAD_BYTES = 16 << 20


def make_random_checkpoint(
    hf_config: Mapping[str, Any], out: Path, seed: int, shard_bytes: int, reporter: Reporter
) -> None:
    """Writes config.json and safetensors to a new directory."""
    config = ModelConfig.from_hf(hf_config)
    tensors = list_tensors(config)
    total_bytes = sum(tensor_bytes(info) for _, info in tensors)
    announce_size(out, total_bytes + _OVERHEAD_BYTES, reporter)
    scale = float(hf_config.get("initializer_range") or 0.02)
    written = dict(hf_config)
    if not (written.get("dtype") or written.get("torch_dtype")):
        written["dtype"] = config.weight_dtype
    with staged_directory(out, resume_key=None) as staging, reporter.bar("writing", total_bytes) as advance:
        values = _values(config, tensors, seed, scale, advance)
        write_checkpoint(staging, tensors, values, shard_bytes)
        write_file(staging / "config.json", json.dumps(written, indent=2).encode())


def list_tensors(config: ModelConfig) -> list[NamedInfo]:
    """Every tensor of a complete checkpoint of this config, dense weights first."""
    names = hf_name_map(config)
    dense = [
        (names.hf_key(DenseTarget(path)), TensorInfo(spec.dtype, spec.shape))
        for path, spec in dense_weight_specs(config).items()
    ]
    experts = [
        (names.hf_key(ExpertTarget(layer, expert, field)), TensorInfo(config.weight_dtype, shape))
        for layer in range(config.num_moe_layers)
        for expert in range(config.num_experts)
        for field, shape in expert_field_specs(config)
    ]
    return dense + experts


def _values(
    config: ModelConfig, tensors: Sequence[NamedInfo], seed: int, scale: float, advance: Advance
) -> Iterator[np.ndarray]:
    names = hf_name_map(config)
    quantiles = _normal_quantiles()
    tables: dict[tuple[str, float], np.ndarray] = {}
    for key, info in tensors:
        target = names.locate(key)
        path = target.path if isinstance(target, DenseTarget) else ""
        dtype = numpy_dtype(info.dtype)
        if path.endswith(".scale"):
            yield np.ones(info.shape, dtype)
        else:
            factor = scale * (EMBEDDING_SCALE if path == "embedder.embedding" else 1)
            table = tables.setdefault((info.dtype, factor), (quantiles * factor).astype(dtype))
            yield _draw(key, info.shape, seed, table)
        advance(tensor_bytes(info))


def _draw(key: str, shape: tuple[int, ...], seed: int, table: np.ndarray) -> np.ndarray:
    bits = np.random.SFC64([seed, xxhash.xxh3_64_intdigest(key.encode())])
    out = np.empty(math.prod(shape), table.dtype)
    for start in range(0, out.size, _BLOCK_VALUES):
        block = out[start : start + _BLOCK_VALUES]
        index = bits.random_raw(-(-block.size // 4)).astype("<u8", copy=False).view("<u2")[: block.size]
        block[...] = table[index]
    return out.reshape(shape)


def _normal_quantiles() -> np.ndarray:
    normal = statistics.NormalDist()
    upper = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)])
    return np.concatenate([-upper[::-1], upper])


def consecutive_overlap(directory: Path, *, num_layers: int, num_tokens: int, seed: int) -> list[float]:
    """Mean share of a token's experts that the token before it chose too, by MoE layer.

    Runs the reference forward pass of the first layers up to the `num_layers`-th with experts over random tokens;
    one expert is in memory at a time.
    """
    config = ModelConfig.from_hf(read_json(directory / "config.json"))
    last = config.moe_layers[min(num_layers, config.num_moe_layers) - 1]
    source = SafetensorsSource(directory)
    try:
        plan = plan_conversion(config, source.tensors)
        # The first layers are a model of their own; tied, it needs no head.
        prefix = dataclasses.replace(
            config,
            num_layers=last + 1,
            layer_windows=config.layer_windows[: last + 1],
            moe_layers=tuple(layer for layer in config.moe_layers if layer <= last),
            tie_embeddings=True,
        )
        dense = {path: jnp.asarray(_read(source, plan.dense[path])) for path in dense_weight_specs(prefix)}
        experts = [_LazyExperts(source, plan, layer) for layer in range(prefix.num_moe_layers)]
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (1, num_tokens), np.int32)
        routing = reference_forward(prefix, dense, experts, jnp.asarray(tokens)).routing
    finally:
        source.close()
    return [_overlap(np.asarray(choice.expert_id[0])) for choice in routing]


class _LazyExperts(Sequence[Mapping[str, Any]]):
    """The experts of one layer, each read when it is asked for."""

    def __init__(self, source: SafetensorsSource, plan: ConversionPlan, layer: int):
        self._source, self._experts = source, plan.experts[layer]

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, expert: Any) -> Any:
        return {name: jnp.asarray(_read(self._source, piece)) for name, piece in self._experts[expert].items()}


def _read(source: SafetensorsSource, piece: Piece) -> np.ndarray:
    out = np.empty(piece.shape, numpy_dtype(piece.dtype))
    source.read_into(piece.key, piece.first, out)
    return out


def _overlap(expert_id_TX: np.ndarray) -> float:
    is_shared_TXX = expert_id_TX[1:, :, None] == expert_id_TX[:-1, None, :]
    return float(is_shared_TXX.any(axis=-1).mean())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a random Hugging Face checkpoint of any real size.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="config.json of a supported family")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="of all weights")
    parser.add_argument(
        "--shard-size", default=f"{DEFAULT_SHARD_BYTES // 10**9}GB", metavar="SIZE", help="most bytes of one file"
    )
    parser.add_argument("--overlap-layers", type=int, default=4, help="layers that the overlap is measured on; 0: none")
    parser.add_argument("--overlap-tokens", type=int, default=64, help="random tokens that it is measured on")
    return parser


def main(argv: Iterable[str] | None = None) -> int:
    args = build_parser().parse_args(None if argv is None else list(argv))
    reporter = ConsoleReporter()
    try:
        hf_config = read_json(args.config)
        make_random_checkpoint(hf_config, args.out, args.seed, parse_size(args.shard_size), reporter)
        if args.overlap_layers > 0:
            reporter.say(f"measuring the overlap on {args.overlap_tokens} random tokens")
            overlap = consecutive_overlap(
                args.out, num_layers=args.overlap_layers, num_tokens=args.overlap_tokens, seed=args.seed
            )
            config = ModelConfig.from_hf(hf_config)
            by_layer = ", ".join(f"{value:.3f}" for value in overlap)
            print(
                f"consecutive-token expert overlap: {statistics.mean(overlap):.3f} (by layer: {by_layer}; "
                f"by chance {config.experts_per_token / config.num_experts:.3f})"
            )
    except FlashMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
