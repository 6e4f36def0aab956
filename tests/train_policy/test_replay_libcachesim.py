"""Per-access traces give the misses of libCacheSim, one by one where nothing is random."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import trace_of

from flashmoe_jax.telemetry.trace import load_trace
from train_policy.replay import Replayer
from train_policy.replay_steps import Mode

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed", exc_type=ImportError)

CLASSES = {
    "lru": "LRU",
    "fifo": "FIFO",
    "lfu-resident": "LFU",
    "arc": "ARC",
    "s3fifo": "S3FIFO",
    "min": "Belady",
    "lecar": "LeCaR",
}
DETERMINISTIC = tuple(name for name in CLASSES if name != "lecar")
# Below 20 slots a tenth of them is no two, and libCacheSim's S3-FIFO admits nothing.
SMALLEST_S3FIFO = 24
SLOTS = (1, 8, 16, 24, 33, 48)
RANDOM = ("uniform", "zipf", "drifting", "looping")
REAL = ("qwen3-30b-a3b-bigmoe", "gemma-4-26b-a4b-bigmoe", "gpt-oss-120b-bigmoe", "deepseek-v2-lite-moebeyond")


def random_accesses(kind: str, length: int) -> np.ndarray:
    random = np.random.default_rng(7)
    match kind:
        case "uniform":
            return random.integers(0, 64, length)
        case "zipf":
            return (random.zipf(1.3, length) - 1) % 64
        case "drifting":
            return (np.arange(length) // 40 + random.geometric(0.1, length)) % 64
    return np.where(random.random(length) < 0.8, np.arange(length) % 40, random.integers(0, 64, length))


def real_accesses(folder: Path, name: str, length: int) -> np.ndarray:
    path = next((folder / "traces" / name).glob("*.npz"), None) if (folder / "traces" / name).is_dir() else None
    if path is None:
        pytest.skip(f"no trace {name} beside the clone")
    ids = load_trace(path).ids[:length]
    layer = ids[:, ids.shape[1] // 2].reshape(-1)
    return layer[layer >= 0][:length]


def oracle_file(accesses: np.ndarray, path: Path) -> Path:
    """The accesses as libCacheSim's oracleGeneral: time, id, size, and when the id is asked for next."""
    fields = [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]
    records = np.zeros(len(accesses), fields)
    records["time"], records["id"], records["size"] = np.arange(len(accesses)), accesses + 1, 1
    upcoming: dict[int, int] = {}
    for i in range(len(accesses) - 1, -1, -1):
        records["next"][i] = upcoming.get(int(accesses[i]), -1)
        upcoming[int(accesses[i])] = i
    records.tofile(path)
    return path


def their_misses(policy: str, oracle: Path, length: int, slots: int) -> int:
    reader: Any = libcachesim.TraceReader(str(oracle), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    cache = getattr(libcachesim, CLASSES[policy])(cache_size=slots, hashpower=10)
    return round(cache.process_trace(reader)[0] * length)


def our_misses(policy: str, accesses: np.ndarray, slots: tuple[int, ...], seed: int = 0) -> list[int]:
    trace = trace_of(accesses.reshape(-1, 1, 1), int(accesses.max()) + 1)
    results = Replayer(trace, mode=Mode.ACCESS, seed=seed).replay(policy, slots)
    return [int(r.run.decode.misses[0]) for r in results]


def assert_same_misses(accesses: np.ndarray, tmp_path: Path) -> None:
    oracle = oracle_file(accesses, tmp_path / "trace.oracleGeneral")
    for policy in DETERMINISTIC:
        slots = tuple(r for r in SLOTS if policy != "s3fifo" or r >= SMALLEST_S3FIFO)
        theirs = [their_misses(policy, oracle, len(accesses), r) for r in slots]
        assert our_misses(policy, accesses, slots) == theirs, policy


def assert_similar_lecar(accesses: np.ndarray, tmp_path: Path) -> None:
    oracle = oracle_file(accesses, tmp_path / "trace.oracleGeneral")
    slots = (8, 16, 32)
    ours = np.mean([our_misses("lecar", accesses, slots, seed) for seed in range(5)], axis=0)
    theirs = np.mean([[their_misses("lecar", oracle, len(accesses), r) for r in slots] for _ in range(5)], axis=0)
    np.testing.assert_allclose(ours, theirs, rtol=0.01)


@pytest.mark.parametrize("kind", RANDOM)
def test_random_traces(kind: str, tmp_path: Path):
    assert_same_misses(random_accesses(kind, 4000), tmp_path)


@pytest.mark.parametrize("name", REAL)
def test_real_traces(name: str, shared_data: Path, tmp_path: Path):
    assert_same_misses(real_accesses(shared_data, name, 12_000), tmp_path)


@pytest.mark.parametrize("kind", RANDOM)
def test_lecar_on_random_traces(kind: str, tmp_path: Path):
    assert_similar_lecar(random_accesses(kind, 40_000), tmp_path)


def test_lecar_on_a_real_trace(shared_data: Path, tmp_path: Path):
    assert_similar_lecar(real_accesses(shared_data, "deepseek-v2-lite-moebeyond", 60_000), tmp_path)
