"""Fitting a network to traces: the training loop, when it stops, and the policy that comes of it.

Owns optimisation, early stopping, the mixture of heads, and what is saved. Data are `fit_data.py`'s, labels and losses
`labels.py`'s, networks `networks.py`'s. Invariant: the same traces, options and seed on the same machine make the same
network; all that is random comes from one generator.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.saved import SavedPolicy
from flashmoe_jax.telemetry.trace import Trace
from train_policy.fit_data import Samples, Split, by_model, make_samples, split, thinned
from train_policy.labels import VICTIM_SHARES, Label, Target
from train_policy.networks import (
    ContextBatch,
    ContextNetwork,
    ContextSize,
    Masks,
    PaperNetwork,
    SharedNetwork,
    is_decayed,
    peaks,
)
from train_policy.provenance import TRACES
from train_policy.replay import Replayer
from train_policy.replay_slots import replay_slots

_BATCH, _MIN_BATCH = 512, 32
_MIN_STEPS = 60  # of an epoch, where there are rows enough for batches of _MIN_BATCH
# A network applied to every expert alone sees one in so many of the experts in a step: it has few weights, many rows.
_EXPERTS_SKIPPED = 8
_JUDGED_ROWS, _PEAK_ROWS = 1024, 512
_MIX_STEPS = 2  # heads are mixed in steps of 1 / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a kind of network is trained.

    Attributes:
        label: what it predicts.
        epochs: at the most.
        patience: epochs without a better replay after which training ends.
        learning_rate: at its highest; it rises for a tenth of the steps and falls along a cosine.
        weight_decay: of kernels and vectors.
        dropout: share of the inputs that a training step leaves out; of `context`.
        hidden_units: of `context` and `shared`; 0 of `shared`: one affine layer.
        shape: of `paper`.
        num_orders: orders of the prompts in an epoch, see `fit_data.split`.
        ridge: weight of the squares of kernels in the loss.
    """

    label: Label
    epochs: int
    patience: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    dropout: float = 0.0
    hidden_units: int = 0
    shape: str = ""
    num_orders: int = 1
    ridge: float = 0.0


RECIPES = {
    "context": Recipe(label=Label.REUSE, epochs=6, weight_decay=0.1, dropout=0.35, hidden_units=128, num_orders=2),
    "paper": Recipe(label=Label.DISTANCE, epochs=6, shape="layer"),
    "shared": Recipe(label=Label.REUSE, epochs=8, learning_rate=3e-2, weight_decay=0.0, ridge=1e-3),
}


class Progress(NamedTuple):
    """What a caller is told after a step."""

    step: int
    num_steps: int
    epoch: int
    gap_closed: float | None  # by the epoch that just ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A trained policy, and what it did on the prompts that said when to stop."""

    saved: SavedPolicy
    gap_closed: list[dict[int, float]]  # per model, by slots per layer, in whole numbers as it will be scored
    num_steps: int  # trained on
    epochs: int
    seconds: float


class Part(NamedTuple):
    """Data of one model."""

    target: Target
    train: Samples
    judge: "Judge"


