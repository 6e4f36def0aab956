"""Small traces for the tests of replay."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from flashmoe_jax.telemetry.trace import DECODE, Trace

LAYERS, EXPERTS, TOP_K = 2, 6, 3


def trace_of(ids: np.ndarray | Sequence, num_experts: int = EXPERTS, **columns: Sequence[int]) -> Trace:
    """A trace of ids `[tokens, L, X]`, -1 for missing; the columns' defaults are one sequence of decode steps."""
    ids = np.asarray(ids, np.int32)
    rows = len(ids)
    defaults = {
        "seq_id": np.zeros(rows),
        "phase": np.full(rows, DECODE),
        "step": np.arange(rows),
        "token": np.zeros(rows),
    }
    return Trace(
        ids=ids,
        **{name: np.asarray(columns.get(name, values), np.int32) for name, values in defaults.items()},
        meta={"experts": num_experts},
    )


@st.composite
def random_ids(draw: st.DrawFn, *, max_tokens: int = 40, with_gaps: bool = True) -> np.ndarray:
    """Ids `[tokens, LAYERS, TOP_K]`: rows repeat often, some ids are missing, some layers are absent in a row."""
    tokens = draw(st.integers(1, max_tokens))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    few = [random.permutation(EXPERTS)[:TOP_K] for _ in range(draw(st.integers(1, 6)))]
    ids = np.stack([[few[random.integers(len(few))] for _ in range(LAYERS)] for _ in range(tokens)]).astype(np.int32)
    fresh = np.stack([[random.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)])
    ids = np.where(random.random((tokens, LAYERS, 1)) < draw(st.sampled_from([0.0, 0.3, 1.0])), fresh, ids)
    if with_gaps:
        ids = np.where(random.random(ids.shape) < draw(st.sampled_from([0.0, 0.1])), -1, ids)
        ids = np.where(random.random((tokens, LAYERS, 1)) < draw(st.sampled_from([0.0, 0.1])), -1, ids)
    if (ids < 0).all():
        ids[0, 0, 0] = 0
    return ids.astype(np.int32)


def steps_of_layer(ids: np.ndarray, layer: int) -> list[tuple[int, ...]]:
    """The distinct ids of every row of a layer, ascending."""
    return [tuple(sorted({int(e) for e in row if e >= 0})) for row in ids[:, layer]]
