"""Traces: which experts every token chose, in order, as one `.npz` file.

Owns the format: `ids` `[tokens, L, X]` uint8 or uint16 (255 / 65535 = missing), `seq_id` int32, `phase` uint8 (0
prefill, 1 decode), `step` int32 (rows of one batch step or one prompt share it), `token` int32, `meta` JSON; optional
and wide: `router_logits` `[tokens, L, E]` and `hidden` `[tokens, L, D]` (what the router is given), both float16. Rows
are in the order of steps, within a step by sequence and position. Invariant: the same trace makes the same bytes.
"""

import json
import os
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.npz import read_npz

PREFILL, DECODE = 0, 1
ROW_COLUMNS = ("seq_id", "phase", "step", "token")
WIDE_COLUMNS = ("router_logits", "hidden")


class Trace(NamedTuple):
    """A trace in memory."""

    ids: np.ndarray  # [tokens, L, X] int32, -1 = missing
    seq_id: np.ndarray  # [tokens] int32
    phase: np.ndarray  # [tokens] uint8
    step: np.ndarray  # [tokens] int32
    token: np.ndarray  # [tokens] int32
    meta: dict[str, Any]
    router_logits: np.ndarray | None = None  # [tokens, L, E] float16
    hidden: np.ndarray | None = None  # [tokens, L, D] float16

    def take(self, rows: np.ndarray | slice) -> "Trace":
        """The chosen rows of every column, in the order given."""
        return self._replace(
            **{
                name: column[rows]
                for name in ("ids", *ROW_COLUMNS, *WIDE_COLUMNS)
                if (column := getattr(self, name)) is not None
            }
        )


class TraceRecorder:
    """Collects rows step by step.

    Args:
        meta: of the trace.
        wide_columns: of WIDE_COLUMNS; every step must bring them.
    """

    def __init__(self, meta: dict[str, Any], wide_columns: Collection[str] = ()):
        assert set(wide_columns) <= set(WIDE_COLUMNS)
        self.wide_columns = tuple(name for name in WIDE_COLUMNS if name in wide_columns)
        self._meta = meta
        self._clear()

    def _clear(self) -> None:
        self._ids: list[np.ndarray] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in (*ROW_COLUMNS, *self.wide_columns)}
        self._num_steps = 0

    def add_step(self, ids: np.ndarray, seq_id: np.ndarray, token: np.ndarray, phase: int, **wide: np.ndarray) -> None:
        """One prompt pass or one decode step: ids `[rows, L, X]`, seq_id and token `[rows]`, wide `[rows, L, ...]`."""
        rows = ids.shape[0]
        assert tuple(wide) == self.wide_columns
        self._ids.append(ids.astype(np.int32))
        self._columns["seq_id"].append(np.array(seq_id, np.int32))
        self._columns["token"].append(np.array(token, np.int32))
        self._columns["phase"].append(np.full(rows, phase, np.uint8))
        self._columns["step"].append(np.full(rows, self._num_steps, np.int32))
        for name, values in wide.items():
            self._columns[name].append(np.array(values, np.float16))
        self._num_steps += 1

    def trace(self) -> Trace:
        """Everything recorded so far."""
        if not self._ids:
            raise ConfigError("the trace is empty: nothing was generated; give a prompt first")
        return Trace(
            ids=np.concatenate(self._ids),
            **{name: np.concatenate(parts) for name, parts in self._columns.items()},
            meta=self._meta,
        )

    def take(self) -> Trace:
        """Everything recorded since the last call, which is then forgotten; steps are numbered from 0 again."""
        trace = self.trace()
        self._clear()
        return trace


class Pieces(NamedTuple):
    """An array too large for memory, as float16 pieces along its first axis."""

    shape: tuple[int, ...]
    arrays: Iterable[np.ndarray]


