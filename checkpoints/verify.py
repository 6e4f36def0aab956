"""Re-reads every byte of a model directory: `python -m checkpoints.verify DIR`.

Experts are read through the tensorstore array, not by the byte ranges that the engine uses, so that the array's
metadata and shard indexes are proven as well. Invariant: exit status 0 means that every byte of weights is as it was
written; 1 that some are not, each named; 2 that the directory could not be opened at all.
"""

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.progress import Advance, ConsoleReporter, Reporter, SilentReporter, format_bytes
from flashmoe_jax.dense_store import find_damage, read_dense
from flashmoe_jax.errors import CheckpointError, DamagedRecordError, FlashMoEError
from flashmoe_jax.experts.record import checksum
from flashmoe_jax.experts.shard import shard_key
from flashmoe_jax.experts.store import ExpertStore
from flashmoe_jax.model_dir import DENSE_NAME, ModelDirectory

_READ_AHEAD_BYTES = 64 << 20  # experts on their way while one is checked; at least one more


@dataclasses.dataclass(frozen=True)
class Damage:
    """One thing that is not as it was written."""

    what: str
    layer: int | None = None
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found."""

    checked_bytes: int
    num_experts: int
    num_dense: int
    damages: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"damages": [dataclasses.asdict(damage) for damage in self.damages]}


def verify(model_dir: Path | str, progress: Reporter | None = None) -> Report:
    """Reads and checks all of a model directory.

    Raises:
        CheckpointError: there is no manifest, or it is damaged or of a newer format.
    """
    model, reporter = ModelDirectory.open(model_dir), progress or SilentReporter()
    manifest, config = model.manifest, model.config
    total_bytes = manifest.dense_bytes + manifest.expert_bytes
    with reporter.bar("verifying", total_bytes) as advance:
        damages = [
            *_check_text_files(model),
            *_check_dense(model, advance),
            *_check_experts(model, advance),
        ]
    return Report(total_bytes, config.num_moe_layers * config.num_experts, len(manifest.dense), tuple(damages))


def _check_text_files(model: ModelDirectory) -> Iterator[Damage]:
    for name in model.manifest.text_files:
        if not (model.path / name).is_file():
            yield Damage(f"{name} is missing")


def _check_dense(model: ModelDirectory, advance: Advance) -> Iterator[Damage]:
    files = [Damage(line) for line in find_damage(model.path / DENSE_NAME, model.manifest.dense_files)]
    yield from files
    unread = dict.fromkeys(model.dense_specs)
    try:
        if not files:
            yield from _check_weights(model, list(unread), unread, advance)
            return
    except CheckpointError:
        pass
    # One by one, so that a weight that cannot be read does not hide the others.
    for path in list(unread):
        try:
            yield from _check_weights(model, [path], unread, advance)
        except CheckpointError as error:
            yield Damage(f"dense weight {path}: {error}")


def _check_weights(
    model: ModelDirectory, paths: list[str], unread: dict[str, None], advance: Advance
) -> Iterator[Damage]:
    for path, weight in read_dense(model.path / DENSE_NAME, model.dense_specs, only=paths):
        del unread[path]
        advance(weight.nbytes)
        if checksum(weight.reshape(-1).view(np.uint8)) != model.manifest.dense[path].checksum:
            yield Damage(f"dense weight {path} is damaged")


def _check_experts(model: ModelDirectory, advance: Advance) -> Iterator[Damage]:
    layout, num_experts = model.layout, model.config.num_experts
    try:
        store = model.store()
    except CheckpointError as error:
        yield Damage(f"no expert can be read: {error}")
        return
    ids = [(layer, expert) for layer in range(model.config.num_moe_layers) for expert in range(num_experts)]
    num_ahead = 1 + _READ_AHEAD_BYTES // layout.record_bytes
    with store:
        reads = collections.deque((store.read_array(*i) for i in ids[:num_ahead]), num_ahead)
        for i, (layer, expert) in enumerate(ids):
            read = reads.popleft()
            if i + num_ahead < len(ids):
                reads.append(store.read_array(*ids[i + num_ahead]))
            message = _check_expert(store, layer, expert, read)
            if message is not None:
                yield Damage(message, layer, expert)
            advance(layout.record_bytes)


def _check_expert(store: ExpertStore, layer: int, expert: int, read: Any) -> str | None:
    try:
        store.check(layer, expert, np.ascontiguousarray(read.result()))
    except DamagedRecordError as error:
        return str(error)
    except ValueError as error:
        line = str(error).split("\n")[0][:200]
        return f"layer {layer} expert {expert} ({shard_key(layer)}) cannot be read: {line}"
    return None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoints.verify",
        description="Re-read every byte of a model directory and name each damaged expert.",
    )
    parser.add_argument("model_dir", type=Path, metavar="DIR", help="model directory made by checkpoints.convert")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Iterable[str] | None = None) -> int:
    args = build_parser().parse_args(None if argv is None else list(argv))
    try:
        report = verify(args.model_dir, ConsoleReporter())
    except FlashMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the directory was not checked to its end", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(report.to_json()))
        return 1 if report.damages else 0
    for damage in report.damages:
        print(f"damaged: {damage.what}")
    what = f"{report.num_experts} experts and {report.num_dense} dense weights"
    verdict = f"{len(report.damages)} are damaged" if report.damages else "all as they were written"
    print(f"{args.model_dir}: {what}, {format_bytes(report.checked_bytes)}: {verdict}")
    return 1 if report.damages else 0


if __name__ == "__main__":
    sys.exit(main())
