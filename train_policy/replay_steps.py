"""Traces as steps: what is requested together, in which order, and what a policy is shown.

Owns the reading of `step`, `phase` and `seq_id`, and what is refused about a trace. Knows no policy and no slot.
Invariant: a step names every expert of a layer at most once, in ascending order, so that nothing depends on the order
of a row's ids.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.telemetry.trace import PREFILL, WIDE_COLUMNS, Trace
from train_policy.policies.compiled import kernel
from train_policy.policies.requests import Requests


class Mode(enum.Enum):
    """What one step is."""

    TOKEN = "token"  # every row is a decode step, whatever `phase` says
    ENGINE = "engine"  # a prompt is one step, the rows of a batch step are one step
    ACCESS = "access"  # every id is a step of its own, as in the literature on caches


class Steps(NamedTuple):
    """S steps of L layers, and the U updates that a policy sees."""

    num_experts: int
    num_rows: np.ndarray  # [2] tokens in decode and in prefill
    layers: list[Requests]
    updates: np.ndarray  # [U, L, W] int32 ids, -1 = none; in prefill there are several for one step
    is_fresh: np.ndarray  # [U] bool: the policy starts anew before this update
    last_update: np.ndarray  # [S] int64, ascending: the update after which experts are scored for the step
    row_of_update: np.ndarray  # [U, B] int64: the trace's rows that an update shows; -1 = none
    router_logits: np.ndarray | None = None  # of the trace's rows, where it has them
    hidden: np.ndarray | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_steps(self) -> int:
        return len(self.last_update)

    @property
    def is_prefill(self) -> np.ndarray:
        return self.layers[0].is_prefill

    @property
    def is_cold(self) -> np.ndarray:
        return self.layers[0].is_cold


def joined(traces: Sequence[Trace], num_experts: int | None = None) -> Trace:
    """Traces of one model as one trace, in the order given; sequences and steps keep apart.

    `meta["experts"]` of the result is what the traces say, else `num_experts`, else the largest id + 1. Wide columns
    are kept where all traces have them.

    Raises:
        ConfigError: no token, traces of different models, or ids out of range.
    """
    said = {t.meta["experts"] for t in traces if "experts" in t.meta}
    if not all(isinstance(experts, int) and experts > 0 for experts in said):
        raise ConfigError(f"the trace's meta gives {_listed(said)} experts per layer; record it again with --trace")
    shapes = {t.ids.shape[1:] for t in traces}
    if len(said) > 1 or len(shapes) > 1:
        raise ConfigError(
            f"the traces are of different models: experts per layer {_listed(said)}, [layers, experts per token] "
            f"{_listed(shapes)}; replay them one by one"
        )
    largest = max((int(t.ids.max(initial=-1)) for t in traces), default=-1)
    if largest < 0:
        raise ConfigError("the trace names no expert; record one with --trace")
    if said and num_experts is not None and num_experts not in said:
        raise ConfigError(f"the trace is of a model with {said.pop()} experts per layer and --experts is {num_experts}")
    experts = next(iter(said), num_experts or largest + 1)
    smallest = min(int(t.ids.min(initial=-1)) for t in traces)
    if largest >= experts or smallest < -1:
        raise ConfigError(
            f"the trace has expert ids up to {largest} and a layer has {experts} experts (0 to {experts - 1}); "
            "give the model's number with --experts, or another trace"
        )
    # Consecutive traces may use the same numbers for their sequences and steps.
    sequence_base = np.cumsum([0, *(_span(t.seq_id) for t in traces)])
    step_base = np.cumsum([0, *(_span(t.step) for t in traces)])
    return Trace(
        ids=np.concatenate([t.ids for t in traces]),
        seq_id=_shifted([t.seq_id for t in traces], sequence_base),
        phase=np.concatenate([t.phase for t in traces]),
        step=_shifted([t.step for t in traces], step_base),
        token=np.concatenate([t.token for t in traces]),
        meta={**traces[0].meta, "experts": experts},
        **{name: _wide(traces, name) for name in WIDE_COLUMNS},
    )


def _wide(traces: Sequence[Trace], name: str) -> np.ndarray | None:
    """A wide column of all traces; None unless all have it, alike."""
    parts = [part for trace in traces if (part := getattr(trace, name)) is not None]
    if len(parts) < len(traces) or len({part.shape[1:] for part in parts}) > 1:
        return None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _listed(values: set) -> str:
    return " and ".join(sorted(map(str, values))) or "unknown"


def _span(numbers: np.ndarray) -> int:
    return int(numbers.max(initial=-1)) - min(int(numbers.min(initial=0)), 0) + 1


def _shifted(parts: Sequence[np.ndarray], base: np.ndarray) -> np.ndarray:
    shifted = [
        part.astype(np.int64) - min(int(part.min(initial=0)), 0) + b for part, b in zip(parts, base, strict=False)
    ]
    return np.concatenate(shifted)


def make_steps(trace: Trace, mode: Mode = Mode.TOKEN, *, reset: bool = False) -> Steps:
    """The steps of a trace.

    Args:
        trace: as `joined` gives it.
        mode: what one step is.
        reset: start every prompt cold. In Mode.ENGINE a step that brings a sequence not seen before starts cold; in
            the other modes every sequence is replayed alone, also where the rows of a batch are interleaved.
    """
    if reset and mode is not Mode.ENGINE:
        trace = by_sequence(trace)
    num_rows, num_layers, top_k = trace.ids.shape
    rows, updates = trace.ids, trace.ids
    step_of_row = np.arange(num_rows)
    position_of_row = np.zeros(0, np.int64)
    if mode is Mode.ENGINE:
        step_of_row, is_prefill = _recorded_steps(trace)
        updates, row_of_update, position_of_row, last_update = _engine_updates(trace, step_of_row, is_prefill)
        last_token = last_update
        first_token = np.concatenate([[0], last_update[:-1] + 1])
        row_is_prefill = is_prefill[step_of_row]
    else:
        if mode is Mode.ACCESS:
            rows = updates = trace.ids.transpose(0, 2, 1).reshape(num_rows * top_k, num_layers, 1)
            step_of_row = np.arange(len(rows))
        last_update = step_of_row
        row_of_update = (np.arange(len(rows)) // (len(rows) // max(num_rows, 1)))[:, None]
        first_token = last_token = np.arange(num_rows) if mode is Mode.TOKEN else step_of_row // top_k
        is_prefill = np.zeros(len(last_update), bool)
        row_is_prefill = np.zeros(num_rows, bool)
    is_cold = np.zeros(len(last_update), bool)
    if reset:
        first_row = np.unique(trace.seq_id, return_index=True)[1]
        is_cold[first_row * top_k if mode is Mode.ACCESS else step_of_row[first_row]] = True
    is_fresh = np.zeros(len(updates), bool)
    is_fresh[np.concatenate([[0], last_update[:-1] + 1])[is_cold]] = True
    num_experts = trace.meta["experts"]
    layers = []
    for layer in range(num_layers):
        ids, start, position = _distinct(rows[:, layer], step_of_row, position_of_row, len(is_cold), num_experts)
        tokens = (first_token.astype(np.int64), last_token.astype(np.int64))
        layers.append(Requests(ids, start, position, *tokens, is_prefill, is_cold))
    num_prefill_rows = int(np.count_nonzero(row_is_prefill))
    return Steps(
        num_experts=num_experts,
        num_rows=np.array([num_rows - num_prefill_rows, num_prefill_rows]),
        layers=layers,
        updates=updates,
        is_fresh=is_fresh,
        last_update=last_update,
        row_of_update=row_of_update,
        router_logits=trace.router_logits,
        hidden=trace.hidden,
    )


def by_sequence(trace: Trace) -> Trace:
    """Rows sorted by sequence, sequences in the order in which they begin."""
    _, first, inverse = np.unique(trace.seq_id, return_index=True, return_inverse=True)
    order = np.argsort(first[inverse], kind="stable")
    return trace.take(order)


def _recorded_steps(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """The step of every row `[rows]`, and which steps are prefill `[S]`.

    Some recorders number prompt tokens one by one; then the prompt rows of a sequence that follow each other are one
    step.
    """
    is_prompt = trace.phase == PREFILL
    if not len(is_prompt):
        return np.zeros(0, np.int64), np.zeros(0, bool)
    begins = (np.diff(trace.step) != 0) | (np.diff(is_prompt.astype(np.int8)) != 0)
    of_one_prompt = is_prompt[1:] & is_prompt[:-1]
    if not np.any(of_one_prompt & ~begins):
        begins &= ~(of_one_prompt & (np.diff(trace.seq_id) == 0))
    begins = np.concatenate([[True], begins])
    return np.cumsum(begins) - 1, is_prompt[begins]


def _engine_updates(
    trace: Trace, step_of_row: np.ndarray, is_prefill: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Updates, the rows that each shows, every row's position in its step, and every step's last update.

    A prompt is shown token by token, the sequences of a batch side by side, so that one update is one token of the
    clock.
    """
    num_rows, num_layers, top_k = trace.ids.shape
    num_steps = len(is_prefill)
    step_start = np.searchsorted(step_of_row, np.arange(num_steps + 1))
    position = np.zeros(num_rows, np.int64)
    place = np.arange(num_rows) - step_start[step_of_row]
    for step in np.flatnonzero(is_prefill):
        rows = slice(step_start[step], step_start[step + 1])
        _, sequence, length_of = np.unique(trace.seq_id[rows], return_inverse=True, return_counts=True)
        order = np.argsort(sequence, kind="stable")
        place[rows] = sequence
        position[rows][order] = np.arange(len(order)) - np.repeat(np.cumsum(length_of) - length_of, length_of)
    length = np.zeros(num_steps, np.int64)
    np.maximum.at(length, step_of_row, position + 1)
    last_update = np.cumsum(length) - 1
    num_updates = last_update[-1] + 1
    updates = np.full((num_updates, num_layers, (int(place.max(initial=0)) + 1) * top_k), -1, np.int32)
    by_place = updates.reshape(num_updates, num_layers, -1, top_k)
    update_of_row = (last_update - length + 1)[step_of_row] + position
    by_place[update_of_row, :, place] = trace.ids
    row_of_update = np.full((num_updates, by_place.shape[2]), -1)
    row_of_update[update_of_row, place] = np.arange(num_rows)
    return updates, row_of_update, position, last_update


