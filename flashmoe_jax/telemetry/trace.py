"""Traces: which experts every token chose, in order, as one `.npz` file.

Owns the format: `ids` `[tokens, L, X]` uint8 or uint16 (255 / 65535 = missing), `seq_id` int32, `phase` uint8 (0
prefill, 1 decode), `step` int32 (rows of one batch step or one prompt share it), `token` int32, `meta` JSON. Rows are
in the order of steps, within a step by sequence and position.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.npz import read_npz

PREFILL, DECODE = 0, 1


class Trace(NamedTuple):
    """A trace in memory."""

    ids: np.ndarray  # [tokens, L, X] int32, -1 = missing
    seq_id: np.ndarray  # [tokens] int32
    phase: np.ndarray  # [tokens] uint8
    step: np.ndarray  # [tokens] int32
    token: np.ndarray  # [tokens] int32
    meta: dict[str, Any]


class TraceRecorder:
    """Collects rows step by step."""

    def __init__(self, meta: dict[str, Any]):
        self._meta = meta
        self._ids: list[np.ndarray] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in ("seq_id", "phase", "step", "token")}
        self._num_steps = 0

    def add_step(self, ids: np.ndarray, seq_id: np.ndarray, token: np.ndarray, phase: int) -> None:
        """One prompt pass or one decode step: ids `[rows, L, X]`, seq_id and token `[rows]`."""
        rows = ids.shape[0]
        self._ids.append(ids.astype(np.int32))
        self._columns["seq_id"].append(np.array(seq_id, np.int32))
        self._columns["token"].append(np.array(token, np.int32))
        self._columns["phase"].append(np.full(rows, phase, np.uint8))
        self._columns["step"].append(np.full(rows, self._num_steps, np.int32))
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


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace; the file appears whole or not at all."""
    target = Path(path)
    narrow = np.uint8 if trace.meta["experts"] < 255 else np.uint16
    ids = np.where(trace.ids < 0, np.iinfo(narrow).max, trace.ids).astype(narrow)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(
                file,
                ids=ids,
                seq_id=trace.seq_id,
                phase=trace.phase,
                step=trace.step,
                token=trace.token,
                meta=np.array(json.dumps(trace.meta)),
            )
        # mkstemp makes a private file; a trace gets the permissions that any other new file would have.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace; optional columns that are absent get their defaults.

    Raises:
        ConfigError: no such file, or not a trace.
    """
    name = os.fspath(path)
    try:
        arrays = read_npz(path)
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
    for column in ("seq_id", "phase", "step", "token"):
        if column in arrays and arrays[column].shape != (rows,):
            raise ConfigError(f"trace {name}: {column} has shape {arrays[column].shape} and there are {rows} rows")
    return Trace(
        ids=ids,
        seq_id=arrays.get("seq_id", np.zeros(rows, np.int32)),
        phase=arrays.get("phase", np.full(rows, DECODE, np.uint8)),
        step=arrays.get("step", np.arange(rows, dtype=np.int32)),
        token=arrays.get("token", np.full(rows, -1, np.int32)),
        meta=meta,
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
