"""Expert memory of a running engine: store, slots, residency, policy and counters, joined.

Owns the one state that all sessions of an engine share. `prefill.py` and `decode.py` move it from step to step.
Invariant: between steps every expert that the residency calls resident has its whole, checked record in its slot.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.config import ModelConfig, PrefetchMode
from flashmoe_jax.engine.budget import MemoryPlan
from flashmoe_jax.engine.dense import DenseWeights, LayerKind
from flashmoe_jax.engine.guard import init_guard, start_shadow
from flashmoe_jax.engine.prefetch import Prediction, Prefetcher
from flashmoe_jax.engine.steps import (
    NextRouter,
    StepState,
    make_decode_step,
    make_dense_step,
    make_expert_ffn,
    make_expert_ffn_group,
    make_prefill_step,
)
from flashmoe_jax.experts.fetcher import Fetcher, reads_in_flight
from flashmoe_jax.experts.host_tier import HostTier
from flashmoe_jax.experts.residency import init_residency
from flashmoe_jax.experts.rows import RowTable
from flashmoe_jax.experts.slots import InsertedSlots, SlotBuffer, make_slot_buffer
from flashmoe_jax.experts.store import ExpertStore
from flashmoe_jax.policy.base import Policy, PolicyShape
from flashmoe_jax.telemetry.counters import RefetchWatch, StageCounters
from flashmoe_jax.telemetry.guard_watch import GuardWatch
from flashmoe_jax.telemetry.regret import RegretGauge

# Experts predicted for so many tokens of a prompt or more are as likely as any.
PROMPT_GRADES = 4


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted steps of one engine, per layer kind; compiled at first use of each shape."""

    decode: dict[LayerKind, Any]
    prefill: dict[LayerKind, Any]
    dense: dict[LayerKind, Any]
    expert_ffn: Any
    expert_ffn_group: Any