def fit(
    paths: Sequence[Path],
    kind: str,
    recipe: Recipe,
    *,
    seed: int,
    test_prompts: str,
    inputs: frozenset[str] = frozenset(),
    num_experts: int | None = None,
    model: PolicyShape | None = None,
    report: Callable[[Progress], None] = lambda _: None,
) -> Fitted:
    """Trains a network.

    Args:
        paths: traces of one model; for `shared` each may be of another.
        kind: of RECIPES.
        recipe: one of RECIPES, or like it.
        seed: of everything random.
        test_prompts: see `fit_data.split`.
        inputs: beside ids, for `context`.
        num_experts: per layer, where the traces do not say.
        model: that the traces must be of; None for any.
        report: called after every step.

    Raises:
        ConfigError: as `fit_data.split`; traces of another model.
    """
    began = time.perf_counter()
    groups = [[path] for path in paths] if kind == "shared" else [list(paths)]
    splits = [split(group, test_prompts, inputs, num_experts, recipe.num_orders) for group in groups]
    for of_group in splits:
        _check_model(of_group.train, model)
    notes = [note for of_group in splits for note in of_group.notes]
    if kind == "shared":
        splits = [form for of_model in by_model(splits) for form in thinned(of_model)]
    parts = [_part(kind, recipe.label, of_group, inputs) for of_group in splits]
    trainer = Trainer(kind, recipe, parts, seed, inputs)
    epochs = trainer.train(report)
    num_steps = sum(len(part.train) for part in parts)
    saved = SavedPolicy(
        kind=kind,
        model=parts[0].train.model,
        arrays=trainer.arrays(),
        shape=recipe.shape,
        inputs=inputs,
        activation="silu" if kind == "paper" else "relu",
        blend=trainer.blend(),
        meta={
            TRACES: notes,
            "label": recipe.label.value,
            "seed": seed,
            "steps": num_steps,
            "epochs": epochs,
        },
    )
    closed = [part.judge.share_of(saved) for part in parts]
    return Fitted(
        saved=saved, gap_closed=closed, num_steps=num_steps, epochs=epochs, seconds=time.perf_counter() - began
    )


def _check_model(trace: Trace, model: PolicyShape | None) -> None:
    found = PolicyShape(trace.ids.shape[1], trace.meta["experts"], trace.ids.shape[2])
    if model is not None and found != model._replace(hidden_size=0):
        raise ConfigError(
            f"the trace is of a model with {found.num_layers} layers x {found.num_experts} experts, {found.top_k} per "
            f"token; the model of --into has {model.num_layers} x {model.num_experts}, {model.top_k} per token: "
            "record a trace of it"
        )


def _part(kind: str, label: Label, of_group: Split, inputs: frozenset[str]) -> Part:
    top_k = of_group.train.ids.shape[2]
    target = Target(label, of_group.train.meta["experts"], top_k, is_single=kind != "context")
    # A model that nobody has seen before has just been started.
    is_cold = kind == "shared"
    train, stop = (
        make_samples(kind, trace, target, inputs, is_cold=is_cold) for trace in (of_group.train, of_group.stop)
    )
    return Part(target, train, Judge(of_group.stop, stop, is_cold))


class Judge:
    """Replays keep values on prompts that training does not see."""

    def __init__(self, trace: Trace, samples: Samples, is_cold: bool):
        self.samples = samples
        model = samples.model
        slots = {min(max(round(s * model.num_experts), model.top_k), model.num_experts) for s in VICTIM_SHARES}
        self.slots = sorted(slots)
        self._replayer = Replayer(trace, reset=is_cold)
        self._lru, self._min = (self._hits(name) for name in ("lru", "min"))

    def share(self, keep: np.ndarray) -> np.ndarray:
        """Share of the gap between the hits of LRU and of MIN that keep values `[S, L, E]` close, by slots."""
        runs = replay_slots(self.samples.steps, iter([keep]), self.slots, num_staging=1)
        return self._share(np.array([run.decode.hits.sum() for run in runs]))

    def share_of(self, saved: SavedPolicy) -> dict[int, float]:
        """The same of a policy as it is scored, in whole numbers."""
        return dict(zip(self.slots, self._share(self._hits(saved)).tolist(), strict=True))

    def _hits(self, policy: str | SavedPolicy) -> np.ndarray:
        return np.array([result.run.decode.hits.sum() for result in self._replayer.replay(policy, self.slots)])

    def _share(self, hits: np.ndarray) -> np.ndarray:
        gap = self._min - self._lru
        return np.where(gap > 0, (hits - self._lru) / np.maximum(gap, 1), 0.0)


