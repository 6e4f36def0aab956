"""Dense weights on the drive: an orbax checkpoint of a nested dict, written and read in little memory.

Owns the orbax options and the translation between dotted paths and the nested dict; knows nothing of manifests or
experts. Invariant: what `load_dense` returns is bit for bit what `save_dense` was given.

Orbax's defaults are for training checkpoints. Here: no compression and no OCDBT (a weight is one plain zarr3 array),
no deep copy of what is saved (it would double the memory), and saving and loading in groups (one whole load keeps a
second copy of most weights until it ends).
"""

import contextlib
import ctypes
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.experts.record import checksum
from flashmoe_jax.models.weights import WeightSpec

# Weights loaded or saved by one call; a larger weight is a group of its own.
_GROUP_BYTES = 64 << 20
_SAVED_GROUP_BYTES = 256 << 20
_SMALL_FILE_BYTES = 64 << 10

Shardings = jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding]


def save_dense(directory: Path, weights: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes weights to a new directory; nothing of that name exists before it is whole.

    Args:
        directory: absolute; must not exist.
        weights: dotted paths and values, taken one at a time; a group of them is in memory.
    """
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    context.memory.deepcopy_host_arrays = False
    with quiet_orbax(), context:
        group: dict[str, np.ndarray] = {}
        for path, weight in weights:
            group[path] = weight
            if sum(value.nbytes for value in group.values()) >= _SAVED_GROUP_BYTES:
                ocp.partial.save(directory, nest(group))
                group = {}
                _give_back_memory()
        if group:
            ocp.partial.save(directory, nest(group))
        ocp.partial.finalize(directory)
    _give_back_memory()


def load_dense(
    directory: Path, specs: Mapping[str, WeightSpec], sharding: Shardings | None = None
) -> dict[str, jax.Array]:
    """Reads weights straight to their device.

    Args:
        directory: what `save_dense` wrote.
        specs: path, shape and dtype of every weight; the checkpoint must have exactly these.
        sharding: one for all, or one per path; None is the first device.

    Raises:
        CheckpointError: the directory is missing, damaged, or holds other weights.
    """
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def leaf(path: str) -> jax.ShapeDtypeStruct:
        target = sharding[path] if isinstance(sharding, Mapping) else sharding
        return jax.ShapeDtypeStruct(specs[path].shape, np.dtype(specs[path].dtype), sharding=target)

    # While a weight is read it is in memory twice; the largest first, when the others are not there yet.
    by_size = sorted(specs, key=lambda path: -_num_bytes(specs[path]))
    weights: dict[str, jax.Array] = {}
    for group in _load_groups(directory, specs, leaf, by_size):
        weights |= jax.block_until_ready(group)
    return {path: weights[path] for path in specs}


def read_dense(
    directory: Path, specs: Mapping[str, WeightSpec], only: Sequence[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads weights to the host, all or `only` some, a group of them in memory at a time; else as `load_dense`."""

    def leaf(path: str) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.dtype(specs[path].dtype)), specs[path].shape)

    for group in _load_groups(directory, specs, leaf, only):
        yield from group.items()


class StoredFile(NamedTuple):
    """A file of a checkpoint; small ones, which hold metadata and the smallest weights, have a checksum."""

    num_bytes: int
    checksum: str | None


def list_files(directory: Path) -> dict[str, StoredFile]:
    """Every file of a checkpoint by its name within, for `find_damage`."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): _stored_file(path) for path in files}


def find_damage(directory: Path, files: Mapping[str, StoredFile]) -> Iterator[str]:
    """A line for every file that is missing, of another size, or, where it is small, of other bytes.

    Orbax reads many files at once and prints a trace for each read that is on its way when another fails; with this
    check first, a damaged checkpoint is one line.
    """
    for name, written in files.items():
        path = directory / name
        try:
            found = _stored_file(path)
        except FileNotFoundError:
            yield f"{path} is missing"
            continue
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
            continue
        if found.num_bytes != written.num_bytes:
            yield f"{path} has {found.num_bytes} bytes, {written.num_bytes} were written"
        elif found != written:
            yield f"{path} is damaged"


def _stored_file(path: Path) -> StoredFile:
    num_bytes = path.stat().st_size
    return StoredFile(num_bytes, checksum(path.read_bytes()) if num_bytes <= _SMALL_FILE_BYTES else None)


def _check_tree(directory: Path, specs: Mapping[str, WeightSpec]) -> None:
    """Refuses a checkpoint of other weights before anything is read."""
    try:
        with quiet_orbax():
            tree = flatten(ocp.metadata(directory).metadata)
        stored = {path: WeightSpec(tuple(leaf.shape), str(leaf.dtype)) for path, leaf in tree.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"{directory} holds no dense weights that can be read ({_first_line(error)}); convert the model again"
        ) from None
    for path in sorted(set(stored) | set(specs)):
        found, wanted = stored.get(path), specs.get(path)
        if found != wanted:
            found_text, wanted_text = (
                "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}" for spec in (found, wanted)
            )
            raise CheckpointError(
                f"{path} in {directory} is {found_text}, it should be {wanted_text}; convert the model again"
            )


def _load_groups(
    directory: Path,
    specs: Mapping[str, WeightSpec],
    abstract_leaf: Callable[[str], Any],
    only: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    _check_tree(directory, specs)
    for paths in _groups(specs if only is None else {path: specs[path] for path in only}):
        abstract = dict.fromkeys(specs, ocp.PLACEHOLDER) | {path: abstract_leaf(path) for path in paths}
        try:
            with quiet_orbax():
                loaded = flatten(ocp.load(directory, nest(abstract)))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"the dense weights in {directory} cannot be read ({_first_line(error)}); convert the model again"
            ) from None
        yield {path: loaded[path] for path in paths}
        del loaded
        _give_back_memory()


def _groups(specs: Mapping[str, WeightSpec]) -> Iterator[list[str]]:
    group: list[str] = []
    group_bytes = 0
    for path, spec in specs.items():
        num_bytes = _num_bytes(spec)
        if group and group_bytes + num_bytes > _GROUP_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(path)
        group_bytes += num_bytes
    if group:
        yield group


def _num_bytes(spec: WeightSpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _give_back_memory() -> None:
    """Frees what orbax leaves in reference cycles and malloc keeps, which would add up over the groups."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict from dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted paths from a nested dict."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps orbax from logging: its warnings miss the OCDBT database that is left out on purpose, and its errors, with
    traces of its threads, are raised as well.
    """
    logger = logging.getLogger("absl")

    def is_news(record: logging.LogRecord) -> bool:
        return record.levelno > logging.ERROR

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
