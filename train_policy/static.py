"""The `static` policy: how often a trace asked for every expert.

Owns the sum over traces and where the result goes. The counts come from `telemetry/trace.py`, the file's form from
`flashmoe_jax/policy`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import STATIC_NAME, save_popularity
from flashmoe_jax.telemetry.trace import Trace, load_trace, popularity


def fit_static(traces: Sequence[Path], *, out: Path | None, into: Path | None) -> Path:
    """Counts uses over all traces and writes them as a policy.

    Args:
        traces: `.npz` files of one model.
        out: folder to write to, made where absent.
        into: model directory to install in, instead of `out`; its shape must be the traces'.

    Returns:
        The file written.

    Raises:
        ConfigError: no trace, or traces of different models.
        CheckpointError: `into` is not a model directory.
    """
    loaded = [load_trace(path) for path in traces]
    if into is not None:
        from flashmoe_jax.model_dir import POLICY_NAME, ModelDirectory

        config = ModelDirectory.open(into).config
        shape, folder = (config.num_moe_layers, config.num_experts), into / POLICY_NAME
    else:
        assert out is not None
        shape, folder = _shape(loaded[0]), out
    counts = np.sum([popularity(trace, *shape) for trace in loaded], axis=0)
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"kind": "static", "tokens": sum(len(t.ids) for t in loaded), "traces": [path.name for path in traces]}
    save_popularity(folder / STATIC_NAME, counts, meta)
    return folder / STATIC_NAME


def _shape(trace: Trace) -> tuple[int, int]:
    """(layers, experts) of a trace; the number of experts is in its meta."""
    if "experts" not in trace.meta:
        raise ConfigError("the trace does not say how many experts the model has; install with --into MODEL instead")
    return trace.ids.shape[1], int(trace.meta["experts"])
