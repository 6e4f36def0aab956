"""What scoring a policy costs inside the decode step, at the size of real models and without I/O.

Builds a few layers of a model with random weights and random slots, decodes random tokens through them (attention,
router, residency, policy, experts; what is missed is computed from the slot it was given, nothing is read), and
prints one CSV row per policy: median milliseconds of a layer, its difference from `lru`, and the score by itself.
Every step misses, so every step scores. Rounds are interleaved, so that a drift of the machine meets all policies
alike; warm-up and compilation are excluded. Networks are random: their size is what counts. Learned policies are under
guard, as the engine runs them.
"""

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.engine.dense import split_dense_weights
from flashmoe_jax.engine.guard import WINDOW_STEPS, init_guard
from flashmoe_jax.engine.steps import StepState, add_experts, make_decode_step, make_expert_ffn, unpack_decode
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.experts.residency import init_residency
from flashmoe_jax.experts.rows import RowTable
from flashmoe_jax.experts.slots import make_slot_buffer
from flashmoe_jax.models.attention import init_cache
from flashmoe_jax.models.families import expert_field_specs
from flashmoe_jax.models.weights import dense_weight_specs
from flashmoe_jax.policy import Policy, PolicyShape, make_policy
from flashmoe_jax.policy.base import ROUTER_LOGITS
from flashmoe_jax.policy.context import seen_columns
from flashmoe_jax.policy.history import OWN_FEATURES
from flashmoe_jax.policy.learned import paper_width
from flashmoe_jax.policy.saved import SavedPolicy
from flashmoe_jax.policy.shared import SHARED_WIDTH

