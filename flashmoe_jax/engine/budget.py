"""Memory budgets: from what the user declares to the slots per layer, and to the bytes that are promised.

Owns the arithmetic and every refusal. A budget in per cent or slots sizes the slots alone; `--device-budget` in bytes
is everything on the device; `--memory-limit` is the whole process, on the CPU backend, where device memory is host
memory. Invariant: the parts of a `MemoryPlan` add up to what was promised, and the promise is an upper bound of the
measured peak.
"""

import dataclasses
import math
import re

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.errors import BudgetError
from flashmoe_jax.experts.fetcher import reads_in_flight
from flashmoe_jax.experts.host_tier import MAX_COMING
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.experts.slots import MAX_LEAVING
from flashmoe_jax.models.attention import QUERY_BLOCK

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}

# Share of what is free that is left to others when no budget is given.
HEADROOM = 0.05
# Staging ring: enough records to keep reads in flight while one computes, in at most about this many bytes.
STAGING_BYTES = 128 << 20
MIN_STAGING, MAX_STAGING = 2, 8
# Compiled programs and XLA's own heap after loading; measured, see docs/decisions.md.
COMPILED_BYTES = 320 << 20
# Tokens whose experts are computed together in prefill.
GROUP_SIZES = (1, 8, 32, 128, 512)


