"""What the steps of a trace ask of one layer: the argument that all compiled loops share."""

from typing import NamedTuple

import numpy as np


class Requests(NamedTuple):
    """S steps of one layer; all but the first three fields are the same for every layer."""

    ids: np.ndarray  # int32: the ids of all steps one after the other, within a step distinct and ascending
    start: np.ndarray  # [S + 1] int64: where in `ids` each step begins
    position: np.ndarray  # int32: which token of its step asks for each of `ids` first; empty where all steps have one
    first_token: np.ndarray  # [S] int64: tokens before the step, the clock of re-fetches
    last_token: np.ndarray  # [S] int64: number of its last token
    is_prefill: np.ndarray  # [S] bool
    is_cold: np.ndarray  # [S] bool: cache and counters are empty before this step