def save_trace(trace: Trace, path: str | os.PathLike[str], wide: Mapping[str, Pieces] = MappingProxyType({})) -> None:
    """Writes a trace; the file appears whole or not at all.

    Args:
        trace: what to write.
        path: of the file.
        wide: wide columns in pieces, where the trace itself does not hold them.
    """
    target = Path(path)
    narrow = np.uint8 if trace.meta["experts"] < 255 else np.uint16
    ids = np.where(trace.ids < 0, np.iinfo(narrow).max, trace.ids).astype(narrow)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            _write_npz(
                file,
                {
                    "ids": ids,
                    **{name: getattr(trace, name) for name in ROW_COLUMNS},
                    "meta": np.array(json.dumps(trace.meta)),
                    **{name: column for name in WIDE_COLUMNS if (column := getattr(trace, name)) is not None},
                    **wide,
                },
            )
        # mkstemp makes a private file; a trace gets the permissions that any other new file would have.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _write_npz(file: IO[bytes], arrays: dict[str, np.ndarray | Pieces]) -> None:
    """As `np.savez_compressed`, without the time of day, and wide columns as they are: float16 noise hardly shrinks."""
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")
            info.compress_type = zipfile.ZIP_STORED if name in WIDE_COLUMNS else zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=True) as entry:
                if isinstance(array, np.ndarray):
                    np.lib.format.write_array(entry, array, allow_pickle=False)
                    continue
                header = {"descr": "<f2", "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(entry, header)
                for piece in array.arrays:
                    entry.write(np.ascontiguousarray(piece, "<f2").data)


def load_trace(path: str | os.PathLike[str], *, wide_columns: Collection[str] = WIDE_COLUMNS) -> Trace:
    """Reads a trace; optional columns that are absent get their defaults.

    Args:
        path: of the file.
        wide_columns: those of WIDE_COLUMNS to read where the trace has them; the others are None.

    Raises:
        ConfigError: no such file, or not a trace.
    """
    name = os.fspath(path)
    try:
        arrays = read_npz(path, skip=set(WIDE_COLUMNS) - set(wide_columns))
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    except FileNotFoundError:
        raise ConfigError(f"trace {name} does not exist; record one with --trace") from None
    except ValueError as error:
        raise ConfigError(f"trace {name} cannot be read as .npz: {error}") from None
    if "ids" not in arrays or arrays["ids"].ndim != 3 or arrays["ids"].dtype not in (np.uint8, np.uint16):
        raise ConfigError(f"trace {name} has no array ids [tokens, layers, experts per token] of uint8 or uint16")
    raw = arrays["ids"]
    ids = np.where(raw == np.iinfo(raw.dtype).max, -1, raw.astype(np.int32))
    rows = len(ids)
    for column in ROW_COLUMNS:
        if column in arrays and arrays[column].shape != (rows,):
            raise ConfigError(f"trace {name}: {column} has shape {arrays[column].shape} and there are {rows} rows")
    for column in WIDE_COLUMNS:
        if column in arrays and (arrays[column].ndim != 3 or arrays[column].shape[:2] != ids.shape[:2]):
            raise ConfigError(
                f"trace {name}: {column} has shape {arrays[column].shape} and ids are of {rows} rows x "
                f"{ids.shape[1]} layers"
            )
    return Trace(
        ids=ids,
        seq_id=arrays.get("seq_id", np.zeros(rows, np.int32)),
        phase=arrays.get("phase", np.full(rows, DECODE, np.uint8)),
        step=arrays.get("step", np.arange(rows, dtype=np.int32)),
        token=arrays.get("token", np.full(rows, -1, np.int32)),
        meta=meta,
        **{column: arrays.get(column) for column in WIDE_COLUMNS},
    )


def popularity(trace: Trace, num_layers: int, num_experts: int) -> np.ndarray:
    """Uses of every expert, float32 `[L, E]`.

    Raises:
        ConfigError: the trace is of a model of another shape.
    """
    if trace.ids.shape[1] != num_layers or trace.ids.max(initial=-1) >= num_experts:
        raise ConfigError(
            f"the trace has {trace.ids.shape[1]} layers and expert ids up to {trace.ids.max(initial=-1)}, the model "
            f"{num_layers} layers x {num_experts} experts; use a trace of this model"
        )
    counts = np.zeros((num_layers, num_experts), np.float32)
    for layer in range(num_layers):
        ids = trace.ids[:, layer].reshape(-1)
        counts[layer] = np.bincount(ids[ids >= 0], minlength=num_experts)
    return counts
