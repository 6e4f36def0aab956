"""The file of a `static` policy: how often every expert was asked for. Knows nothing of what is made of it."""

import json
import os
from typing import Any

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.npz import read_npz

STATIC_NAME = "static.npz"  # in the policy folder of a model directory


def save_popularity(path: str | os.PathLike[str], popularity: np.ndarray, meta: dict[str, Any]) -> None:
    """Writes popularity `[L, E]` as the parameters of a `static` policy; `meta` says where it comes from."""
    np.savez_compressed(path, popularity=popularity.astype(np.float32), meta=np.array(json.dumps(meta)))


def load_popularity(path: str | os.PathLike[str]) -> np.ndarray:
    """Popularity `[L, E]` float32 as `save_popularity` wrote it.

    Raises:
        ConfigError: not such a file.
    """
    try:
        return read_npz(path)["popularity"].astype(np.float32)
    except (FileNotFoundError, ConfigError, KeyError) as error:
        raise ConfigError(f"{os.fspath(path)} is not a static policy ({error}); fit it again") from None
