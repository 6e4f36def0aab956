"""Training data: which prompts are trained on, and what a network sees and should say at each of their steps.

Owns the split by prompt and the arrays of batches. Inputs come from `replay_learned.py`, which runs the policy's own
update; labels from `labels.py`. Invariant: test prompts are in no array, and each part is a trace of its own whose
counters begin empty, so that nothing of one part is seen in another.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import HIDDEN, PolicyShape
from flashmoe_jax.policy.history import own_width
from flashmoe_jax.telemetry.trace import Trace, load_trace
from train_policy.labels import Target, distances
from train_policy.networks import HIDDEN_OFFSET
from train_policy.provenance import trained_on
from train_policy.replay_learned import input_chunks, untrained
from train_policy.replay_steps import Steps, joined, make_steps

_STOP_SHARE = 0.1  # of the prompts that are not for testing
_SPLIT_SEED = 0  # not the training's: different seeds are tested on the same prompts


class Split(NamedTuple):
    """Traces of one model, as far as they are used."""

    train: Trace
    stop: Trace  # held out to know when to stop
    notes: list[dict[str, Any]]  # of `provenance.trained_on`


def split(
    paths: Sequence[Path],
    test_prompts: str,
    inputs: frozenset[str],
    num_experts: int | None = None,
    num_orders: int = 1,
) -> Split:
    """Reads traces and splits each by prompt.

    Args:
        paths: of one model.
        test_prompts: what is left out for testing, of each trace: a share, `20%`, or numbers of prompts, `3,10-19`.
        inputs: wide columns that are needed.
        num_experts: per layer, where the traces do not say.
        num_orders: how often the prompts are trained on, each time in another order.

    Raises:
        ConfigError: traces of different models, a column that is missing, too few prompts, `test_prompts` not
            understood.
    """
    traces, notes, is_train, is_stop = [], [], [], []
    for path in paths:
        trace = load_trace(path, wide_columns=inputs)
        for name in sorted(inputs):
            if getattr(trace, name) is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"trace {path} has no {name}; record one with {flag}, or leave it out of --inputs")
        prompts = np.unique(trace.seq_id)
        rng = np.random.default_rng(_SPLIT_SEED)
        test = _test_prompts(prompts, test_prompts, rng, path)
        left = np.setdiff1d(prompts, test)
        if len(left) < 2:
            raise ConfigError(
                f"trace {path} has {len(prompts)} prompts, {len(test)} of them held out for testing; training needs 2 "
                "of the others, one of which says when to stop: record more, or hold out fewer with --test-prompts"
            )
        stopping = rng.permutation(left)[: max(round(len(left) * _STOP_SHARE), 1)]
        traces.append(trace)
        notes.append(trained_on(path, trace, test))
        is_stop.append(np.isin(trace.seq_id, stopping))
        is_train.append(np.isin(trace.seq_id, np.setdiff1d(left, stopping)))
    whole = joined(traces, num_experts)
    train = _reordered(whole.take(np.concatenate(is_train)), num_orders)
    return Split(train, whole.take(np.concatenate(is_stop)), notes)


def _reordered(trace: Trace, num_orders: int) -> Trace:
    """The trace followed by itself with its prompts in other orders: what counters carry over differs each time."""
    prompts, inverse = np.unique(trace.seq_id, return_inverse=True)
    rng = np.random.default_rng(_SPLIT_SEED)
    rows = [np.arange(len(trace.ids))]
    for _ in range(num_orders - 1):
        rows.append(np.argsort(rng.permutation(len(prompts))[inverse], kind="stable"))
    return trace.take(np.concatenate(rows))


def _test_prompts(prompts: np.ndarray, wanted: str, rng: np.random.Generator, path: Path) -> np.ndarray:
    parts = wanted.replace(" ", "")
    if parts.endswith("%"):
        try:
            share = float(parts[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise ConfigError(f"--test-prompts {wanted!r} is not understood; write a share below 100%, or 3,10-19")
        return rng.permutation(prompts)[: int(len(prompts) * share)]
    numbers: list[int] = []
    for part in parts.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--test-prompts {wanted!r} is not understood; write for example 20%, or 3,10-19")
        numbers += range(int(first), int(last or first) + 1)
    chosen = prompts[np.isin(prompts, numbers)]
    if not len(chosen):
        raise ConfigError(
            f"trace {path} has none of the prompts {wanted}; it has {prompts[0]} to {prompts[-1]}, or give a share: 20%"
        )
    return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Inputs and labels of S steps of a trace, as bytes where possible.

    Attributes:
        model: the trace's.
        steps: of the trace, to replay it.
        inputs: `[L, S, ...]` whole numbers as `networks.py` takes them.
        used: uint8 `[S, L, E]` sets, for `context` only.
        distance: uint8 `[L, S, E]`, see `labels.py`.
        boundary: uint8 `[L, S, M]`.
    """

    model: PolicyShape
    steps: Steps
    inputs: np.ndarray
    used: np.ndarray
    distance: np.ndarray
    boundary: np.ndarray

    def __len__(self) -> int:
        return self.inputs.shape[1]

    def rows(self, at: np.ndarray) -> tuple[np.ndarray, ...]:
        """inputs, used, used in the step before, distance and boundary of the steps `at`."""
        used = before = self.used
        if used.size:
            used, before = self.used[at], self.used[at - 1]
            before[at == 0] = 0
        return self.inputs[:, at], used, before, self.distance[:, at], self.boundary[:, at]