class Trainer:
    """A network in training.

    Args:
        kind: of RECIPES.
        recipe: how.
        parts: data; of several models for `shared`.
        seed: of weights, batches and dropout.
        inputs: beside ids, of `context`.
    """

    def __init__(
        self, kind: str, recipe: Recipe, parts: Sequence[Part], seed: int, inputs: frozenset[str] = frozenset()
    ):
        self._kind, self._recipe, self._parts, self._inputs = kind, recipe, parts, inputs
        self._rng = np.random.default_rng(seed)
        num_rows = sum(len(part.train) for part in parts)
        batch = min(max(num_rows // _MIN_STEPS, _MIN_BATCH), _BATCH)
        sizes = [min(batch, len(part.train)) for part in parts]
        self._batches = [
            (place, size) for place, size in enumerate(sizes) for _ in range(len(parts[place].train) // size)
        ]
        self._num_steps = recipe.epochs * len(self._batches)
        self._graph, self._params = nnx.split(self._network(parts[0]))
        highest = recipe.learning_rate
        rate = optax.warmup_cosine_decay_schedule(
            highest / 20, highest, max(self._num_steps // 10, 1), max(self._num_steps, 2), highest / 100
        )
        mask = jax.tree_util.tree_map_with_path(is_decayed, self._params)
        self._optimiser = optax.adamw(rate, b2=0.99, weight_decay=recipe.weight_decay, mask=mask)
        self._keep_of = jax.jit(self._keep)

    def _network(self, part: Part) -> nnx.Module:
        model, recipe = part.train.model, self._recipe
        if self._kind == "paper":
            return PaperNetwork(model, recipe.shape, random=self._rng)
        if self._kind == "shared":
            return SharedNetwork(recipe.hidden_units, random=self._rng)
        size = ContextSize(inputs=self._inputs, hidden_units=recipe.hidden_units, num_heads=part.target.num_heads)
        return ContextNetwork(model, size, part.target.first_guess, random=self._rng)

    def train(self, report: Callable[[Progress], None]) -> int:
        """Trains until the replay stops getting better; the best weights stay. Returns the epochs run."""
        state = jax.jit(self._optimiser.init)(self._params)
        steps = [self._step(part.target) for part in self._parts]
        best, best_share, best_epoch, done, epoch = self._params, -np.inf, 0, 0, 0
        for epoch in range(1, self._recipe.epochs + 1):
            for place, rows in self._order():
                batch = self._draw(self._parts[place].train, rows)
                self._params, state = steps[place](self._params, state, *batch)
                done += 1
                report(Progress(done, self._num_steps, epoch, None))
            share = float(np.mean([shares.max(axis=0).mean() for shares in self._head_shares()]))
            report(Progress(done, self._num_steps, epoch, share))
            if share > best_share:
                best, best_share, best_epoch = self._params, share, epoch
            elif epoch - best_epoch >= self._recipe.patience:
                break
        self._params = best
        return epoch

    def _order(self) -> Iterator[tuple[int, np.ndarray]]:
        """The batches of an epoch: which part, and which of its rows."""
        rows = [self._rng.permutation(len(part.train)) for part in self._parts]
        for at in self._rng.permutation(len(self._batches)):
            place, size = self._batches[at]
            yield place, rows[place][:size]
            rows[place] = rows[place][size:]

    def _draw(self, train: Samples, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """A batch, and random bytes for what it leaves out."""
        inputs, used, before, distance, boundary = train.rows(rows)
        if self._kind == "shared" or self._recipe.shape == "expert":
            num_experts = train.model.num_experts
            experts = np.sort(self._rng.permutation(num_experts)[: -(-num_experts // _EXPERTS_SKIPPED)])
            inputs = inputs[..., experts] if self._kind == "paper" else inputs[:, :, experts]
            distance = distance[..., experts]
        width = inputs.shape[2] + 2 * used[0].size if self._recipe.dropout else 0
        return inputs, used, before, distance, boundary, self._rng.integers(0, 256, (len(rows), width), np.uint8)

    def _step(self, target: Target) -> Callable[..., tuple[Any, Any]]:
        """Jitted `(params, optimiser state, *batch) -> (params, optimiser state)`."""
        optimiser, keep_of = self._optimiser, self._keep
        dropout, ridge = self._recipe.dropout, self._recipe.ridge

        def loss(params: Any, *batch: Array) -> Array:
            inputs, used, before, distance, boundary, random = batch
            masks = _masks(random, used, dropout) if dropout else None
            error = target.loss(keep_of(params, inputs, used, before, masks), distance, boundary)
            return error + ridge * _sum_of_squares(params) if ridge else error

        @jax.jit
        def step(params: Any, state: Any, *batch: Array) -> tuple[Any, Any]:
            change, state = optimiser.update(jax.grad(loss)(params, *batch), state, params)
            return optax.apply_updates(params, change), state

        return step

    def _keep(self, params: Any, inputs: Array, used: Array, before: Array, masks: Masks | None = None) -> Array:
        """Keep values `[L, B, M, E]` of a batch as bytes."""
        network: Any = nnx.merge(self._graph, params)
        return network(ContextBatch(inputs, used, before), masks) if self._kind == "context" else network(inputs)

    def _activations(self, params: Any, inputs: Array, used: Array, before: Array) -> dict[str, Array]:
        """Those that `peaks` cuts off, of a batch as bytes."""
        network: Any = nnx.merge(self._graph, params)
        found: dict[str, Array] = network.peaked(
            ContextBatch(inputs, used, before) if self._kind == "context" else inputs
        )
        return found

    def _judged(self, samples: Samples) -> np.ndarray:
        """Keep values `[M, S, L, E]`."""
        chunks = []
        for first in range(0, len(samples), _JUDGED_ROWS):
            rows = np.minimum(np.arange(first, first + _JUDGED_ROWS), len(samples) - 1)
            keep = self._keep_of(self._params, *samples.rows(rows)[:3])
            chunks.append(np.asarray(keep).transpose(2, 1, 0, 3)[:, : len(samples) - first])
        return np.concatenate(chunks, axis=1)

    def _head_shares(self) -> list[np.ndarray]:
        """Shares of the gap closed by every head alone, `[M, R]` per part."""
        return [np.stack([part.judge.share(keep) for keep in self._judged(part.judge.samples)]) for part in self._parts]

    def blend(self) -> tuple[tuple[float, tuple[float, ...]], ...]:
        """For every number of slots that was replayed, the mixture of heads that closes most of the gap."""
        part = self._parts[0]
        judge, num_heads = part.judge, part.target.num_heads
        if num_heads == 1:
            return ((0.0, (1.0,)),)
        keep = self._judged(judge.samples)
        mixtures = [
            np.bincount(heads, minlength=num_heads).astype(np.float32) / _MIX_STEPS
            for heads in itertools.combinations_with_replacement(range(num_heads), _MIX_STEPS)
        ]
        shares = np.stack([judge.share(np.tensordot(mixture, keep, ((0,), (0,)))) for mixture in mixtures])
        num_experts = judge.samples.model.num_experts
        best = zip(judge.slots, shares.argmax(axis=0), strict=True)
        return tuple((slots / num_experts, tuple(mixtures[at].tolist())) for slots, at in best)

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights as `SavedPolicy` holds them."""
        train = self._parts[0].train
        rows = np.unique(np.linspace(0, len(train) - 1, _PEAK_ROWS).astype(np.int64))
        activations = jax.jit(self._activations)(self._params, *train.rows(rows)[:3])
        network: Any = nnx.merge(self._graph, self._params)
        return network.weights() | {name: peaks(np.asarray(found)) for name, found in activations.items()}


def _sum_of_squares(params: Any) -> Array:
    """Of kernels and vectors."""
    squares = jax.tree_util.tree_map_with_path(lambda path, a: is_decayed(path, a) * jnp.sum(jnp.square(a)), params)
    return sum(jax.tree.leaves(squares), jnp.float32(0))


def _masks(random: Array, used: Array, dropout: float) -> Masks:
    """From random bytes `[B, own + 2·L·E]`; what is kept makes up for what is not."""
    left_out = round(dropout * 256)
    mask = (random >= left_out).astype(jnp.float32) * (256 / (256 - left_out))
    sets_size = used.shape[1] * used.shape[2]
    own, now, before = jnp.split(mask, [mask.shape[1] - 2 * sets_size, mask.shape[1] - sets_size], axis=1)
    return Masks(own, now.reshape(used.shape), before.reshape(used.shape))