@kernel
def _distinct(
    rows: np.ndarray, step_of_row: np.ndarray, position_of_row: np.ndarray, num_steps: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of every step, each once and ascending, where each step begins, and the first position of each id.

    Positions are given for all rows or for none.
    """
    ids = np.empty(rows.size, np.int32)
    position = np.empty(rows.size if len(position_of_row) else 0, np.int32)
    start = np.zeros(num_steps + 1, np.int64)
    is_named = np.zeros(num_experts, np.bool_)
    first_position = np.zeros(num_experts, np.int64)
    row = filled = 0
    for step in range(num_steps):
        lowest, highest = num_experts, -1
        while row < len(rows) and step_of_row[row] == step:
            at = position_of_row[row] if len(position) else 0
            for expert in rows[row]:
                if expert >= 0:
                    first_position[expert] = min(first_position[expert], at) if is_named[expert] else at
                    is_named[expert] = True
                    lowest = min(lowest, expert)
                    highest = max(highest, expert)
            row += 1
        for expert in range(lowest, highest + 1):
            if is_named[expert]:
                ids[filled] = expert
                if len(position):
                    position[filled] = first_position[expert]
                filled += 1
                is_named[expert] = False
        start[step + 1] = filled
    return ids[:filled].copy(), start, position[:filled].copy()
