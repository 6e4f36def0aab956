"""What the routers of one step were given and what they answered, for a trace.

Owns the way from a layer's device arrays to rows on the host. Only a recording makes one: otherwise these arrays stay
on the device and are dropped with the step.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.jit
def _halved(x: Array) -> Array:
    return x.astype(jnp.float16)


class RouterCapture:
    """Wide columns of one step, filled layer by layer.

    Args:
        columns: of `telemetry.trace.WIDE_COLUMNS`.
    """

    def __init__(self, columns: Sequence[str]):
        self._layers: dict[str, list[Array]] = {name: [] for name in columns}

    def add(self, router_logits: Array, hidden: Array) -> None:
        """The next layer: `[tokens, E]` and `[tokens, D]`; copied to the host while the layer goes on."""
        given = {"router_logits": router_logits, "hidden": hidden}
        for name, layers in self._layers.items():
            half = _halved(given[name])
            half.copy_to_host_async()
            layers.append(half)

    def rows(self, is_recorded: np.ndarray) -> dict[str, np.ndarray]:
        """Float16 `[rows, L, ...]` of every column, for the tokens where `is_recorded` (bool, any shape) holds."""
        chosen = np.flatnonzero(is_recorded)
        return {
            name: np.stack([np.asarray(a)[chosen] for a in layers], axis=1) for name, layers in self._layers.items()
        }
