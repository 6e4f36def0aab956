"""What a policy was trained on: which traces, which of their prompts it has not seen, and what they were about.

Owns the form in which `fit` notes it in a policy's meta, under `traces`, and how `evaluate` finds it again. A trace is
known by its content, not by its name: a copy is the same trace.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashmoe_jax.telemetry.trace import Trace

TRACES = "traces"  # key of a policy's meta


class TrainedOn(NamedTuple):
    """One trace that a policy was trained on."""

    name: str
    fingerprint: str
    domain: str | None
    held_out: frozenset[int]  # seq_id of the prompts that it has not seen


def fingerprint(trace: Trace) -> str:
    """Of the ids and the sequences that they are of, as loaded from a file."""
    hashed = hashlib.sha256(str(trace.ids.shape).encode())
    hashed.update(np.ascontiguousarray(trace.ids, "<i4").data)
    hashed.update(np.ascontiguousarray(trace.seq_id, "<i4").data)
    return hashed.hexdigest()[:32]


def trained_on(path: str | os.PathLike[str], trace: Trace, held_out: Iterable[int] = ()) -> dict[str, Any]:
    """An entry of `traces` in a policy's meta.

    Args:
        path: of the trace's file; the name alone is kept.
        trace: as loaded, before it was joined to others.
        held_out: seq_id of the prompts that training did not see.
    """
    return {
        "name": Path(path).name,
        "fingerprint": fingerprint(trace),
        "domain": trace.meta.get("domain"),
        "tokens": len(trace.ids),
        "held_out": sorted(int(seq_id) for seq_id in held_out),
    }


def read_trained_on(meta: Mapping[str, Any]) -> list[TrainedOn]:
    """The entries of a policy's meta; none where it says nothing, or in another form."""
    entries = meta.get(TRACES)
    if not isinstance(entries, list):
        return []
    return [
        TrainedOn(e.get("name", "?"), e["fingerprint"], e.get("domain"), frozenset(e.get("held_out", ())))
        for e in entries
        if isinstance(e, dict) and "fingerprint" in e
    ]
