"""The jitted steps of prefill and decode: what runs on the device between two looks of the host.

One step per layer joins attention, router, residency lookup, counters and policy score; the host learns what it must
read from one packed integer array. The steps own no state: caches, residency and policy state go in, are donated and
come back. Programs are memoised: engines of one shape share what is compiled. Invariant: nothing that the policy or
the residency computes flows back into the hidden states.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashmoe_jax.engine.dense import LayerKind, Leaves
from flashmoe_jax.engine.guard import (
    GuardState,
    guard_step,
    guarded_keep,
    guarded_prompt_keep,
    is_in_fallback,
    see_token,
)
from flashmoe_jax.experts.ffn import add_expert_outputs, expert_ffn, expert_ffn_group
from flashmoe_jax.experts.residency import Residency, fill_free_slots, plan_step
from flashmoe_jax.models.attention import KVCache
from flashmoe_jax.models.decoder import RMSNorm
from flashmoe_jax.numerics import matmul
from flashmoe_jax.policy.base import Policy


class StepState(NamedTuple):
    """State of expert caching that every step passes on; donated."""

    residency: Residency
    policy: Any  # the policy's own NamedTuple
    guard: GuardState | None = None  # of a learned policy


class DecodeOutput(NamedTuple):
    """Device side of one decode step of one MoE layer."""

    x_BD: Array  # residual after attention
    h_BD: Array  # normed input of the experts
    dense_BD: Array | None  # what a shared expert adds
    weight_BX: Array
    row_BX: Array  # buffer row of each hit
    hit_BX: Array
    router_logits_BE: Array


class DecodePlan(NamedTuple):
    """Host side of the same step, unpacked from one int32 array."""

    expert_BX: np.ndarray  # -1 for a sequence that takes no part
    slot_BX: np.ndarray
    hit_BX: np.ndarray
    miss_expert: np.ndarray  # of the misses alone, best first
    miss_slot: np.ndarray  # num_slots + i is place i of the surplus
    evicted: np.ndarray  # -1 = none
    is_fallback: bool  # the guard let `decayed` choose who left
    predicted_BX: np.ndarray  # experts that the next MoE layer may miss, likeliest first; -1 where resident


class NextRouter(NamedTuple):
    """What looks ahead: norm and router of the next MoE layer, applied to this layer's residual."""

    scale_D: Array
    kernel_ED: Array
    layer: Array  # MoE layer id, int32


@functools.lru_cache(maxsize=64)
def make_decode_step(kind: LayerKind, policy: Policy, guard_window: int | None = None) -> Any:
    """The jitted decode step of one MoE layer kind; cache and state are donated.

    Its last argument is a `NextRouter`, or None, with which nothing is predicted.

    Args:
        guard_window: steps, for a policy under guard; None for one that is not.
    """

    def step(
        leaves: Leaves,
        x_BD: Array,
        cache: KVCache,
        position_B: Array,
        active_B: Array,
        state: StepState,
        policy_params: Any,
        layer: Array,
        row_of_slot_R: Array,
        next_router: NextRouter | None,
    ) -> tuple[DecodeOutput, KVCache, StepState, Array]:
        module = kind.merge(leaves)
        with jax.named_scope("attention"):
            x_B1D, h_B1D, new_cache = module.attend(x_BD[:, None], position_B[:, None], cache)
        x_BD, h_BD = x_B1D[:, 0], h_B1D[:, 0]
        with jax.named_scope("router"):
            routing = module.router(h_BD)
        dense_BD = module.dense_output(h_BD)
        # The barrier keeps the policy's consumers out of the fusions that compute the hidden states.
        expert_BX, logits_BE, hidden_BD = lax.optimization_barrier((routing.expert_id, routing.logits, h_BD))
        expert_BX = jnp.where(active_B[:, None], expert_BX, -1)
        with jax.named_scope("policy"):
            policy_state = policy.update(policy_params, state.policy, layer, expert_BX, logits_BE, hidden_BD)

            def keep() -> Array:
                return policy.score(policy_params, policy_state, layer)

            guard, is_fallback = state.guard, jnp.zeros((1,), jnp.int32)
            if guard is None:
                residency, plan = plan_step(state.residency, layer, expert_BX, keep)
            else:
                assert guard_window is not None
                guard = guard_step(guard, state.residency, layer, expert_BX, guard_window)
                is_fallback = is_in_fallback(guard, layer)[None].astype(jnp.int32)
                residency, plan = plan_step(state.residency, layer, expert_BX, lambda: guarded_keep(guard, layer, keep))
        row_BX = jnp.where(plan.is_hit, row_of_slot_R[jnp.maximum(jnp.where(plan.is_hit, plan.slot, 0), 0)], 0)
        with jax.named_scope("look_ahead"):
            predicted_BX = jnp.full_like(expert_BX, -1)
            if next_router is not None:
                residual_BD = lax.optimization_barrier(x_BD)
                guess_BX = _guess(next_router, residual_BD, expert_BX.shape[1], module.post_norm.eps)
                is_missing_BX = residency.slot_of_expert[next_router.layer][guess_BX] < 0
                predicted_BX = jnp.where(is_missing_BX & (expert_BX >= 0), guess_BX, -1)
        packed = jnp.concatenate(
            [
                expert_BX.reshape(-1),
                plan.slot.reshape(-1),
                plan.is_hit.reshape(-1).astype(jnp.int32),
                plan.miss_expert,
                plan.miss_slot,
                plan.evicted,
                is_fallback,
                predicted_BX.reshape(-1),
            ]
        )
        output = DecodeOutput(x_BD, h_BD, dense_BD, routing.weight, row_BX, plan.is_hit, logits_BE)
        assert new_cache is not None
        return output, new_cache, StepState(residency, policy_state, guard), packed

    return jax.jit(step, donate_argnames=("cache", "state"))