@dataclasses.dataclass(frozen=True)
class Budget:
    """A declared budget: exactly one of the three is set."""

    percent: float | None = None
    slots: int | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Reads `25%`, `16slots`, or bytes as `parse_size` does."""
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip()):
            percent = float(match[1])
            if not 0 < percent <= 100:
                raise BudgetError(f"budget {text} is out of range; a share of the experts is above 0% and at most 100%")
            return cls(percent=percent)
        if match := re.fullmatch(r"(\d+) ?slots?", text.strip()):
            return cls(slots=int(match[1]))
        return cls(num_bytes=parse_size(text))


def parse_size(text: str) -> int:
    """Bytes of `12`, `512MiB`, `1.5GB`.

    Raises:
        BudgetError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B|)", text.strip())
    if not match:
        raise BudgetError(f"size {text!r} is not understood; write for example 25%, 16slots, 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the memory must serve."""

    context: int  # cache tokens per sequence, prompt and output together
    batch_size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where every promised byte goes."""

    slots_per_layer: int
    num_staging: int
    host_records: int  # of the host tier
    dense_bytes: int
    kv_bytes: int
    policy_bytes: int  # networks and state of the policy and its guard, tables of residents
    workspace_bytes: int
    staging_bytes: int
    slot_bytes: int
    host_bytes: int  # read buffers in flight
    runtime_bytes: int  # interpreter, libraries, compiled code

    @property
    def device_bytes(self) -> int:
        kept = self.dense_bytes + self.kv_bytes + self.policy_bytes
        return kept + self.workspace_bytes + self.staging_bytes + self.slot_bytes

    @property
    def process_bytes(self) -> int:
        """The whole process on the CPU backend."""
        return self.device_bytes + self.host_bytes + self.runtime_bytes


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-value // multiple) * multiple


def prompt_bucket(num_tokens: int) -> int:
    """Padded length of a prompt: few sizes, so that few programs are compiled."""
    if num_tokens <= 512:
        return max(16, 1 << (num_tokens - 1).bit_length())
    return round_up(num_tokens, 256)


def cache_capacity(context: int) -> int:
    """Positions of the KV cache for a context of so many tokens."""
    return round_up(context, 64)


def kv_bytes(config: ModelConfig, request: Request) -> int:
    """KV cache of all layers."""
    itemsize = 4 if config.weight_dtype == "float32" else 2
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    return per_token * cache_capacity(request.context) * request.batch_size


def workspace_bytes(config: ModelConfig, layout: RecordLayout, request: Request) -> int:
    """Upper bound of the transient arrays of the largest step: prefill of a prompt that fills the context."""
    B, tokens = request.batch_size, request.batch_size * prompt_bucket(request.context)
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    itemsize = 4 if config.weight_dtype == "float32" else 2
    hidden = max(config.dense_hidden if config.num_moe_layers < config.num_layers else 0, config.shared_expert_hidden)
    # Residual, normed input, expert sums, dense output, one more while a step turns old into new.
    per_token = 4 * (6 * D + 3 * (N + 2 * K) * H + 3 * hidden + 4 * config.num_experts) + 8 * config.experts_per_token
    # Keys and values of one layer as the attention reads them, and scores of one block of queries three times over.
    capacity = cache_capacity(request.context)
    attention = 2 * B * capacity * K * H * (itemsize + 4) + 3 * 4 * B * N * QUERY_BLOCK * capacity
    group = 4 * GROUP_SIZES[-1] * (3 * config.expert_hidden + 3 * D)
    # The matrices of one record, taken out of the buffer, and once more while float16 or bfloat16 is widened.
    record = layout.record_bytes * (1 if itemsize == 4 else 3)
    decode = 4 * B * (config.experts_per_token * D * 3 + 3 * config.vocab_size)
    return tokens * per_token + attention + group + record + decode


def host_bytes(config: ModelConfig, layout: RecordLayout, num_staging: int, *, is_cpu: bool) -> int:
    """Host memory of reads: what a reader holds besides its destination; off the CPU also where records land."""
    transient = round(reads_in_flight(layout.record_bytes) * layout.record_bytes * 1.25)
    landings = num_staging + config.experts_per_token + MAX_LEAVING
    return transient if is_cpu else transient + landings * layout.record_bytes


def plan_memory(
    config: ModelConfig,
    layout: RecordLayout,
    request: Request,
    *,
    budget: Budget | None,
    memory_limit: int | None,
    dense_bytes: int,
    policy_bytes: int,
    runtime_bytes: int,
    available_bytes: int,
    total_bytes: int,
    is_cpu: bool,
    host_budget: int | None = None,
) -> MemoryPlan:
    """Sizes the slots. Budgets in bytes are upper bounds: where less is free, the slots follow what is free.

    Args:
        budget: `--device-budget`; None for everything free, less HEADROOM.
        memory_limit: `--memory-limit` in bytes, CPU backend only; None for none.
        dense_bytes: of the dense weights, exact.
        policy_bytes: of the policy, see `expert_memory.policy_bytes`.
        runtime_bytes: what the process holds besides everything planned here.
        available_bytes: memory that this process holds or could still get, before anything planned here.
        total_bytes: memory of the device, or of the machine or control group, free or not.
        is_cpu: whether device memory is host memory.
        host_budget: bytes of host memory for records beside the slots; None for none.

    Raises:
        BudgetError: too small (the message gives the smallest that works), larger than memory, or without effect.
    """
    if memory_limit is not None and not is_cpu:
        raise BudgetError(
            "--memory-limit bounds the process on the CPU backend only; on this device use --device-budget"
        )
    host_records = _host_records(host_budget, layout, is_cpu=is_cpu)
    E, L, X = config.num_experts, config.num_moe_layers, config.experts_per_token
    num_staging = min(MAX_STAGING, max(MIN_STAGING, STAGING_BYTES // layout.record_bytes))
    fixed = MemoryPlan(
        slots_per_layer=0,
        num_staging=num_staging,
        host_records=host_records,
        dense_bytes=dense_bytes,
        kv_bytes=kv_bytes(config, request),
        policy_bytes=policy_bytes,
        workspace_bytes=workspace_bytes(config, layout, request)
        + (MAX_COMING * layout.record_bytes if host_records else 0),
        staging_bytes=num_staging * layout.record_bytes,
        slot_bytes=0,
        host_bytes=host_bytes(config, layout, num_staging, is_cpu=is_cpu) + host_records * layout.record_bytes,
        runtime_bytes=runtime_bytes,
    )
    layer_of_slots = L * layout.record_bytes

    def with_slots(slots: int) -> MemoryPlan:
        return dataclasses.replace(fixed, slots_per_layer=slots, slot_bytes=slots * layer_of_slots)

    limits: list[tuple[str, int, int]] = []  # (what the user may change, its bytes, bytes without slots)
    if memory_limit is not None:
        limits.append((f"--memory-limit {format_size(memory_limit)}", memory_limit, fixed.process_bytes))
    if budget is not None and budget.num_bytes is not None:
        limits.append((f"--device-budget {format_size(budget.num_bytes)}", budget.num_bytes, fixed.device_bytes))
    for name, limit, without_slots in limits:
        if limit > total_bytes:
            raise BudgetError(
                f"{name} is more than the {format_size(total_bytes)} of memory there is; give at most that"
            )
        smallest = without_slots + X * layer_of_slots
        if limit < smallest:
            raise BudgetError(
                f"{name} is too small: dense weights, KV cache, workspace and {X} slots per layer need "
                f"{format_size(smallest, up=True)}; give at least that, or a shorter context"
            )
    wanted = _wanted_slots(budget, E, X)
    fitting = [(limit - without_slots) // layer_of_slots for _, limit, without_slots in limits]
    if wanted is not None and fitting and fitting[0] < wanted:
        raise BudgetError(
            f"{wanted} slots per layer need {format_size(with_slots(wanted).process_bytes, up=True)}, more than "
            f"{limits[0][0]}; give fewer slots or a larger limit"
        )
    needed_without_slots = fixed.process_bytes if is_cpu else fixed.device_bytes
    most = (available_bytes - needed_without_slots) // layer_of_slots
    if wanted is None:
        free_bytes = available_bytes if limits else int(available_bytes * (1 - HEADROOM))
        # At the least top_k: a machine that has room for no more is used to its limit.
        fitting.append(max((free_bytes - needed_without_slots) // layer_of_slots, X))
    slots = min([E, *fitting] + ([] if wanted is None else [wanted]))
    if slots > most:
        what_helps = f"give at most {most}slots" if most >= X else "free memory, or give a shorter context"
        needed = needed_without_slots + slots * layer_of_slots
        raise BudgetError(
            f"{slots} slots per layer need {format_size(needed, up=True)} of memory and "
            f"{format_size(max(0, available_bytes))} are available; {what_helps}"
        )
    return with_slots(slots)


def _host_records(host_budget: int | None, layout: RecordLayout, *, is_cpu: bool) -> int:
    """Records of the host tier."""
    if host_budget is None:
        return 0
    if is_cpu:
        raise BudgetError(
            "--host-budget has no effect on the CPU backend, where slots are host memory themselves; leave it out and "
            "give the bytes to --memory-limit or --device-budget"
        )
    records = host_budget // layout.record_bytes
    if records < 1:
        raise BudgetError(
            f"--host-budget {format_size(host_budget)} has room for no expert; give at least "
            f"{format_size(layout.record_bytes, up=True)}"
        )
    return records


def _wanted_slots(budget: Budget | None, num_experts: int, top_k: int) -> int | None:
    """Slots per layer that a budget in per cent or slots asks for."""
    if budget is None or budget.num_bytes is not None:
        return None
    if budget.percent is not None:
        slots, given = math.floor(budget.percent * num_experts / 100), f"{budget.percent:g}%"
    else:
        assert budget.slots is not None
        slots, given = budget.slots, f"{budget.slots}slots"
    if slots < top_k:
        smallest = math.ceil(100 * top_k / num_experts * 100) / 100
        raise BudgetError(
            f"budget {given} gives {slots} slots per layer and a token needs {top_k} of {num_experts} experts; "
            f"give at least {smallest:g}% or {top_k}slots"
        )
    if slots > num_experts:
        raise BudgetError(f"budget {given} is more than the {num_experts} experts of a layer; give at most 100%")
    return slots


def format_size(num_bytes: int, *, up: bool = False) -> str:
    """`1.25GiB`, `37.5MiB`; rounded up where the number is a minimum that must work when given back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit]:
            scaled = num_bytes / _UNITS[unit] * 100
            return f"{(math.ceil(scaled) if up else math.floor(scaled)) / 100:g}{unit}"
    return f"{num_bytes}B"
