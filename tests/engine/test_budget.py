"""Budgets: what is understood, what is refused, and that a number a refusal names really works."""

import dataclasses
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_hf_config

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.engine.budget import (
    Budget,
    MemoryPlan,
    Request,
    cache_capacity,
    format_size,
    parse_size,
    plan_memory,
    prompt_bucket,
)
from flashmoe_jax.errors import BudgetError
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.models.weights import expert_field_specs

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PLENTY = 1 << 45
deterministic = settings(derandomize=True, deadline=None, max_examples=60)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12", 12),
        ("12B", 12),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        (" 3 GiB ", 3 * GIB),
        ("0.5TiB", GIB * 512),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size
    assert Budget.parse(text) == Budget(num_bytes=size)


@pytest.mark.parametrize("text", ["", "lots", "-3GiB", "3gib", "3G", "1e9", "3 GiB 2", "nan"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(BudgetError, match=r"is not understood; write for example 25%, 16slots, 512MiB or 4GiB"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("25%", Budget(percent=25)),
        ("12.5%", Budget(percent=12.5)),
        ("100%", Budget(percent=100)),
        ("16slots", Budget(slots=16)),
        ("1slot", Budget(slots=1)),
        ("8 slots", Budget(slots=8)),
    ],
)
def test_shares_and_slots(text: str, budget: Budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["0%", "100.1%", "250%"])
def test_a_share_is_between_nothing_and_everything(text: str):
    with pytest.raises(BudgetError, match=f"budget {text} is out of range; .* above 0% and at most 100%"):
        Budget.parse(text)


@deterministic
@given(st.integers(1, 1 << 44))
def test_a_size_that_was_rounded_up_is_enough(num_bytes: int):
    assert num_bytes <= parse_size(format_size(num_bytes, up=True)) <= num_bytes * 1.01 + 1
    assert parse_size(format_size(num_bytes)) <= num_bytes


def model(num_experts: int = 64, top_k: int = 8, dtype: str = "bfloat16") -> tuple[ModelConfig, RecordLayout]:
    config = ModelConfig.from_hf(
        tiny_hf_config(
            "olmoe",
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            hidden_size=256,
            intermediate_size=512,
            torch_dtype=dtype,
        )
    )
    return config, RecordLayout.for_experts(expert_field_specs(config), dtype)


CONFIG, LAYOUT = model()
LAYER_OF_SLOTS = CONFIG.num_moe_layers * LAYOUT.record_bytes


def plan(
    budget: str | None = None,
    *,
    limit: int | None = None,
    available: int = PLENTY,
    total: int = PLENTY,
    is_cpu: bool = True,
    of: tuple[ModelConfig, RecordLayout] = (CONFIG, LAYOUT),
    context: int = 100,
    batch_size: int = 1,
) -> MemoryPlan:
    return plan_memory(
        *of,
        Request(context=context, batch_size=batch_size),
        budget=None if budget is None else Budget.parse(budget),
        memory_limit=limit,
        dense_bytes=3 * MIB,
        policy_bytes=MIB,
        runtime_bytes=500 * MIB if is_cpu else 0,
        available_bytes=available,
        total_bytes=total,
        is_cpu=is_cpu,
    )


@pytest.mark.parametrize(
    ("budget", "num_experts", "top_k", "slots"),
    [
        ("25%", 64, 8, 16),
        ("12.5%", 64, 8, 8),
        ("14%", 64, 8, 8),  # floor of 8.96
        ("20%", 60, 4, 12),
        ("5%", 60, 3, 3),
        ("100%", 60, 4, 60),
        ("9slots", 60, 4, 9),
    ],
)
def test_shares_and_slots_size_the_slots_alone(budget: str, num_experts: int, top_k: int, slots: int):
    assert plan(budget, of=model(num_experts, top_k)).slots_per_layer == slots


def test_the_parts_add_up():
    for is_cpu in (True, False):
        p = plan("16slots", is_cpu=is_cpu, batch_size=3)
        assert p.slot_bytes == 16 * LAYER_OF_SLOTS
        assert p.staging_bytes == p.num_staging * LAYOUT.record_bytes
        assert 2 <= p.num_staging <= 8
        parts = ("dense_bytes", "kv_bytes", "policy_bytes", "workspace_bytes", "staging_bytes", "slot_bytes")
        assert p.device_bytes == sum(getattr(p, part) for part in parts)
        assert p.process_bytes == p.device_bytes + p.host_bytes + p.runtime_bytes
        named = {f.name for f in dataclasses.fields(p)} - {"slots_per_layer", "num_staging"}
        assert p.process_bytes == sum(getattr(p, name) for name in named)
    # Keys and values of 128 positions, 3 sequences, 3 layers, 2 heads of 64, two bytes each.
    assert p.kv_bytes == 2 * 128 * 3 * 3 * 2 * 64 * 2


def test_longer_contexts_and_larger_batches_cost_more():
    small, long, wide = (plan("16slots", **more) for more in ({}, {"context": 1000}, {"batch_size": 4}))
    for part in ("kv_bytes", "workspace_bytes"):
        assert getattr(small, part) < getattr(long, part)
        assert getattr(small, part) < getattr(wide, part)


@pytest.mark.parametrize(("budget", "given"), [("12%", "12%"), ("7slots", "7slots"), ("0slots", "0slots")])
def test_too_few_slots_are_refused_with_the_least_that_works(budget: str, given: str):
    with pytest.raises(BudgetError, match=rf"budget {given} gives .* give at least 12\.5% or 8slots"):
        plan(budget)
    assert plan("12.5%").slots_per_layer == plan("8slots").slots_per_layer == 8


@deterministic
@given(num_experts=st.integers(2, 300), data=st.data())
def test_the_share_that_a_refusal_names_works(num_experts: int, data):
    top_k = data.draw(st.integers(1, num_experts))
    percent = data.draw(st.floats(0.01, 100))
    assume(int(percent * num_experts / 100) < top_k)
    of = model(num_experts, top_k)
    with pytest.raises(BudgetError) as refused:
        plan(f"{percent:.4f}%", of=of)
    share, slots = re.search(r"give at least ([\d.]+%) or (\d+slots)", str(refused.value)).groups()
    assert plan(share, of=of).slots_per_layer == plan(slots, of=of).slots_per_layer == top_k


def test_more_slots_than_experts_are_refused():
    with pytest.raises(BudgetError, match=r"budget 65slots is more than the 64 experts of a layer; give at most 100%"):
        plan("65slots")


@deterministic
@given(
    num_bytes=st.integers(1, 700 * MIB),
    is_limit=st.booleans(),
    context=st.integers(1, 256),
    batch_size=st.integers(1, 4),
)
def test_bytes_that_a_refusal_names_work(num_bytes: int, is_limit: bool, context: int, batch_size: int):
    def attempt(size: str) -> MemoryPlan:
        if is_limit:
            return plan(limit=parse_size(size), context=context, batch_size=batch_size)
        return plan(size, context=context, batch_size=batch_size)

    def promised(p: MemoryPlan) -> int:
        return p.process_bytes if is_limit else p.device_bytes

    try:
        p = attempt(str(num_bytes))
    except BudgetError as error:
        name = "--memory-limit" if is_limit else "--device-budget"
        found = re.fullmatch(
            rf"{name} \S+ is too small: .* need (\S+); give at least that, or a shorter context", str(error)
        )
        p = attempt(found[1])
        assert p.slots_per_layer == CONFIG.experts_per_token
        # It is the smallest.
        with pytest.raises(BudgetError):
            attempt(str(promised(p) - 1))
    else:
        assert promised(p) <= num_bytes
        full = p.slots_per_layer == CONFIG.num_experts
        assert full or promised(p) + LAYER_OF_SLOTS > num_bytes


def test_budget_and_limit_both_bind():
    limit_only, budget_only = plan(limit=GIB), plan("200MiB")
    both = plan("200MiB", limit=GIB)
    assert both.slots_per_layer == min(limit_only.slots_per_layer, budget_only.slots_per_layer)
    tight = limit_only.process_bytes - 20 * LAYER_OF_SLOTS
    assert plan("200MiB", limit=tight).slots_per_layer == limit_only.slots_per_layer - 20
    assert plan("16slots", limit=GIB).slots_per_layer == 16


def test_slots_beyond_the_limit_are_refused_with_a_limit_that_works():
    tight = plan("8slots").process_bytes + LAYER_OF_SLOTS
    with pytest.raises(BudgetError, match=r"16 slots per layer need \S+, more than --memory-limit") as refused:
        plan("16slots", limit=tight)
    needed = re.search(r"need (\S+),", str(refused.value))[1]
    assert plan("16slots", limit=parse_size(needed)).slots_per_layer == 16


@pytest.mark.parametrize("is_cpu", [True, False])
def test_without_a_budget_everything_free_is_used_less_five_per_cent(is_cpu: bool):
    available = 600 * MIB
    p = plan(available=available, is_cpu=is_cpu)
    needed = p.process_bytes if is_cpu else p.device_bytes
    assert needed <= 0.95 * available < needed + LAYER_OF_SLOTS or p.slots_per_layer == CONFIG.num_experts
    assert plan(available=PLENTY, is_cpu=is_cpu).slots_per_layer == CONFIG.num_experts


@pytest.mark.parametrize(("budget", "limit"), [("100GiB", None), (None, 100 * GIB), ("1GiB", 100 * GIB)])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_more_than_there_is_is_refused(is_cpu: bool, budget: str | None, limit: int | None):
    if limit is not None and not is_cpu:
        return
    with pytest.raises(BudgetError, match=r"100GiB is more than the 8GiB of memory there is; give at most that"):
        plan(budget, limit=limit, available=7 * GIB, total=8 * GIB, is_cpu=is_cpu)


@pytest.mark.parametrize(("budget", "limit"), [("640MiB", None), (None, 640 * MIB)])
def test_a_bound_that_is_not_all_free_is_kept_with_fewer_slots(budget: str | None, limit: int | None):
    available = plan("20slots").process_bytes
    p = plan(budget, limit=limit, available=available, total=GIB)
    assert p.slots_per_layer == 20


def test_slots_that_do_not_fit_memory_are_refused_with_what_fits():
    available = plan("20slots").process_bytes
    with pytest.raises(BudgetError, match=r"64 slots per layer need .* are available; give at most 20slots") as refused:
        plan("100%", available=available)
    assert "\n" not in str(refused.value)
    assert plan("20slots", available=available).slots_per_layer == 20


@pytest.mark.parametrize(("budget", "limit"), [("8slots", None), (None, None), ("1GiB", None), (None, GIB)])
def test_a_model_that_does_not_fit_at_all_is_refused(budget: str | None, limit: int | None):
    available = plan("8slots").process_bytes
    assert plan(budget, limit=limit, available=available).slots_per_layer == 8
    with pytest.raises(BudgetError, match=r"8 slots per layer need .*; free memory, or give a shorter context"):
        plan(budget, limit=limit, available=available - 1)


def test_a_limit_of_the_process_is_for_the_cpu_only():
    with pytest.raises(BudgetError, match=r"--memory-limit .* CPU backend only; on this device use --device-budget"):
        plan(limit=GIB, is_cpu=False)


def test_padded_lengths_are_few_and_long_enough():
    lengths = range(1, 5000)
    buckets = [prompt_bucket(n) for n in lengths]
    assert all(n <= b for n, b in zip(lengths, buckets, strict=True))
    assert buckets == sorted(buckets)
    assert len({b for b in buckets if b <= 512}) == 6
    assert all(b % 256 == 0 for b in buckets if b > 512)
    assert [cache_capacity(n) for n in (1, 64, 65)] == [64, 64, 128]