def _guess(router: NextRouter, x_TD: Array, top_k: int, eps: float) -> Array:
    """int32 `[T, X]`: the next router's choice if this layer's experts added nothing, likeliest first."""
    norm = RMSNorm(router.scale_D.shape[0], eps=eps, dtype=router.scale_D.dtype)
    norm.scale[...] = router.scale_D
    return lax.top_k(matmul(norm(x_TD), router.kernel_ED), top_k)[1].astype(jnp.int32)


def unpack_decode(packed: np.ndarray, batch: int, top_k: int, num_experts: int) -> DecodePlan:
    """Reads the packed array of a decode step."""
    pairs = batch * top_k
    most = min(pairs, num_experts)
    expert, slot, hit = (packed[i * pairs : (i + 1) * pairs].reshape(batch, top_k) for i in range(3))
    miss_expert, miss_slot, evicted = (packed[3 * pairs + i * most :][:most] for i in range(3))
    num_misses = int(np.count_nonzero(miss_expert >= 0))
    return DecodePlan(
        expert,
        slot,
        hit.astype(bool),
        miss_expert[:num_misses],
        miss_slot[:num_misses],
        evicted[:num_misses],
        bool(packed[-1 - pairs]),
        packed[-pairs:].reshape(batch, top_k),
    )


class PrefillOutput(NamedTuple):
    """Device side of the prefill of one MoE layer, tokens of all sequences in one axis (B*T)."""

    x_TD: Array
    h_TD: Array
    dense_TD: Array | None
    weight_TX: Array
    router_logits_TE: Array


class PrefillPlan(NamedTuple):
    """Host side of the same, unpacked from one int32 array."""

    expert_BTX: np.ndarray  # -1 for padding
    slot_before: np.ndarray  # [E]
    slot_after: np.ndarray  # [E], free slots given to the best missed experts
    keep: np.ndarray  # [E] float32
    predicted: np.ndarray  # [E], tokens that the next MoE layer may need each expert for; 0 where resident


