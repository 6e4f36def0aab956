"""The engine: one loaded model, its expert memory, and what a user asks of it.

`load` opens a model directory, restores the dense weights and sizes the slots; no expert is read. An `Engine` serves
sessions one after the other; they share the slots. Invariant: tokens do not depend on budget, policy or reader.
"""

import dataclasses
import enum
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flashmoe_jax.config import ModelConfig, PrefetchMode, ReaderName
from flashmoe_jax.engine.budget import (
    COMPILED_BYTES,
    Budget,
    MemoryPlan,
    Request,
    cache_capacity,
    format_size,
    parse_size,
    plan_memory,
)
from flashmoe_jax.engine.dense import DenseWeights, split_dense_weights
from flashmoe_jax.engine.expert_memory import ExpertMemory, policy_bytes
from flashmoe_jax.engine.generation import GenerationTimes, Limits, Piece, generate_pieces
from flashmoe_jax.engine.guard import WINDOW_STEPS
from flashmoe_jax.engine.memory import available_bytes, peak_rss_bytes, rss_bytes, total_bytes
from flashmoe_jax.engine.platform import configure_backend
from flashmoe_jax.engine.sampling import SamplingParams
from flashmoe_jax.engine.session import Session
from flashmoe_jax.errors import BudgetError, ConfigError, PromptError
from flashmoe_jax.model_dir import POLICY_NAME, ModelDirectory
from flashmoe_jax.policy import ChosenPolicy, PolicyShape, check_policy_name, choose_policy
from flashmoe_jax.telemetry.trace import WIDE_COLUMNS, Trace, TraceRecorder, load_trace, popularity, save_trace
from flashmoe_jax.text.generation_config import GenerationDefaults
from flashmoe_jax.text.tokenizer import Tokenizer

# Context of an engine that was not told how much its prompts and answers will need.
DEFAULT_CONTEXT = 4096


