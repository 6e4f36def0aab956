"""The training loop: one jitted step over donated state, its schedule, checkpoints and log.

Owns the optimiser state and its life on disk (orbax). Invariant: the state after step n depends on the seed, the
options and, under a time budget, on the clock; with a step budget a resumed run equals an uninterrupted one exactly.
"""

import csv
import dataclasses
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from demo_model import corpus
from demo_model.model import (
    FlatModel,
    Params,
    expert_load,
    forward,
    load_balancing_loss,
    router_z_loss,
    token_losses,
)
from flashmoe_jax.errors import FlashMoEError

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Budget and hyperparameters. Exactly one of `minutes` and `steps` is set."""

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    tokens_per_step: int = 2048
    # (share of the budget from which it holds, row length in tokens): short rows are cheaper, long ones come last.
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.8, 512))
    peak_rate: float = 3e-3
    final_rate: float = 3e-5
    warmup_steps: int = 60
    weight_decay: float = 0.1
    capacity_factor: float = 1.5
    balance_weight: float = 0.05
    z_weight: float = 0.001
    checkpoint_minutes: float = 10.0


class TrainState(NamedTuple):
    """Weights and optimiser state; donated to each step."""

    params: Params
    optimiser: optax.OptState


class StepReport(NamedTuple):
    """Means over one batch; `load` is each expert's share of its layer's assignments, `[L, E]`."""

    loss: Array
    balance: Array
    z: Array
    dropped: Array
    load: Array


def make_optimiser(options: TrainOptions) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step multiplies in; norms and biases do not decay."""

    def decays(params: Params) -> dict[str, bool]:
        return {name: value.ndim >= 2 for name, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(options.weight_decay, mask=decays),
    )


def learning_rate(options: TrainOptions, step: int, progress: float) -> float:
    """Linear warm-up by steps, then a cosine over the share of the budget that is spent."""
    warmup = min(1.0, (step + 1) / options.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return warmup * (options.final_rate + (options.peak_rate - options.final_rate) * cosine)


def make_step(flat: FlatModel, options: TrainOptions) -> Callable[..., tuple[TrainState, StepReport]]:
    """The jitted training step `(state, token_BT, rate) -> (state, report)`; the state is donated."""
    optimiser = make_optimiser(options)

    def loss_of(params: Params, token_BT: Array) -> tuple[Array, StepReport]:
        out = forward(flat.merge(params), flat.config, token_BT[:, :-1], options.capacity_factor)
        loss = jnp.mean(token_losses(out.logits, token_BT[:, 1:]))
        balance = jnp.mean(jnp.stack([load_balancing_loss(r) for r in out.routings]))
        z = jnp.mean(jnp.stack([router_z_loss(r) for r in out.routings]))
        load = jnp.stack([expert_load(r.expert_id, flat.config.num_experts) for r in out.routings])
        total = loss + options.balance_weight * balance + options.z_weight * z
        return total, StepReport(loss, balance, z, out.dropped, load)

    def step(state: TrainState, token_BT: Array, rate: Array) -> tuple[TrainState, StepReport]:
        gradients, report = jax.grad(loss_of, has_aux=True)(state.params, token_BT)
        updates, optimiser_state = optimiser.update(gradients, state.optimiser, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        return TrainState(params, optimiser_state), report

    return jax.jit(step, donate_argnums=0)


def init_state(flat: FlatModel, options: TrainOptions) -> TrainState:
    params = flat.init(options.seed)
    return TrainState(params, make_optimiser(options).init(params))


class Run:
    """A run directory: `checkpoints/step_N` (the newest two are kept) and `metrics.csv`."""

    def __init__(self, directory: Path):
        self._checkpoints = directory / "checkpoints"
        self._metrics = directory / "metrics.csv"
        self._checkpoints.mkdir(parents=True, exist_ok=True)

    def save(self, state: TrainState, step: int, seconds: float) -> None:
        tree = {
            "params": state.params,
            "optimiser": _numbered(state.optimiser),
            "step": np.asarray(step),
            "seconds": np.asarray(seconds),
        }
        ocp.save(self._checkpoints / f"step_{step}", tree, overwrite=True)
        for old in self._steps()[:-2]:
            shutil.rmtree(self._checkpoints / f"step_{old}")

    def load(self, template: TrainState) -> tuple[TrainState, int, float]:
        """The newest checkpoint: state, steps done, seconds spent.

        Raises:
            FlashMoEError: the run directory has no checkpoint.
        """
        steps = self._steps()
        if not steps:
            raise FlashMoEError(f"{self._checkpoints} holds no checkpoint; start without --resume")
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            {"params": template.params, "optimiser": _numbered(template.optimiser)},
        )
        number = np.asarray(0)
        tree = ocp.load(
            self._checkpoints / f"step_{steps[-1]}",
            {**abstract, "step": number, "seconds": number.astype(np.float64)},
        )
        structure = jax.tree.structure(template.optimiser)
        optimiser = jax.tree.unflatten(structure, [tree["optimiser"][k] for k in sorted(tree["optimiser"])])
        return TrainState(dict(tree["params"]), optimiser), int(tree["step"]), float(tree["seconds"])

    def log(self, row: dict[str, float | int]) -> None:
        new = not self._metrics.exists()
        with self._metrics.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)

    def _steps(self) -> list[int]:
        # A checkpoint still being written has another name, so whatever matches is complete.
        found = (re.fullmatch(r"step_(\d+)", p.name) for p in self._checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match)