def by_model(splits: Sequence[Split]) -> list[Split]:
    """Those of one model together."""
    groups: dict[tuple[int, ...], list[Split]] = {}
    for part in splits:
        trace = part.train
        groups.setdefault((trace.meta["experts"], *trace.ids.shape[1:]), []).append(part)
    return [
        Split(joined([p.train for p in group]), joined([p.stop for p in group]), [n for p in group for n in p.notes])
        for group in groups.values()
    ]


def thinned(part: Split) -> list[Split]:
    """A model's traces as those of models that choose fewer experts, too: of each token the first half and quarter.

    Every prompt is trained on once, in one of the three forms; all say when to stop.
    """
    top_k = part.train.ids.shape[2]
    widths = sorted({top_k, max(top_k // 2, 1), max(top_k // 4, 1)}, reverse=True)
    _, place = np.unique(part.train.seq_id, return_inverse=True)
    widths = widths[: int(place.max(initial=0)) + 1]
    return [
        Split(_first_ids(part.train.take(place % len(widths) == at), x), _first_ids(part.stop, x), part.notes)
        for at, x in enumerate(widths)
    ]


def _first_ids(trace: Trace, number: int) -> Trace:
    return trace._replace(ids=np.ascontiguousarray(trace.ids[:, :, :number]))


def make_samples(kind: str, trace: Trace, target: Target, inputs: frozenset[str], *, is_cold: bool = False) -> Samples:
    """Everything that training takes from a part of the traces; `is_cold`: every prompt starts anew."""
    steps = make_steps(trace, reset=is_cold)
    num_steps, num_layers, top_k = trace.ids.shape
    hidden_size = trace.hidden.shape[2] if HIDDEN in inputs and trace.hidden is not None else 0
    model = PolicyShape(num_layers, steps.num_experts, top_k, hidden_size)
    offset, columns = None, None
    if hidden_size:
        offset = np.zeros(own_width(model, inputs), np.float32)
        offset[-hidden_size:] = HIDDEN_OFFSET
    used = np.zeros((num_steps if kind == "context" else 0, num_layers, steps.num_experts), np.uint8)
    done = 0
    for chunk in input_chunks(untrained(kind, inputs), steps, top_k):
        span = slice(done, done + len(chunk.inputs[0]))
        for layer, of_layer in enumerate(chunk.inputs):
            if columns is None:
                dtype = np.uint16 if kind == "paper" else np.uint8
                columns = np.empty((num_layers, num_steps, *of_layer.shape[1:]), dtype)
            columns[layer, span] = of_layer if offset is None else of_layer + offset
        if kind == "context":
            used[span] = chunk.used
        done = span.stop
    assert columns is not None and done == num_steps
    distance = distances(steps)
    return Samples(
        model=model,
        steps=steps,
        inputs=columns,
        used=used,
        distance=distance,
        boundary=target.boundaries(distance),
    )