class ExpertMemory:
    """Slots, who is in them, and how they change.

    Args:
        slots: the buffer; None for one as the device needs it.
        guard_window: steps, to put the policy under guard; None for no guard.
        prefetch: whether prefill and decode read ahead.
        host_records: records that the host tier has room for; with slots that are not host memory themselves.
    """

    def __init__(
        self,
        config: ModelConfig,
        dense: DenseWeights,
        store: ExpertStore,
        policy: Policy,
        plan: MemoryPlan,
        device: jax.Device,
        slots: SlotBuffer | None = None,
        guard_window: int | None = None,
        prefetch: PrefetchMode = PrefetchMode.OFF,
        host_records: int = 0,
    ):
        layout = store.layout
        self.config, self.policy, self.store, self.device = config, policy, store, device
        self.policy_params = [
            jax.device_put(policy.layer_params(layer), device) for layer in range(config.num_moe_layers)
        ]
        self.rows = RowTable(config.num_moe_layers, plan.slots_per_layer, plan.num_staging)
        self.slots = slots or make_slot_buffer(
            self.rows.num_rows, layout.record_words, np.dtype(layout.word_dtype), device
        )
        self.fetcher = Fetcher(store, self.slots, layout.record_bytes, reads_in_flight(layout.record_bytes))
        self.tier: HostTier | None = None
        if host_records:
            assert isinstance(self.slots, InsertedSlots), "slots in host memory need no tier there"
            self.tier = HostTier(host_records, self.slots, np.dtype(layout.word_dtype), device)
        self._guard_window = guard_window
        self.guard_watch = None if guard_window is None else GuardWatch(policy.name, config.num_moe_layers)
        self.programs = _make_programs(dense, policy, layout.fields, guard_window)
        self.prefill_counters = StageCounters(layout.record_bytes)
        self.decode_counters = StageCounters(layout.record_bytes)
        self.prefetch = prefetch
        # One each for decode and for prefill; None where nothing is read ahead.
        self.prefetcher = self.prompt_prefetcher = None
        if prefetch is not PrefetchMode.OFF:
            self.prompt_prefetcher = self._make_prefetcher(self.prefill_counters, PROMPT_GRADES)
            if prefetch is PrefetchMode.ON or plan.slots_per_layer < config.num_experts:
                self.prefetcher = self._make_prefetcher(self.decode_counters, config.experts_per_token)
        # On the device, as arguments of every step; to convert one costs more host time than to pass it.
        self.layer_ids = [jax.device_put(np.int32(layer), device) for layer in range(config.num_moe_layers)]
        self.next_routers = _next_routers(config, dense, self.layer_ids)
        self._no_outputs: dict[int, Array] = {}  # of the last batch size
        self._num_free_slots = np.full(config.num_moe_layers, self.rows.num_slots)
        self.refetch = RefetchWatch(
            config.num_moe_layers, config.num_experts, (self.prefill_counters, self.decode_counters)
        )
        self.regret = RegretGauge(config.num_moe_layers, config.num_experts)
        self.num_tokens = 0  # decode steps and prompt tokens so far, the clock of re-fetches
        self.state = self._initial_state()
        self.last_reader: Array | None = None  # ready when no computation of earlier steps reads a row any more
        # Layer, expert and row of records not admitted, whose computation may still be under way.
        self.rows_in_use: list[tuple[int, int, int]] = []
        self._is_whole = True  # no step is under way or was cut off

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Encloses every step. One that fails half-way leaves slots that nobody vouches for: all is forgotten then."""
        if not self._is_whole:
            self.reset()  # an interrupt hit the reset itself
        if self.last_reader is not None:
            # Whoever asked for the last step may not have looked at its result yet, and this one overwrites rows.
            self.last_reader.block_until_ready()
            self.last_reader = None
            self.give_back_rows()
        self._is_whole = False
        try:
            yield
        except BaseException:
            self.reset()
            raise
        self._is_whole = True

    def reset(self) -> None:
        """Forgets who is resident and what the policy saw."""
        self.fetcher.drain()
        for prefetcher in (self.prefetcher, self.prompt_prefetcher):
            if prefetcher is not None:
                prefetcher.forget()
        self.rows_in_use = []
        self.rows.reset()
        self._num_free_slots[:] = self.rows.num_slots
        self.state = self._initial_state()
        if self.guard_watch is not None:
            self.guard_watch.forget()
        self.regret.restart()
        self._is_whole = True

    def give_back_rows(self) -> None:
        """All computations dispatched so far are done: the rows of records not admitted are spare again."""
        for layer, expert, row in self.rows_in_use:
            if self.tier is not None:
                self.tier.take_back(layer, expert, row)
            self.rows.give_back(row)
        self.rows_in_use = []

    def no_outputs(self, batch: int) -> Array:
        """Zeros `[batch, X, D]`, which outputs of experts are written over."""
        if batch not in self._no_outputs:
            shape = (batch, self.config.experts_per_token, self.config.hidden_size)
            # Committed, as what the missing experts are added to: hits and misses share one compiled program.
            self._no_outputs = {batch: jnp.zeros(shape, jnp.float32, device=self.device)}
        return self._no_outputs[batch]

    def free_slots_taken(self, layer: int, count: int) -> None:
        """So many experts were admitted and nobody left for them."""
        self._num_free_slots[layer] -= count

    def holds_all(self, layer: int) -> bool:
        """Whether every expert of a layer is resident; none will be missing then until a reset."""
        return self.rows.num_slots == self.config.num_experts and not self._num_free_slots[layer]

    def not_at_hand(self, layer: int, predicted: list[Prediction]) -> list[Prediction]:
        """The predictions for a layer without those that the host tier holds."""
        tier = self.tier
        return predicted if tier is None else [each for each in predicted if (layer, each.expert) not in tier]

    def prompt_is_done(self) -> None:
        """Every prompt ends with this: what is measured against decode's rules starts from its residents."""
        if self.state.guard is not None:
            guard = start_shadow(self.state.guard, self.state.residency)
            self.state = self.state._replace(guard=guard)
        self.regret.restart()

    def copy_of_residents(self) -> Array:
        """Who is in the slots, `[L, R]`, on its way to the host; the state's own array is donated to the next step."""
        copy = self.state.residency.expert_of_slot.copy()
        copy.copy_to_host_async()
        return copy

    def resident_experts(self) -> list[set[int]]:
        """Who is in the slots now, per MoE layer."""
        table = np.asarray(self.state.residency.expert_of_slot)
        return [{int(e) for e in row if e >= 0} for row in table]

    def close(self) -> None:
        """Waits for reads and for what is computed in the background, and frees the slots."""
        self.regret.close()
        self.fetcher.close()
        self.store.close()
        if self.tier is not None:
            self.tier.close()
        self.slots.close()

    def _make_prefetcher(self, counters: StageCounters, num_grades: int) -> Prefetcher:
        return Prefetcher(self.prefetch, self.fetcher, self.rows, counters, num_grades)

    def _initial_state(self) -> StepState:
        L, E = self.config.num_moe_layers, self.config.num_experts
        shape = PolicyShape(L, E, self.config.experts_per_token, self.config.hidden_size)
        guard = None if self._guard_window is None else init_guard(shape, self.rows.num_slots)
        state = StepState(init_residency(L, E, self.rows.num_slots), self.policy.init(shape), guard)
        return jax.device_put(state, self.device)


def policy_bytes(policy: Policy, shape: PolicyShape, *, is_guarded: bool) -> int:
    """Upper bound of what a policy takes on the device, its guard and the tables of residents included."""
    # As many slots as experts; the tables once for the state and, for moments, copies for the guard and for regret.
    tables = jax.eval_shape(lambda: init_residency(shape.num_layers, shape.num_experts, shape.num_experts))
    state = jax.eval_shape(lambda: policy.init(shape))
    guard = jax.eval_shape(lambda: init_guard(shape, shape.num_experts)) if is_guarded else ()
    params = [policy.layer_params(layer) for layer in range(shape.num_layers)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state, guard, [tables] * 4)))


def _next_routers(config: ModelConfig, dense: DenseWeights, layer_ids: list[Array]) -> list[NextRouter]:
    """For every MoE layer, what predicts the next one's experts; the last one's predicts its own and is not used."""
    layers = config.moe_layers
    following = [min(i + 1, len(layers) - 1) for i in range(len(layers))]
    return [NextRouter(*dense.router_of(layers[i]), layer_ids[i]) for i in following]


def _make_programs(dense: DenseWeights, policy: Policy, fields: Any, guard_window: int | None) -> Programs:
    kinds = set(dense.kinds)
    return Programs(
        decode={kind: make_decode_step(kind, policy, guard_window) for kind in kinds if kind.is_moe},
        prefill={kind: make_prefill_step(kind, policy) for kind in kinds if kind.is_moe},
        dense={kind: make_dense_step(kind) for kind in kinds if not kind.is_moe},
        expert_ffn=make_expert_ffn(fields),
        expert_ffn_group=make_expert_ffn_group(fields),
    )