def _numbered(tree: optax.OptState) -> dict[str, Array]:
    """The leaves in order, under names that sort in that order."""
    return {f"{i:04}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


class Trained(NamedTuple):
    params: Params
    steps: int
    tokens: int
    seconds: float


def train(
    flat: FlatModel,
    domains: list[corpus.TokenDomain],
    options: TrainOptions,
    run: Run,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    log_every: int = 20,
) -> Trained:
    """Trains until the budget is spent; checkpoints on the way and at the end.

    Args:
        resume: continue from the run's newest checkpoint; the time it had spent counts.
        stop_after: leave early after this many steps in all, the schedule unchanged (for tests and dry runs).
        log_every: steps between two rows of metrics.csv.
    """
    step_fn = make_step(flat, options)
    state, step, spent = init_state(flat, options), 0, 0.0
    if resume:
        state, step, spent = run.load(state)
    began = saved = time.monotonic()
    logged, logged_step, loads = began, step, []

    with _progress() as bar:
        task = bar.add_task("training", total=1.0)
        while True:
            now = time.monotonic()
            seconds = spent + now - began
            progress = step / options.steps if options.steps else seconds / (60 * (options.minutes or 1))
            if progress >= 1 or (stop_after is not None and step >= stop_after):
                break
            length = [value for since, value in options.lengths if progress >= since][-1]
            rows = corpus.batch(domains, options.seed, step, max(1, options.tokens_per_step // length), length)
            state, report = step_fn(state, rows, np.float32(learning_rate(options, step, progress)))
            step += 1
            loads.append(report.load)
            if step % log_every == 0 or step == 1:
                loss = float(report.loss)
                now = time.monotonic()
                rate = (step - logged_step) * options.tokens_per_step / (now - logged)
                load = np.mean(np.asarray(jax.device_get(loads)), axis=0) * flat.config.num_experts
                run.log(
                    {
                        "step": step,
                        "seconds": round(seconds, 1),
                        "tokens": step * options.tokens_per_step,
                        "loss": round(loss, 4),
                        "balance": round(float(report.balance), 4),
                        "z": round(float(report.z), 4),
                        "dropped": round(float(report.dropped), 4),
                        "load_min": round(float(load.min()), 3),
                        "load_max": round(float(load.max()), 3),
                        "rate": learning_rate(options, step, progress),
                        "tokens_per_second": round(rate),
                    }
                )
                bar.update(task, completed=progress, description=f"step {step} loss {loss:.3f} {rate:,.0f} tokens/s")
                logged, logged_step, loads = now, step, []
            if time.monotonic() - saved > 60 * options.checkpoint_minutes:
                run.save(state, step, spent + time.monotonic() - began)
                saved = time.monotonic()
    seconds = spent + time.monotonic() - began
    run.save(state, step, seconds)
    return Trained(state.params, step, step * options.tokens_per_step, seconds)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        redirect_stdout=False,
    )
