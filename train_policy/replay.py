"""Replay: what a policy would have hit, missed and evicted on a recorded trace.

Owns the names of all policies and what is made of one; how steps are read is in `replay_steps.py`, how slots change in
`replay_slots.py`. The policies that the engine runs (lru, lfu, lfru, decayed, static) are its own functions, jitted and
scanned over the trace; the slots are numba, proven equal to the engine's residency by the tests, because the engine's
own plan, scanned and vmapped, misses the 20 s that the longest trace may take (figures in docs/decisions.md).
Invariant: all policies see the same steps under the same rules, so that their misses can be compared.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.engine.guard import WINDOW_STEPS
from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import POLICIES, STATIC_NAME, Policy, PolicyShape, load_popularity, make_policy
from flashmoe_jax.policy.saved import POLICY_JSON, SavedPolicy, load_saved
from flashmoe_jax.telemetry.counters import REFETCH_TOKENS
from flashmoe_jax.telemetry.trace import Trace, popularity
from train_policy.policies.arc import replay_arc
from train_policy.policies.lecar import replay_lecar
from train_policy.policies.optimal import replay_bypass
from train_policy.policies.queues import replay_fifo, replay_lfu_resident
from train_policy.policies.s3fifo import replay_s3fifo
from train_policy.replay_keep import beside, min_keep, policy_keep, random_keep, window_keep
from train_policy.replay_learned import check_inputs, learned_keep
from train_policy.replay_slots import Counts, SlotRun, replay_guarded, replay_slots, split_counts, thread_pool
from train_policy.replay_steps import Mode, Steps, make_steps

# Policies that are a loop of their own, with no keep value that prefill could ask for.
_LOOPS: dict[str, Callable[..., None]] = {
    "fifo": replay_fifo,
    "lfu-resident": replay_lfu_resident,
    "arc": replay_arc,
    "lecar": replay_lecar,
    "s3fifo": replay_s3fifo,
    "min-bypass": replay_bypass,
}
REPLAY_ONLY = ("random", *_LOOPS, "min", "min-window:W")
NAMES = (*POLICIES, *REPLAY_ONLY)
DEFAULT_STAGING = 8  # records of the engine's prefill ring, unless a record is larger than 16 MiB
# Windows beyond this are MIN; it keeps a window's keep values above those of decayed.
_MAX_WINDOW = 1 << 20


@dataclasses.dataclass(frozen=True)
class Result:
    """One policy with one number of slots per layer."""

    policy: str
    slots: int
    run: SlotRun


class Replayer:
    """A trace ready to be replayed by any policy.

    Args:
        trace: as `replay_steps.joined` gives it.
        mode: what one step is.
        reset: start every prompt cold.
        num_staging: records of the engine's prefill ring, for Mode.ENGINE.
        seed: of random and lecar.
        counts: `[L, E]` uses that `static` keeps; None for those of the trace itself, which is hindsight.
        guard: whether learned policies are under guard.
        guard_window: steps, the guard's.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        mode: Mode = Mode.TOKEN,
        reset: bool = False,
        num_staging: int = DEFAULT_STAGING,
        seed: int = 0,
        counts: np.ndarray | None = None,
        guard: bool = False,
        guard_window: int = WINDOW_STEPS,
    ):
        self.steps: Steps = make_steps(trace, mode, reset=reset)
        self.mode, self._num_staging, self._seed = mode, num_staging, seed
        self._trace, self._counts = trace, counts
        self._top_k = trace.ids.shape[2]
        self._guard, self._allowed_reads = guard, guard_window * self._top_k

    def check(self, policy: str, slots: Sequence[int]) -> None:
        """Refuses what `replay` refuses, and numbers of slots that the engine refuses: a token's experts must fit.

        Raises:
            ConfigError: as `replay`.
        """
        if (saved := saved_policy(policy)) is not None:
            check_inputs(self._networks(saved, slots)[0], self.steps)
        elif self._loop_of(policy) is None:
            self._keep_of(policy)
        smallest = 1 if self.mode is Mode.ACCESS else self._top_k
        for number in slots:
            if not smallest <= number <= self.steps.num_experts:
                raise ConfigError(
                    f"{number} slots per layer are asked for; a token needs {self._top_k} experts and a layer has "
                    f"{self.steps.num_experts}: give {smallest} to {self.steps.num_experts}"
                )

    def replay(
        self, policy: str | Policy | SavedPolicy, slots: Sequence[int], *, log_victims: bool = False
    ) -> list[Result]:
        """Replays one policy for several numbers of slots per layer.

        Args:
            policy: one of NAMES, `min-window:W` with a number for W, a folder or file that `fit` wrote, what such a
                folder holds, or a policy of the engine whose layers do not look at each other.
            slots: numbers of slots per layer, each at least 1.
            log_victims: whether `run.victims` says who left when; not for min-bypass.

        Raises:
            ConfigError: an unknown policy, one of another model, or one without a prefill rule in Mode.ENGINE.
        """
        if isinstance(policy, Policy):
            keep = policy_keep(policy, self.steps, self._top_k)
            runs = self._run_keep(keep, slots, log_victims, is_guarded=policy.is_learned and self._guard)
            return [Result(policy.name, r, run) for r, run in zip(slots, runs, strict=True)]
        saved = policy if isinstance(policy, SavedPolicy) else saved_policy(policy)
        if saved is not None:
            keep = learned_keep(self._networks(saved, slots), self.steps, self._top_k)
            runs = self._run_keep(keep, slots, log_victims, is_guarded=self._guard)
            name = saved.kind if isinstance(policy, SavedPolicy) else policy
            return [Result(name, r, run) for r, run in zip(slots, runs, strict=True)]
        assert isinstance(policy, str)
        loop = self._loop_of(policy)
        if loop is not None:
            runs = self._run_loop(loop, slots, log_victims and policy != "min-bypass")
        else:
            runs = self._run_keep(self._keep_of(policy)(), slots, log_victims, is_guarded=False)
        return [Result(policy, r, run) for r, run in zip(slots, runs, strict=True)]

    def _run_keep(
        self, keep: Iterator[np.ndarray], slots: Sequence[int], log_victims: bool, *, is_guarded: bool
    ) -> list[SlotRun]:
        options: dict[str, Any] = {"num_staging": self._num_staging, "log_victims": log_victims}
        if not is_guarded:
            return replay_slots(self.steps, keep, slots, **options)
        pairs = beside(keep, self._keep_of("decayed")())
        return replay_guarded(self.steps, pairs, slots, allowed_reads=self._allowed_reads, **options)

    def _networks(self, saved: SavedPolicy, slots: Sequence[int]) -> list[Policy]:
        """The policy for each number of slots."""
        steps = self.steps
        hidden_size = steps.hidden.shape[2] if steps.hidden is not None else saved.model.hidden_size
        shape = PolicyShape(steps.num_layers, steps.num_experts, self._top_k, hidden_size)
        return [saved.policy(shape, r) for r in slots]

    def _loop_of(self, policy: str) -> Callable[..., None] | None:
        if policy in _LOOPS and policy != "min-bypass" and self.mode is Mode.ENGINE:
            raise ConfigError(
                f"policy {policy} is of per-access caches and has no rule for prefill; leave it out of --as-engine"
            )
        return _LOOPS.get(policy)

    def _run_loop(self, loop: Callable[..., None], slots: Sequence[int], log_victims: bool) -> list[SlotRun]:
        steps = self.steps
        counts = np.zeros((len(slots), steps.num_layers, 2, 4), np.int64)
        victims = [[np.zeros((len(r.ids) * log_victims, 2), np.int32) for r in steps.layers] for _ in slots]
        with thread_pool() as pool:
            tasks: list[Future] = [
                pool.submit(
                    loop,
                    steps.layers[layer],
                    steps.num_experts,
                    number,
                    REFETCH_TOKENS,
                    (self._seed * 1000 + layer) % 2**32,
                    counts[place, layer],
                    victims[place][layer],
                )
                for layer in range(steps.num_layers)
                for place, number in enumerate(slots)
            ]
            for task in tasks:
                task.result()
        runs = []
        for of_slots, logs in zip(counts, victims, strict=True):
            run = SlotRun(*split_counts(of_slots))
            if log_victims:
                run = run._replace(victims=[log[:n] for log, n in zip(logs, run.decode.evictions, strict=True)])
            runs.append(run)
        return runs

    def _keep_of(self, policy: str) -> Callable[[], Iterator[np.ndarray]]:
        """What gives the keep values of a policy; raises for a policy that is none."""
        if policy == "random":
            return functools.partial(random_keep, self.steps, self._seed)
        if policy == "min":
            return functools.partial(min_keep, self.steps)
        if policy.startswith("min-window"):
            window = _window(policy)
            beyond = self._keep_of("decayed")
            return lambda: window_keep(self.steps, window, beyond())
        shape = PolicyShape(self.steps.num_layers, self.steps.num_experts, self._top_k)
        if policy not in POLICIES:
            engine_policy = make_policy("static", shape, _fitted(policy))
        elif policy == "static":
            counts = popularity(self._trace, *shape[:2]) if self._counts is None else self._counts
            engine_policy = make_policy(policy, shape, counts)
        else:
            engine_policy = make_policy(policy, shape)
        return functools.partial(policy_keep, engine_policy, self.steps, self._top_k)


