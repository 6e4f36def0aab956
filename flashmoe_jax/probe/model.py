"""A model under the probe: its budgets, what is known of its routing, and what is predicted from measured rates.

Invariant: everything that can be refused is refused when it is made, before anything is measured.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from flashmoe_jax.engine.engine import DEFAULT_CONTEXT
from flashmoe_jax.errors import BudgetError, ConfigError
from flashmoe_jax.model_dir import POLICY_NAME, ModelDirectory
from flashmoe_jax.policy import STATIC_NAME, load_popularity
from flashmoe_jax.probe.budgets import BudgetChoice, Planner
from flashmoe_jax.probe.hit_rates import MissModel, PopularRouting, TracedRouting, UniformRouting, hit_rate
from flashmoe_jax.probe.measure import Rates
from flashmoe_jax.probe.predict import Drive, TokenWork, predict
from flashmoe_jax.telemetry.trace import load_trace

# A budget is enough if it gives this share of the most tokens/s that any budget gives.
ENOUGH = 0.95
MEASURED = "measured"
# Shorter layers are bound by the host's work between them, which no rate tells of.
_SHORT_LAYER_S = 5e-4


class ProbedModel:
    """A model directory with its choice of budgets.

    Args:
        budgets: as the user wrote them; None for a grid.
        trace: file with the model's routing, or None.
        max_context: tokens of the KV cache, or None for the engine's default.
    """

    def __init__(self, path: Path, *, budgets: Sequence[str] | None, trace: Path | None, max_context: int | None):
        self.directory = ModelDirectory.open(path)
        config = self.directory.config
        context = min(config.max_position, DEFAULT_CONTEXT) if max_context is None else max_context
        if not 1 <= context <= config.max_position:
            raise ConfigError(f"--max-context {context} is out of range; this model takes 1 to {config.max_position}")
        self.routing = _routing(self.directory, trace)
        self.notes = [self.routing.source]
        planner = Planner(self.directory, context)
        self.budget_option = "memory_limit" if planner.is_cpu else "device_budget"
        self._has_device = not planner.is_cpu
        self.choices: list[BudgetChoice] = []
        if budgets is not None:
            self.choices = sorted((planner.choose(text) for text in budgets), key=lambda choice: choice.num_bytes)
        else:
            try:
                self.choices = planner.grid()
            except BudgetError as error:
                self.notes.append(f"no budget can be recommended: {error}")
        self._work = token_work(self.directory)

    def predictions(self, rates: Rates, given_drives: Mapping[str, float]) -> list[dict[str, Any]]:
        """One object per budget and drive; the measured drive first."""
        drives = [Drive(MEASURED, rates.drive_read)]
        drives += [Drive.of_rate(name, rate) for name, rate in given_drives.items()]
        copy_rate = rates.device_copy if self._has_device else None
        rows = []
        for choice in self.choices:
            shares = self.routing.miss_shares(choice.slots)
            for drive in drives:
                predicted = predict(
                    self._work, shares, drive, compute_bytes_per_s=rates.compute, copy_bytes_per_s=copy_rate
                )
                rows.append(
                    {
                        "budget": choice.text,
                        "slots_per_layer": choice.slots,
                        "hit_rate": round(hit_rate(self.routing, choice.slots), 4),
                        "drive_read_bytes_per_s": round(predicted.read_bytes_per_s),
                        "drive": drive.name,
                        "tokens_per_s": significant(predicted.tokens_per_s),
                        "limit_tokens_per_s": significant(predicted.limit_tokens_per_s),
                        "bound": predicted.bound,
                    }
                )
        return rows

    def recommended(self, predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The smallest budget that is about as fast as the fastest, on the measured drive; None if none fits."""
        speeds = [p["tokens_per_s"] for p in predictions if p["drive"] == MEASURED]
        if not speeds:
            return None
        best = int(np.argmax(speeds))
        chosen = next(i for i, speed in enumerate(speeds) if speed >= ENOUGH * speeds[best])
        choice, most = self.choices[chosen], self.choices[best]
        if choice.slots == self.directory.config.num_experts:
            why = "every expert stays in memory, and the drive is read at the start only"
        elif chosen == best:
            why = "the fastest of those predicted; with more memory it would be faster"
        else:
            why = f"{speeds[chosen] / speeds[best]:.0%} of the tokens/s of {most.text}"
        return {self.budget_option: choice.text, "slots": choice.slots, "why": why}

    def speed_notes(self, rates: Rates) -> list[str]:
        """What a reader of the predictions should know once the rates are there."""
        layer_s = self._work.touched_bytes / self._work.num_layers / rates.compute
        if layer_s >= _SHORT_LAYER_S:
            return []
        return [
            f"a layer of this model computes for {layer_s * 1e6:.0f} us: the host's work between layers, which is not "
            "in the predictions, is likely to take longer"
        ]


def token_work(directory: ModelDirectory) -> TokenWork:
    """What a decoded token reads and touches."""
    config, layout = directory.config, directory.layout
    specs = dict(directory.dense_specs)
    if not config.tie_embeddings:
        del specs["embedder.embedding"]  # one row of it is looked up; tied, it is the head, which is read whole
    return TokenWork(
        num_layers=config.num_moe_layers,
        experts_per_token=config.experts_per_token,
        record_bytes=layout.record_bytes,
        expert_bytes=layout.payload_words * np.dtype(layout.word_dtype).itemsize,
        dense_bytes=sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in specs.values()),
    )


def significant(value: float) -> float:
    """Four digits: a prediction has no more."""
    return float(f"{value:.4g}")


def _routing(directory: ModelDirectory, trace: Path | None) -> MissModel:
    """What is known of the model's routing: the trace given, what the directory brings, else nothing."""
    config = directory.config
    L, E, X = config.num_moe_layers, config.num_experts, config.experts_per_token
    if trace is not None:
        source = f"hit rates are those of LRU on {trace}; the default policy reads less"
        return TracedRouting(load_trace(trace, wide_columns=()), L, E, X, source)
    popularity_file = directory.path / POLICY_NAME / STATIC_NAME
    if popularity_file.is_file():
        popularity = load_popularity(popularity_file)
        if popularity.shape == (L, E):
            source = (
                "hit rates assume that the model's most popular experts stay in the slots, as its directory tells of "
                "them; policies that follow the text read less: give --trace FILE"
            )
            return PopularRouting(popularity, X, source)
    return UniformRouting(E, X)
