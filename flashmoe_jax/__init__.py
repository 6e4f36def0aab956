"""Exact inference of Mixture-of-Experts language models larger than memory.

    import flashmoe_jax

    with flashmoe_jax.load("path/to/model", device_budget="25%") as engine:
        for piece in engine.generate("Once upon a time", max_new_tokens=64):
            print(piece.text, end="", flush=True)
        print(engine.stats())

Importing this package imports neither JAX nor a model; the names below are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flashmoe_jax.errors import FlashMoEError

if TYPE_CHECKING:
    from flashmoe_jax.engine.engine import Engine, load
    from flashmoe_jax.engine.generation import Piece
    from flashmoe_jax.engine.session import Session
    from flashmoe_jax.text.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "FlashMoEError", "Piece", "SamplingParams", "Session", "__version__", "load"]

_HOME = {
    "Engine": "flashmoe_jax.engine.engine",
    "load": "flashmoe_jax.engine.engine",
    "Piece": "flashmoe_jax.engine.generation",
    "Session": "flashmoe_jax.engine.session",
    "SamplingParams": "flashmoe_jax.text.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