def _window(policy: str) -> int:
    name, _, text = policy.partition(":")
    if name != "min-window" or not text.isdecimal() or not 1 <= int(text) <= _MAX_WINDOW:
        raise ConfigError(f"policy {policy!r} is not understood; write min-window:W, W steps ahead, 1 to {_MAX_WINDOW}")
    return int(text)


def saved_policy(policy: str) -> SavedPolicy | None:
    """What a folder with a learned policy holds; None if `policy` is no such folder."""
    return load_saved(Path(policy)) if (Path(policy) / POLICY_JSON).is_file() else None


def _fitted(policy: str) -> np.ndarray:
    """Popularity from a folder or file that `fit --kind static` wrote."""
    path = Path(policy)
    if path.is_dir():
        path = path / STATIC_NAME
    if not path.exists():
        raise ConfigError(
            f"policy {policy!r} is unknown; choose of {', '.join(NAMES)}, or give a folder that fit wrote"
        )
    return load_popularity(path)


def summary(result: Result, best: Result, steps: Steps) -> dict[str, Any]:
    """A result in the numbers of a report, averaged over layers.

    Args:
        result: of any policy.
        best: MIN's, with the same slots.
        steps: that both replayed.

    Returns:
        `hit_rate`, `reads_per_token` (and layer), `refetch_5` (share of evicted experts asked for again within 5
        tokens), `regret` (misses ÷ MIN's) and sums over layers, each of decode; in Mode.ENGINE with what prefill had
        under `prefill`. None where nothing was counted.
        For a policy under guard also `fallback_share`, of layers and decode steps.
    """
    row: dict[str, Any] = {"policy": result.policy, "slots": result.slots}
    row |= _stage(result.run.decode, best.run.decode, int(steps.num_rows[0]))
    guard = result.run.guard
    if guard is not None:
        num_steps = int(guard.steps.sum())
        row["fallback_share"] = int(guard.fallback_steps.sum()) / num_steps if num_steps else None
    if steps.is_prefill.any():
        row["prefill"] = _stage(result.run.prefill, best.run.prefill, int(steps.num_rows[1]))
    return row


def _stage(counts: Counts, best: Counts, num_rows: int) -> dict[str, Any]:
    return {
        "hit_rate": _mean_ratio(counts.hits, counts.accesses),
        "reads_per_token": float(counts.misses.mean()) / num_rows if num_rows else None,
        "refetch_5": _mean_ratio(counts.refetches, counts.evictions),
        "regret": _mean_ratio(counts.misses, best.misses),
        "accesses": int(counts.accesses.sum()),
        "hits": int(counts.hits.sum()),
        "misses": int(counts.misses.sum()),
        "evictions": int(counts.evictions.sum()),
    }


def _mean_ratio(part: np.ndarray, whole: np.ndarray) -> float | None:
    """Mean over the layers that have any."""
    has_any = whole > 0
    return float(np.mean(part[has_any] / whole[has_any])) if has_any.any() else None
