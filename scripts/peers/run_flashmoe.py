"""flashmoe_jax: load, prefill and decode through its public interface, with the persistent compilation cache."""

import argparse
import importlib.metadata
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.peers.child import build_parser, context_tokens, run_and_print


class CompileClock:
    """Seconds in which JAX traced, lowered or compiled, on any thread; phases inside each other count once."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def __call__(self, event: str, duration_s: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            with self._lock:
                self._spans.append((now - duration_s, now))

    def total_s(self) -> float:
        total, end = 0.0, float("-inf")
        with self._lock:
            for start, stop in sorted(self._spans):
                total += max(0.0, stop - max(start, end))
                end = max(end, stop)
        return total


class FlashMoe:
    """A `Peer` over `flashmoe_jax.load`."""

    def import_packages(self) -> dict[str, str]:
        import jax

        # The engine's modules are imported here, so that load is loading alone.
        from flashmoe_jax.engine import engine, platform

        self._load, self._enable_cache = engine.load, platform.enable_compilation_cache
        self._clock = CompileClock()
        jax.monitoring.register_event_duration_secs_listener(self._clock)
        return {name: importlib.metadata.version(name) for name in ("flashmoe-jax", "jax", "jaxlib", "tensorstore")}

    def load(self, args: argparse.Namespace) -> None:
        self._enable_cache(args.compiled)
        self._engine = self._load(
            args.model,
            memory_limit=args.memory_limit,
            policy=args.policy,
            reader=args.reader,
            max_context=context_tokens(args),
            record_trace=args.record_routes,
        )
        self._session = self._engine.session(context=args.prefill_tokens + args.decode_tokens)
        self._is_recording = args.record_routes

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        return np.asarray(self._session.prefill([list(ids)]))[0]

    def decode(self, token: int) -> np.ndarray:
        return np.asarray(self._session.decode(np.array([token], np.int32)))[0]

    def warm_up(self, ids: Sequence[int]) -> None:
        np.asarray(self._engine.session(context=len(ids)).prefill([list(ids)]))

    def compile_s(self) -> float:
        return self._clock.total_s()

    def facts(self) -> dict[str, Any]:
        stats, plan = self._engine.stats(), self._engine.plan
        names = "policy reader prefetch slots_per_layer accesses hits misses read_bytes stall_ms shares".split()
        facts = {name: stats[name] for name in names} | {"dense_bytes": plan.dense_bytes}
        if self._is_recording:
            facts |= routes(self._engine.trace())
        return facts

    def close(self) -> None:
        self._engine.close()


def routes(trace: Any) -> dict[str, Any]:
    """How much the decoded tokens differ: (layer, expert) pairs per token, how many of them the token before did not
    choose, and how many different ones all tokens chose together."""
    from flashmoe_jax.telemetry.trace import DECODE

    chosen = [
        {(layer, int(e)) for layer, ids in enumerate(row) for e in ids} for row in trace.ids[trace.phase == DECODE]
    ]
    new = [len(now - before) for before, now in itertools.pairwise(chosen)]
    return {
        "experts_per_token": float(np.mean([len(pairs) for pairs in chosen])),
        "new_experts_per_token": float(np.mean(new)) if new else None,
        "distinct_experts": len(set().union(*chosen)),
    }


def main(argv: list[str] | None = None) -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--memory-limit", metavar="SIZE", help="of the process, as 4GiB (default: none)")
    parser.add_argument("--policy", default="decayed", help="eviction policy (default %(default)s)")
    parser.add_argument("--reader", default="auto", help="of records (default %(default)s)")
    parser.add_argument("--compiled", type=Path, required=True, metavar="DIR", help="persistent compilation cache")
    parser.add_argument("--record-routes", action="store_true", help="report which experts were chosen")
    return run_and_print(FlashMoe(), parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