@functools.lru_cache(maxsize=64)
def make_prefill_step(kind: LayerKind, policy: Policy) -> Any:
    """The jitted prefill of one MoE layer kind up to the experts; cache and state are donated.

    Its `next_router` is a `NextRouter`, or None, with which nothing is predicted.

    The policy sees the tokens one after the other, as decode would have shown them to it: token t of every sequence
    is one step.
    """

    def step(
        leaves: Leaves,
        x_BTD: Array,
        cache: KVCache,
        position_BT: Array,
        valid_BT: Array,
        state: StepState,
        policy_params: Any,
        layer: Array,
        next_router: NextRouter | None,
        *,
        attend_length: int,
    ) -> tuple[PrefillOutput, KVCache, StepState, Array]:
        B, T, D = x_BTD.shape
        module = kind.merge(leaves)
        with jax.named_scope("attention"):
            x_BTD, h_BTD, new_cache = module.attend(x_BTD, position_BT, cache, attend_length)
        # Batch and tokens are one axis from here on: experts do not care which sequence a token is of.
        h_TD = h_BTD.reshape(B * T, D)
        with jax.named_scope("router"):
            routing = module.router(h_TD)
        dense_TD = module.dense_output(h_TD)
        expert_TX, logits_TE, hidden_TD = lax.optimization_barrier((routing.expert_id, routing.logits, h_TD))
        expert_BTX = jnp.where(valid_BT[..., None], expert_TX.reshape(B, T, -1), -1)

        def one_token(states: tuple[Any, GuardState | None], token: tuple[Array, ...]) -> tuple[Any, None]:
            policy_state, guard = states
            policy_state = policy.update(policy_params, policy_state, layer, *token)
            return (policy_state, None if guard is None else see_token(guard, layer, token[0])), None

        with jax.named_scope("policy"):
            per_token = (expert_BTX, logits_TE.reshape(B, T, -1), hidden_TD.reshape(B, T, D))
            (policy_state, guard), _ = lax.scan(
                one_token, (state.policy, state.guard), tuple(jnp.moveaxis(a, 1, 0) for a in per_token)
            )

            def keep() -> Array:
                return policy.score(policy_params, policy_state, layer)

            keep_E = keep() if guard is None else guarded_prompt_keep(guard, layer, keep)
            E = keep_E.shape[0]
            flat = jnp.where(expert_BTX < 0, E, expert_BTX).reshape(-1)
            needed_E = jnp.zeros((E,), bool).at[flat].set(True, mode="drop")
            before_E = state.residency.slot_of_expert[layer]
            residency = fill_free_slots(state.residency, layer, needed_E, keep_E)
        predicted_E = jnp.zeros((E,), jnp.int32)
        if next_router is not None:
            with jax.named_scope("look_ahead"):
                residual_TD = lax.optimization_barrier(x_BTD.reshape(B * T, D))
                guess_TX = _guess(next_router, residual_TD, expert_TX.shape[1], module.post_norm.eps)
                predicted_E = predicted_E.at[jnp.where(valid_BT.reshape(-1, 1), guess_TX, E)].add(1, mode="drop")
                predicted_E = jnp.where(residency.slot_of_expert[next_router.layer] < 0, predicted_E, 0)
        packed = jnp.concatenate(
            [
                expert_BTX.reshape(-1),
                before_E,
                residency.slot_of_expert[layer],
                lax.bitcast_convert_type(keep_E, jnp.int32),
                predicted_E,
            ]
        )
        output = PrefillOutput(x_BTD.reshape(B * T, D), h_TD, dense_TD, routing.weight, logits_TE)
        assert new_cache is not None
        return output, new_cache, StepState(residency, policy_state, guard), packed

    return jax.jit(step, donate_argnames=("x_BTD", "cache", "state"), static_argnames="attend_length")


def unpack_prefill(packed: np.ndarray, batch: int, tokens: int, top_k: int, num_experts: int) -> PrefillPlan:
    """Reads the packed array of a prefill step."""
    ids, rest = packed[: batch * tokens * top_k], packed[batch * tokens * top_k :]
    before, after, keep, predicted = rest.reshape(4, num_experts)
    return PrefillPlan(ids.reshape(batch, tokens, top_k), before, after, keep.view(np.float32), predicted)


@functools.lru_cache(maxsize=64)
def make_dense_step(kind: LayerKind) -> Any:
    """The jitted step of a layer without experts, for prefill and decode alike; the cache is donated."""

    def step(
        leaves: Leaves, x_BTD: Array, cache: KVCache, position_BT: Array, *, attend_length: int
    ) -> tuple[Array, KVCache]:
        module = kind.merge(leaves)
        x_BTD, h_BTD, new_cache = module.attend(x_BTD, position_BT, cache, attend_length)
        assert new_cache is not None
        return x_BTD + module.mlp(h_BTD), new_cache

    return jax.jit(step, donate_argnames="cache", static_argnames="attend_length")


@functools.lru_cache(maxsize=64)
def make_expert_ffn(fields: Any) -> Any:
    """Jitted `expert_ffn` for one record layout. Hits and misses go through the same compiled program."""
    return jax.jit(lambda out, h, rows, row, active: expert_ffn(out, h, rows, row, active, fields))


@functools.lru_cache(maxsize=64)
def make_expert_ffn_group(fields: Any) -> Any:
    """Jitted `expert_ffn_group` for one record layout; the sums are donated."""
    return jax.jit(
        lambda y, h, rows, row, token, weight: expert_ffn_group(y, h, rows, row, token, weight, fields),
        donate_argnums=0,
    )


add_experts = jax.jit(add_expert_outputs)


@jax.jit
def add_group_sums(x_TD: Array, y_TD: Array, dense_TD: Array | None) -> Array:
    """Residual after the experts of a prefill layer."""
    return x_TD + (y_TD if dense_TD is None else y_TD + dense_TD)