COMMON = {"hidden_size": 2048, "vocab_size": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "olmoe": (
        {
            **COMMON,
            "model_type": "olmoe",
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        16,
    ),
    "qwen3-30b": (
        {
            **COMMON,
            "model_type": "qwen3_moe",
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        48,
    ),
}
POLICIES = ("lru", "decayed", "context", "context-logits", "paper-expert", "paper-layer", "shared")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="olmoe", help="shape (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers that are built (default %(default)s)")
    parser.add_argument("--slots", type=float, default=25, help="per cent of the experts (default %(default)s)")
    parser.add_argument("--context-hidden", type=int, default=128, help="width of context (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="tokens per policy (default %(default)s)")
    return parser


def random_policy(name: str, model: PolicyShape, hidden: int, num_slots: int) -> Policy:
    """A policy with random parameters of the size that trained ones have."""
    if name in ("lru", "decayed"):
        return make_policy(name, model)
    random = np.random.default_rng(0)
    kind, _, variant = name.partition("-")
    inputs = frozenset({ROUTER_LOGITS} if variant == "logits" else ())
    L, E, K = model.num_layers, model.num_experts, OWN_FEATURES

    def weights(*size: int) -> np.ndarray:
        return random.normal(0, 1 / np.sqrt(size[-1]), size).astype(np.float32)

    if kind == "context":
        arrays = {
            "upward": weights(L, E, hidden),
            "downward": weights(L, E, hidden),
            "first_kernel": weights(L, hidden, len(seen_columns(model, inputs))),
            "first_bias": weights(L, hidden),
            "second_kernel": weights(L, hidden, hidden),
            "second_bias": weights(L, hidden),
            "last_kernel": weights(L, 1, E, hidden),
            "last_bias": weights(L, 1, E),
            "own": weights(L, 1, K),
            "own_kernel": weights(L, 16, K),
            "own_bias": weights(L, 16),
            "own_last": weights(L, 1, 16),
            **{f"{part}_peak": np.full(L, 2.0, np.float32) for part in ("first", "second", "own")},
        }
    else:
        layers, units = (1, 32) if kind == "shared" else (L, 128 if variant == "expert" else 64)
        width = SHARED_WIDTH if kind == "shared" else paper_width(variant, model)
        widths = (width, units, units, E if variant == "layer" else 1)
        arrays = {f"peak{i}": np.full(layers, 2.0, np.float32) for i in range(2)}
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            arrays |= {f"kernel{i}": weights(layers, after, before), f"bias{i}": weights(layers, after)}
    saved = SavedPolicy(
        kind=kind,
        model=model._replace(hidden_size=0),
        arrays=arrays,
        shape=variant if kind == "paper" else "",
        inputs=inputs,
        activation="silu" if kind == "paper" else "relu",
    )
    return saved.policy(model, num_slots)


class Runner:
    """The layers with one policy, ready to decode."""

    def __init__(
        self, config: ModelConfig, total_layers: int, policy: Policy, weights: Any, slots: Any, rows: RowTable
    ):
        shape = PolicyShape(total_layers, config.num_experts, config.experts_per_token, config.hidden_size)
        self.dense, self.slots, self.policy, self.config = weights, slots, policy, config
        window = WINDOW_STEPS if policy.is_learned else None
        self.step = make_decode_step(weights.kinds[0], policy, window)
        layout = RecordLayout.for_experts(expert_field_specs(config), config.weight_dtype)
        self.ffn = make_expert_ffn(layout.fields)
        residency = init_residency(total_layers, config.num_experts, rows.num_slots)
        guard = init_guard(shape, rows.num_slots) if window else None
        self.state = jax.device_put(StepState(residency, policy.init(shape), guard), jax.devices()[0])
        self.params = [jax.device_put(policy.layer_params(i), jax.devices()[0]) for i in range(config.num_layers)]
        dtype = jnp.dtype(config.weight_dtype)
        self.caches = [
            jax.device_put(init_cache(1, 64, config.num_kv_heads, config.head_dim, dtype), jax.devices()[0])
            for _ in range(config.num_layers)
        ]
        self.none = jnp.zeros((1, config.experts_per_token, config.hidden_size), jnp.float32, device=jax.devices()[0])
        self.rows = rows
        self.score = jax.jit(policy.score)

    def token(self, x: np.ndarray, position: int) -> float:
        """Decodes one token and returns the seconds per layer."""
        x_BD = jax.device_put(x, jax.devices()[0])
        began = time.perf_counter()
        for i, leaves in enumerate(self.dense.layers):
            output, self.caches[i], self.state, packed = self.step(
                leaves,
                x_BD,
                self.caches[i],
                np.array([position], np.int32),
                np.array([True]),
                self.state,
                self.params[i],
                np.int32(i),
                self.rows.rows_of(i),
                None,
            )
            out = self.ffn(self.none, output.h_BD, self.slots, output.row_BX, output.hit_BX)
            plan = unpack_decode(np.asarray(packed), 1, self.config.experts_per_token, self.config.num_experts)
            row_BX = self.rows.rows_of(i)[np.maximum(plan.slot_BX, 0)]
            out = self.ffn(out, output.h_BD, self.slots, row_BX, ~plan.hit_BX)
            x_BD = add_experts(output.x_BD, out, output.weight_BX, output.dense_BD)
        x_BD.block_until_ready()
        return (time.perf_counter() - began) / self.config.num_layers

    def score_alone(self) -> float:
        """Seconds of one score, called by itself: with the cost of a call."""
        began = time.perf_counter()
        for i, params in enumerate(self.params):
            self.score(params, self.state.policy, np.int32(i)).block_until_ready()
        return (time.perf_counter() - began) / len(self.params)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    hf_config, total_layers = MODELS[args.model]
    config = ModelConfig.from_hf({**hf_config, "num_hidden_layers": args.layers, "torch_dtype": "bfloat16"})
    shape = PolicyShape(total_layers, config.num_experts, config.experts_per_token, config.hidden_size)
    random = np.random.default_rng(1)
    num_slots = max(int(config.num_experts * args.slots / 100), config.experts_per_token)
    # The rows are of the layers that are built; the policy's state is of all.
    rows = RowTable(args.layers, num_slots, 2)
    layout = RecordLayout.for_experts(expert_field_specs(config), config.weight_dtype)
    buffer = make_slot_buffer(rows.num_rows, layout.record_words, np.dtype(layout.word_dtype), jax.devices()[0])
    for row in range(rows.num_rows):
        buffer.landing(row)[:] = random.normal(0, 0.02, layout.record_words).astype(jnp.bfloat16).view(np.uint16)
    buffer.commit(range(rows.num_rows))
    weights = {
        path: jnp.asarray(random.normal(0, 0.02, spec.shape), spec.dtype)
        for path, spec in dense_weight_specs(config).items()
    }
    dense = split_dense_weights(config, weights, jax.devices()[0])
    runners = {
        name: Runner(
            config,
            total_layers,
            random_policy(name, shape, args.context_hidden, num_slots),
            dense,
            buffer.array,
            rows,
        )
        for name in POLICIES
    }
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    alone: dict[str, list[float]] = {name: [] for name in POLICIES}
    for turn in range(args.rounds + 3):
        x = random.normal(0, 1, (1, config.hidden_size)).astype(np.float32)
        for name, runner in runners.items():
            seconds, score = runner.token(x, turn), runner.score_alone()
            if turn >= 3:
                times[name].append(seconds)
                alone[name].append(score)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(
        ["model", "policy", "kilobytes_per_layer", "layer_ms", "over_lru_ms", "over_lru_percent", "score_ms"]
    )
    base = times["lru"]
    for name, runner in runners.items():
        # Round by round, so that drift cancels.
        over = statistics.median(a - b for a, b in zip(times[name], base, strict=True)) * 1e3
        size = sum(a.size * 4 for a in jax.tree.leaves(runner.params[0])) / 1024
        layer_ms = statistics.median(times[name]) * 1e3
        lru_ms = statistics.median(base) * 1e3
        row = (layer_ms, over, 100 * over / lru_ms, statistics.median(alone[name]) * 1e3)
        writer.writerow([args.model, name, f"{size:.0f}", *(f"{value:.3f}" for value in row)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
