"""The checks of device_check.sh: a model made here, on whatever device JAX has.

Correct: the tokens of every budget, policy, reader and prefetch mode are the same, and those of a run with all experts
resident. Bytes: the allocator's peak stays below the declared device budget. Speed: decode of a random OLMoE-shaped
model at three budgets, and the device's copy rate. One JSON object with `passed`, and `failures` that say what did not.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import flashmoe_jax
from checkpoints.convert import convert
from flashmoe_jax.engine.platform import configure_backend, enable_compilation_cache
from flashmoe_jax.resolve import resolve_model
from scripts.make_random_checkpoint import main as make_random_checkpoint

# OLMoE-1B-7B with fewer layers: the same experts, a quarter of the drive.
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "clip_qkv": None,
}
PROMPT = "Once upon a time"
VARIANTS = (
    {"device_budget": "25%", "policy": "lru"},
    {"device_budget": "25%", "policy": "lru", "prefetch": "on"},
    {"device_budget": "25%", "policy": "lru", "prefetch": "auto", "reader": "range"},
    {"device_budget": "13%", "policy": "decayed", "reader": "array"},
    {"device_budget": "50%", "policy": "auto", "reader": "direct"},
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for models and programs")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of the random model (default: %(default)s)")
    parser.add_argument("--budget", default="3GiB", metavar="SIZE", help="declared for it (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="decoded per run (default: %(default)s)")
    return parser


def check_tokens(work: Path) -> dict[str, Any]:
    """The bundled model in every variant against all experts resident."""
    model = resolve_model(None, work)

    def tokens(**options: Any) -> list[int]:
        with flashmoe_jax.load(model, max_context=128, **options) as engine:
            pieces = engine.generate(PROMPT, max_new_tokens=64, ignore_eos=True)
            return [piece.token_id for piece in pieces if piece.token_id is not None]

    expected = tokens(device_budget="100%")
    different = [options for options in VARIANTS if tokens(**options) != expected]
    return {"variants": len(VARIANTS), "different": different, "token_ids": expected[:8]}


def check_budget(model: Path, budget: str, num_tokens: int) -> dict[str, Any]:
    """A long prompt and decode under a declared device budget; the allocator's peak where it tells one."""
    with flashmoe_jax.load(model, device_budget=budget, policy="lru", max_context=1024) as engine:
        random = np.random.default_rng(0)
        session = engine.session()
        session.prefill([random.integers(0, engine.config.vocab_size, 800).tolist()]).block_until_ready()
        for token in random.integers(0, engine.config.vocab_size, num_tokens):
            session.decode(np.array([token])).block_until_ready()
        statistics_now = jax.devices()[0].memory_stats() or {}
        return {
            "declared_bytes": flashmoe_jax.engine.budget.parse_size(budget),
            "planned_bytes": engine.plan.device_bytes,
            "peak_bytes": statistics_now.get("peak_bytes_in_use"),
            "slots_per_layer": engine.plan.slots_per_layer,
        }


def measure_decode(model: Path, num_tokens: int) -> list[dict[str, Any]]:
    """Decode speed at three budgets, with and without look-ahead."""
    rows = []
    for budget in ("25%", "50%", "100%"):
        for prefetch in ("off", "auto"):
            with flashmoe_jax.load(
                model, device_budget=budget, policy="lru", prefetch=prefetch, max_context=256
            ) as engine:
                random = np.random.default_rng(1)
                session, seconds = engine.session(), []
                session.prefill([random.integers(0, engine.config.vocab_size, 32).tolist()]).block_until_ready()
                for token in random.integers(0, engine.config.vocab_size, 8 + num_tokens):
                    began = time.perf_counter()
                    session.decode(np.array([token])).block_until_ready()
                    seconds.append(time.perf_counter() - began)
                stats = engine.stats()
                names = ("reader", "hits", "misses", "prefetch_reads", "shares")
                rows.append(
                    {"budget": budget, "prefetch": prefetch, "step_ms_p50": statistics.median(seconds[8:]) * 1e3}
                    | {name: stats[name] for name in names}
                )
    return rows


def copy_rate(num_bytes: int = 256 << 20) -> float:
    """Bytes per second from host to device."""
    block, device = np.ones(num_bytes, np.uint8), jax.devices()[0]
    jax.device_put(block, device, may_alias=False).block_until_ready()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.device_put(block, device, may_alias=False).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return num_bytes / statistics.median(seconds)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    configure_backend(args.budget)
    enable_compilation_cache(args.work / "compiled")
    device = jax.devices()[0]
    config = args.work / "config.json"
    config.write_text(json.dumps(OLMOE | {"num_hidden_layers": args.layers}))
    status = make_random_checkpoint(["--config", str(config), "--out", str(args.work / "hf"), "--seed", "1"])
    assert status == 0, "the random checkpoint could not be made"
    model = convert(args.work / "hf", args.work / "model")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "tokens": check_tokens(args.work),
        "budget": check_budget(model, args.budget, args.tokens),
        "device_copy_bytes_per_s": copy_rate(),
        "decode": measure_decode(model, args.tokens),
    }
    failures = [f"other tokens with {options}" for options in result["tokens"]["different"]]
    peak, declared = result["budget"]["peak_bytes"], result["budget"]["declared_bytes"]
    if peak is not None and peak > declared:
        failures.append(f"{peak} bytes were in use and {declared} were declared")
    if device.platform == "cpu":
        failures.append("JAX has no GPU here: this was run on the CPU")
    result |= {"failures": failures, "passed": not failures}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("device", "passed", "failures")}))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
