"""Engines over tiny models, put together from their parts so that a test can choose each of them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from resident_reference import ResidentModel
from tiny_models import random_weights, tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert
from flashmoe_jax.config import ModelConfig, PrefetchMode
from flashmoe_jax.engine.budget import Budget, Request, plan_memory
from flashmoe_jax.engine.dense import DenseWeights, split_dense_weights
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.engine.expert_memory import ExpertMemory, policy_bytes
from flashmoe_jax.experts.slots import InsertedSlots
from flashmoe_jax.model_dir import ModelDirectory
from flashmoe_jax.policy import Policy, PolicyShape, make_policy

DEVICE = jax.devices()[0]
CONTEXT = 64
BATCH = 4

# A shared expert, and a dense layer between two MoE layers; enough experts for policies to differ.
MIXED: dict[str, Any] = tiny_hf_config("qwen2_moe", num_experts=16, mlp_only_layers=[1], norm_topk_prob=True)
TOP_K, QUARTER, HALF, ALL = 3, 4, 8, 16  # slots per layer of that model


class TinyModel(NamedTuple):
    """A converted model and what was converted."""

    path: Path
    directory: ModelDirectory
    dense: DenseWeights
    reference: ResidentModel

    @property
    def config(self) -> ModelConfig:
        return self.directory.config


def make_model(folder: Path, hf_config: dict[str, Any], seed: int = 0) -> TinyModel:
    """Writes a checkpoint with random weights into `folder` and converts it."""
    path = convert(write_hf_checkpoint(folder / "hf", hf_config, seed=seed), folder / "model")
    directory = ModelDirectory.open(path)
    config = directory.config
    sharding = jax.sharding.SingleDeviceSharding(DEVICE)
    dense = split_dense_weights(config, directory.load_dense(sharding), DEVICE)
    reference = ResidentModel(config, directory.layout, random_weights(ModelConfig.from_hf(hf_config), seed))
    return TinyModel(path, directory, dense, reference)


def make_engine(
    model: TinyModel,
    *,
    slots: int,
    policy: str | Policy = "lru",
    popularity: np.ndarray | None = None,
    num_staging: int | None = None,
    guard_window: int | None = None,
    inserted: bool = False,
    host_records: int = 0,
    store: Any = None,
    reader: str | None = None,
    prefetch: str = "off",
    batch_size: int = BATCH,
    context: int = CONTEXT,
    record_trace: bool = False,
) -> Engine:
    """An engine with so many slots per layer.

    Args:
        popularity: for `static`; None for one that prefers high ids.
        num_staging: rows of the staging ring; None for what the plan gives.
        guard_window: steps, to put the policy under guard.
        inserted: use the slot buffer of devices that are not the host, on the CPU.
        host_records: records of the host tier, forced on; with `inserted`.
        store: to read from; None for the model's own, read by `reader` (None for the default).
    """
    config = model.config
    shape = PolicyShape(config.num_moe_layers, config.num_experts, config.experts_per_token)
    if policy == "static" and popularity is None:
        popularity = np.tile(np.arange(config.num_experts, dtype=np.float32), (config.num_moe_layers, 1))
    chosen = policy if isinstance(policy, Policy) else make_policy(policy, shape, popularity)
    request = Request(context=context, batch_size=batch_size)
    plan = plan_memory(
        config,
        model.directory.layout,
        request,
        budget=Budget(slots=slots),
        memory_limit=None,
        dense_bytes=model.directory.manifest.dense_bytes,
        policy_bytes=policy_bytes(chosen, shape, is_guarded=guard_window is not None),
        runtime_bytes=0,
        available_bytes=1 << 40,
        total_bytes=1 << 40,
        is_cpu=True,
    )
    if num_staging is not None:
        plan = dataclasses.replace(plan, num_staging=num_staging)
    buffer = None
    if inserted:
        num_rows = config.num_moe_layers * slots + plan.num_staging
        layout = model.directory.layout
        buffer = InsertedSlots(num_rows, layout.record_words, np.dtype(layout.word_dtype), DEVICE)
    memory = ExpertMemory(
        config,
        model.dense,
        store or model.directory.store(**({} if reader is None else {"reader": reader})),
        chosen,
        plan,
        DEVICE,
        slots=buffer,
        guard_window=guard_window,
        prefetch=PrefetchMode(prefetch),
        host_records=host_records,
    )
    return Engine(
        directory=model.directory,
        dense=model.dense,
        memory=memory,
        plan=plan,
        request=request,
        load_s=0.0,
        policy_name=chosen.name,
        record_trace=record_trace,
    )


def random_prompts(config: ModelConfig, seed: int, lengths: list[int]) -> list[list[int]]:
    """Prompts of the given lengths; token ids from 3 on, so that none is special."""
    random = np.random.RandomState(seed)
    return [random.randint(3, config.vocab_size, size=length).tolist() for length in lengths]


same_bits = functools.partial(np.testing.assert_array_equal, strict=True)
