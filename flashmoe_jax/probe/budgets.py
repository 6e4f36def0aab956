"""Memory budgets worth a prediction: from the smallest that runs a model to the one that holds all its experts.

Owns the choice of budgets; what fits into one is the engine's own plan (`engine/budget.py`). Invariant: a budget that
is listed is accepted by `--memory-limit` (on the CPU) or `--device-budget` (elsewhere) and gives the slots listed, as
long as as much memory is free.
"""

import dataclasses
import functools

import jax

from flashmoe_jax.engine.budget import (
    COMPILED_BYTES,
    HEADROOM,
    Budget,
    MemoryPlan,
    Request,
    format_size,
    plan_memory,
)
from flashmoe_jax.engine.expert_memory import policy_bytes
from flashmoe_jax.engine.memory import available_bytes, rss_bytes, total_bytes
from flashmoe_jax.errors import BudgetError
from flashmoe_jax.model_dir import POLICY_NAME, ModelDirectory
from flashmoe_jax.policy import PolicyShape, choose_policy

# Steps of the grid, as shares of a layer's experts.
GRID_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetChoice:
    """A budget as it is given to the engine, and what becomes of it."""

    text: str
    num_bytes: int  # what is promised: of the process on the CPU, on the device elsewhere
    slots: int  # per layer


class Planner:
    """The engine's memory plan of a model on this machine; make it before anything large is allocated.

    Args:
        context: cache tokens of the one sequence that is served.
    """

    def __init__(self, directory: ModelDirectory, context: int):
        device = jax.devices()[0]
        self.is_cpu = device.platform == "cpu"
        self._config = config = directory.config
        shape = PolicyShape(config.num_moe_layers, config.num_experts, config.experts_per_token, config.hidden_size)
        policy = choose_policy("auto", shape, directory.path / POLICY_NAME)
        runtime_bytes = rss_bytes() + COMPILED_BYTES
        statistics = device.memory_stats() or {}
        device_bytes = int(statistics.get("bytes_limit", 0))
        self._free_bytes = (
            available_bytes() + rss_bytes() if self.is_cpu else device_bytes - int(statistics.get("bytes_in_use", 0))
        )
        self._plan = functools.partial(
            plan_memory,
            config,
            directory.layout,
            Request(context=context),
            dense_bytes=directory.manifest.dense_bytes,
            policy_bytes=policy_bytes(policy.of_slots(config.num_experts), shape, is_guarded=policy.is_learned),
            runtime_bytes=runtime_bytes,
            available_bytes=self._free_bytes,
            total_bytes=total_bytes() if self.is_cpu else device_bytes,
            is_cpu=self.is_cpu,
        )

    def choose(self, text: str) -> BudgetChoice:
        """What becomes of a budget: `4GiB` of the process (on the CPU) or of the device, `25%` or `16slots`.

        Raises:
            BudgetError: not understood, too small or too large.
        """
        budget = Budget.parse(text)
        limit = budget.num_bytes if self.is_cpu else None
        plan = self._plan(budget=budget if limit is None else None, memory_limit=limit)
        num_bytes = self._promised(plan) if limit is None else limit
        return BudgetChoice(text=text, num_bytes=num_bytes, slots=plan.slots_per_layer)

    def grid(self) -> list[BudgetChoice]:
        """Budgets in bytes, from `top_k` slots per layer in eighths of the experts to all that is free or needed.

        Raises:
            BudgetError: not even the smallest fits; the message says what it takes.
        """
        E, X = self._config.num_experts, self._config.experts_per_token
        slots = sorted({X, *(s for k in range(1, GRID_STEPS + 1) if (s := -(-E * k // GRID_STEPS)) >= X)})
        choices = [self._choose_slots(slots[0])]
        for more in slots[1:]:
            try:
                choice = self._choose_slots(more)
            except BudgetError:
                break
            if choice.num_bytes > self._free_bytes * (1 - HEADROOM):
                break
            if choice.slots > choices[-1].slots:
                choices.append(choice)
        return choices

    def _choose_slots(self, slots: int) -> BudgetChoice:
        plan = self._plan(budget=Budget(slots=slots), memory_limit=None)
        return self.choose(format_size(self._promised(plan), up=True))

    def _promised(self, plan: MemoryPlan) -> int:
        return plan.process_bytes if self.is_cpu else plan.device_bytes