class Engine:
    """A model ready to generate. Use `load`; close it, or use it as a context manager."""

    def __init__(
        self,
        *,
        directory: ModelDirectory,
        dense: DenseWeights,
        memory: ExpertMemory,
        plan: MemoryPlan,
        request: Request,
        load_s: float,
        policy_name: str,
        record_trace: bool,
        record_columns: Collection[str] = (),
    ):
        self.config: ModelConfig = directory.config
        self.plan = plan
        self.policy_name = policy_name  # kind and, of a learned policy, where it comes from
        self.memory = memory
        self._dense, self._request = dense, request
        self._path = directory.path
        self._load_s = load_s
        self._times = GenerationTimes()
        self._num_sequences = 0
        self._is_closed = False
        self.trace_meta: dict[str, Any] = {
            "model": directory.path.name,
            "family": str(self.config.family),
            "experts": self.config.num_experts,
            "top_k": self.config.experts_per_token,
        }
        self._recorder = TraceRecorder(self.trace_meta, record_columns) if record_trace else None
        has_tokenizer = (directory.path / "tokenizer.json").exists()
        self.tokenizer: Tokenizer | None = Tokenizer.from_dir(directory.path) if has_tokenizer else None
        self.defaults = GenerationDefaults.from_dir(directory.path)

    def session(self, batch_size: int = 1, context: int | None = None) -> Session:
        """A new session with empty caches.

        Args:
            batch_size: sequences.
            context: cache tokens per sequence; None for all that was loaded for.

        Raises:
            PromptError: more sequences or tokens than the engine was loaded for.
            ConfigError: the engine is closed.
        """
        if self._is_closed:
            raise ConfigError("the engine is closed; load the model again")
        context = self._request.context if context is None else context
        limit = self._request
        if cache_capacity(context) > cache_capacity(limit.context) or batch_size > limit.batch_size:
            raise PromptError(
                f"{batch_size} sequences of {context} tokens are asked for and the engine was loaded for "
                f"{limit.batch_size} of {limit.context}; load it with a larger max_context or batch_size"
            )
        first = self._num_sequences
        self._num_sequences += batch_size
        return Session(
            self._dense,
            self.memory,
            batch_size=batch_size,
            context=context,
            first_seq_id=first,
            recorder=self._recorder,
        )

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        session: Session | None = None,
    ) -> Iterator[Piece]:
        """Generates; yields a `Piece` per token and sequence, as they are made.

        Args:
            prompts: one prompt or a batch, as text or as token ids.
            max_new_tokens: at most so many tokens per sequence.
            sampling: for all sequences, or one each; None for the model's own defaults.
            stop: strings that end a sequence; they are not part of its text.
            stop_token_ids: ids that end a sequence; None for the model's own.
            ignore_eos: whether no id ends a sequence.
            session: to go on with; None for a new one that is dropped afterwards.

        Raises:
            PromptError: an empty prompt, no tokenizer for text, or more tokens than the context has room for.
        """
        ids = self._encode(prompts)
        if max_new_tokens < 1:
            raise PromptError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        longest = max((len(p) for p in ids), default=0)
        if session is None:
            session = self.session(len(ids), context=self._checked_context(longest, max_new_tokens))
        if sampling is None:
            sampling = self.defaults.sampling
            if not self.defaults.do_sample:
                sampling = dataclasses.replace(sampling, temperature=0.0)
        params = [sampling] * len(ids) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(ids):
            raise PromptError(f"{len(params)} sampling parameters are given for {len(ids)} prompts; give one each")
        if stop and self.tokenizer is None:
            raise PromptError("stop strings need a tokenizer, and the model has none; use stop_token_ids")
        if ignore_eos:
            stop_ids: frozenset[int] = frozenset()
        else:
            stop_ids = frozenset(self.defaults.eos_token_ids if stop_token_ids is None else stop_token_ids)
        limits = Limits(max_new_tokens=max_new_tokens, stop_token_ids=stop_ids, stop=tuple(stop))
        self._times = GenerationTimes()
        return generate_pieces(session, ids, params, limits, self.tokenizer, self._times)

    def stats(self) -> dict[str, Any]:
        """Counters, times and bytes since loading, decode's at the top level (the design's `--json` object).

        `ttft_ms` and `tpot_ms` are of the last generation; None where nothing was measured yet.
        """
        steps_ms = np.array(self._times.step_s) * 1e3
        plan, memory = self.plan, self.memory
        watch = memory.guard_watch
        return {
            "policy": memory.policy.name,
            "policy_is_learned": memory.policy.is_learned,
            "reader": memory.store.reader,
            "prefetch": str(memory.prefetch),
            "slots_per_layer": plan.slots_per_layer,
            **memory.decode_counters.to_json(),
            "regret": memory.regret.value(),
            "fallback_share": None if watch is None else watch.fallback_share,
            "falls": None if watch is None else watch.num_falls,
            "returns": None if watch is None else watch.num_returns,
            "load_ms": round(self._load_s * 1e3, 3),
            "ttft_ms": None if self._times.ttft_s is None else round(self._times.ttft_s * 1e3, 3),
            "tpot_ms": {
                name: round(float(np.percentile(steps_ms, q)), 3) if len(steps_ms) else None
                for name, q in (("p50", 50), ("p95", 95))
            },
            "device_bytes": plan.device_bytes,
            "host_bytes": plan.host_bytes,
            "runtime_bytes": plan.runtime_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "prefill": memory.prefill_counters.to_json(),
        }

    def take_notes(self) -> list[str]:
        """What a person should know, a line each, and was not told by an earlier call."""
        watch = self.memory.guard_watch
        return [] if watch is None else watch.take_notes()

    def summary_line(self) -> str:
        """The last generation in one line for a person."""
        times, counters = self._times, self.memory.decode_counters
        prefill = self.memory.prefill_counters
        parts = []
        if times.ttft_s is not None:
            parts.append(f"TTFT {times.ttft_s:.2f} s")
        if times.step_s:
            parts.append(f"{len(times.step_s) / sum(times.step_s):.2f} tokens/s")
        if counters.hit_rate is not None:
            parts.append(f"hit rate {counters.hit_rate:.1%}")
        read = counters.read_bytes + prefill.read_bytes
        parts.append(f"{format_size(read)} read ({format_size(prefill.read_bytes)} in prefill)")
        return ", ".join(parts)

    def plan_line(self) -> str:
        """The memory plan and the policy in one line for a person."""
        plan, config = self.plan, self.config
        share = plan.slots_per_layer / config.num_experts
        return (
            f"{plan.slots_per_layer} of {config.num_experts} experts per layer in slots ({share:.0%}), "
            f"policy {self.policy_name}, "
            f"device {format_size(plan.device_bytes)}: dense {format_size(plan.dense_bytes)}, "
            f"KV cache {format_size(plan.kv_bytes)}, policy state {format_size(plan.policy_bytes)}, "
            f"workspace {format_size(plan.workspace_bytes)}, "
            f"staging {format_size(plan.staging_bytes)}, slots {format_size(plan.slot_bytes)}"
        )

    def trace(self) -> Trace:
        """The routing recorded so far; the engine must have been loaded with `record_trace`."""
        if self._recorder is None:
            raise ConfigError("no trace was recorded; load the engine with record_trace=True")
        return self._recorder.trace()

    def take_trace(self) -> Trace:
        """The routing recorded since the last call, which is then forgotten."""
        if self._recorder is None:
            raise ConfigError("no trace was recorded; load the engine with record_trace=True")
        return self._recorder.take()

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the routing recorded so far."""
        save_trace(self.trace(), path)

    def close(self) -> None:
        """Waits for reads and frees the slots; may be called twice."""
        self._is_closed = True
        self.memory.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompts: Any) -> list[list[int]]:
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]
        if not len(prompts):
            raise PromptError("no prompt is given; give at least one")
        ids = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise PromptError(f"{self._path} has no tokenizer.json; give prompts as token ids")
                prompt = self.tokenizer.encode(prompt)
            if not len(prompt):
                raise PromptError("a prompt is empty; give at least one token")
            ids.append([int(t) for t in prompt])
        return ids

    def _checked_context(self, prompt_tokens: int, max_new_tokens: int) -> int:
        context = prompt_tokens + max_new_tokens
        if context > self._request.context:
            raise PromptError(
                f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the context of "
                f"{self._request.context}; shorten the prompt, ask for fewer, or load with a larger max_context"
            )
        return context


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    device_budget: str | None = None,
    memory_limit: str | None = None,
    host_budget: str | None = None,
    policy: str = "auto",
    policy_trace: str | os.PathLike[str] | None = None,
    guard: bool | None = None,
    reader: str = "auto",
    prefetch: str = "auto",
    max_context: int | None = None,
    batch_size: int = 1,
    record_trace: bool = False,
    record_columns: Collection[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> Engine:
    """Loads a model; reads no expert.

    Args:
        path: a model directory, a Hugging Face directory or a hub name (converted on first use); None for the
            bundled model.
        device_budget: `25%` or `16slots` sizes the slots alone; `4GiB` is everything on the device; None takes
            everything free, less 5 %.
        memory_limit: bytes for the whole process (`4GiB`), on the CPU backend.
        host_budget: bytes of host memory for experts that leave the slots (`8GiB`), on a GPU.
        policy: eviction policy, one of `flashmoe_jax.policy.NAMES` or a folder that the training command wrote;
            "auto" takes the model directory's own, else `shared`.
        policy_trace: trace whose popular experts `static` keeps; None for those that the model directory brings.
        guard: whether a learned policy falls back to `decayed` where it reads more; None for yes.
        reader: how records are read, one of `config.ReaderName`; "auto" takes what is fastest here and now.
        prefetch: when experts are read ahead of their layer, one of `config.PrefetchMode`; "auto" where it should pay.
        max_context: tokens per sequence, prompt and output; None for the model's own maximum, at most 4096.
        batch_size: most sequences generated together.
        record_trace: whether to record the routing of every token.
        record_columns: what else to record, of "router_logits" and "hidden" (the router's input).
        cache_dir: where converted models are kept; None for the user's cache directory.

    Raises:
        FlashMoEError: anything the caller can mend; see the subclasses.
    """
    from flashmoe_jax.resolve import resolve_model

    check_policy_name(policy)
    if unknown := set(record_columns) - set(WIDE_COLUMNS):
        raise ConfigError(f"record_columns names {', '.join(sorted(unknown))}; choose of {', '.join(WIDE_COLUMNS)}")
    _check_choice("reader", reader, ReaderName)
    _check_choice("prefetch", prefetch, PrefetchMode)
    configure_backend(device_budget)
    budget = None if device_budget is None else Budget.parse(device_budget)
    limit = None if memory_limit is None else parse_size(memory_limit)
    directory = ModelDirectory.open(resolve_model(path, cache_dir))
    began = time.perf_counter()
    config = directory.config
    request = Request(context=_context(config, max_context), batch_size=batch_size)
    device = jax.devices()[0]
    shape = PolicyShape(config.num_moe_layers, config.num_experts, config.experts_per_token, config.hidden_size)
    chosen = _policy(policy, policy_trace, shape, directory.path)
    guard_window = _guard_window(chosen, guard)
    jax.block_until_ready(jax.device_put(np.zeros(1), device))  # the backend's own memory counts as runtime
    runtime_bytes = rss_bytes() + COMPILED_BYTES
    is_cpu = device.platform == "cpu"
    plan = plan_memory(
        config,
        directory.layout,
        request,
        budget=budget,
        memory_limit=limit,
        dense_bytes=directory.manifest.dense_bytes,
        # Its size does not depend on the number of slots, only its values do.
        policy_bytes=policy_bytes(chosen.of_slots(config.num_experts), shape, is_guarded=guard_window is not None),
        runtime_bytes=runtime_bytes,
        available_bytes=available_bytes() + rss_bytes() if is_cpu else _free_device_bytes(device),
        total_bytes=total_bytes() if is_cpu else _device_bytes(device),
        is_cpu=is_cpu,
        host_budget=None if host_budget is None else parse_size(host_budget),
    )
    if plan.host_bytes > available_bytes() and not is_cpu:
        raise BudgetError(
            f"{format_size(plan.host_bytes, up=True)} of host memory are needed and "
            f"{format_size(available_bytes())} are available; give a smaller host_budget"
        )
    sharding = jax.sharding.SingleDeviceSharding(device)
    dense = split_dense_weights(config, directory.load_dense(sharding), device)
    memory = ExpertMemory(
        config,
        dense,
        directory.store(reader=reader),
        chosen.of_slots(plan.slots_per_layer),
        plan,
        device,
        guard_window=guard_window,
        prefetch=PrefetchMode(prefetch),
        host_records=plan.host_records,
    )
    return Engine(
        directory=directory,
        dense=dense,
        memory=memory,
        plan=plan,
        request=request,
        load_s=time.perf_counter() - began,
        policy_name=str(chosen),
        record_trace=record_trace,
        record_columns=record_columns,
    )


def _check_choice(name: str, value: str, choices: type[enum.StrEnum]) -> None:
    if value not in list(choices):
        raise ConfigError(f"{name} {value!r} is none of {', '.join(choices)}; choose one of them")


def _context(config: ModelConfig, max_context: int | None) -> int:
    if max_context is None:
        return min(config.max_position, DEFAULT_CONTEXT)
    if not 1 <= max_context <= config.max_position:
        raise PromptError(
            f"a context of {max_context} tokens is asked for; the model's positions allow 1 to {config.max_position}: "
            "shorten the prompt or ask for fewer new tokens"
        )
    return max_context


def _policy(
    name: str, policy_trace: str | os.PathLike[str] | None, shape: PolicyShape, directory: Path
) -> ChosenPolicy:
    counts: np.ndarray | None = None
    if policy_trace is not None:
        if name != "static":
            raise ConfigError(f"a policy trace is given and policy {name} uses none; leave it out or use policy static")
        counts = popularity(load_trace(policy_trace), shape.num_layers, shape.num_experts)
    return choose_policy(name, shape, directory / POLICY_NAME, counts)


def _guard_window(policy: ChosenPolicy, guard: bool | None) -> int | None:
    if guard is not None and not policy.is_learned:
        raise ConfigError(
            f"the guard has an effect on learned policies only, and {policy.kind} is none; leave the option out, or "
            "choose a learned policy"
        )
    return WINDOW_STEPS if policy.is_learned and guard is not False else None


def _device_bytes(device: jax.Device) -> int:
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def _free_device_bytes(device: jax.Device) -> int:
    return _device_bytes(device) - int((device.memory_stats() or {}).get("bytes_in_use", 0))
