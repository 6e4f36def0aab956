"""Figures of replayed policies, with intervals.

Owns every number of a report and the bootstrap; which prompts were replayed is `evaluate.py`'s. Figures are ratios of
sums over layers and prompts. Intervals are percentiles of a bootstrap over prompts, paired: one draw of prompts serves
all policies, so that what is common to them cancels. Invariant: LRU closes nothing of a gap from LRU, MIN all of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from train_policy.audit import ACCESSES, EVICTIONS, GOOD, LRU_GOOD, MISSES, NUM_COLUMNS, REFETCHES
from train_policy.evaluate import ALL, REFERENCES, Candidate, Trial

METRICS = (
    "hit_rate",
    "reads_per_token",
    "gap_lru",
    "gap_decayed",
    "reads_saved",
    "refetch_5",
    "good_decisions",
    "good_decisions_lru",
    "regret",
)
MEAN = "mean"  # of all numbers of slots, in the place of a number
_COLUMNS = {
    "accesses": ACCESSES,
    "misses": MISSES,
    "evictions": EVICTIONS,
    "refetches": REFETCHES,
    "good": GOOD,
    "lru_good": LRU_GOOD,
}


class Figures(NamedTuple):
    """Figures of one set of tests: the metrics of every policy, float [slots + 1, P], the mean over slots last."""

    name: str
    slots: list[str]  # what was asked for, and MEAN
    value: dict[str, np.ndarray]
    low: dict[str, np.ndarray]
    high: dict[str, np.ndarray]


class Evaluation(NamedTuple):
    """Everything that a report shows."""

    candidates: list[Candidate]
    policies: list[str]  # candidates and what they are compared with
    tests: list[Trial]
    figures: list[Figures]  # per test; of all tests together first, where there are several
    num_draws: int


def evaluated(candidates: Sequence[Candidate], tests: Sequence[Trial], *, num_draws: int, seed: int) -> Evaluation:
    """Figures and intervals of replayed tests.

    Args:
        candidates: as given to `run_tests`.
        tests: of `run_tests`.
        num_draws: of the bootstrap; 0 for no intervals.
        seed: of the bootstrap.
    """
    policies = list(tests[0].counts)
    random = np.random.default_rng(seed)
    # The first weights are ones: the figures themselves.
    weights = [_weights(random, len(test.tokens), num_draws) for test in tests]
    groups = [(test.name, [place]) for place, test in enumerate(tests)]
    if len(tests) > 1:
        groups.insert(0, (ALL, list(range(len(tests)))))
    figures = []
    for name, places in groups:
        slots = list(dict.fromkeys(label for place in places for label in tests[place].slots))
        of_slots = []
        for label in slots:
            having = [place for place in places if label in tests[place].slots]
            sums = sum(_sums(tests[place], label, policies, weights[place]) for place in having)
            passes = sum(weights[p] @ tests[p].tokens * tests[p].num_layers for p in having)
            of_slots.append(metrics(np.asarray(sums), np.asarray(passes), policies))
        figures.append(_figures(name, slots, of_slots))
    return Evaluation(list(candidates), policies, list(tests), figures, num_draws)


def _weights(random: np.random.Generator, num_units: int, num_draws: int) -> np.ndarray:
    """How often each unit counts, float64 `[1 + draws, N]`. One says nothing about others: its draws are NaN."""
    draws = random.multinomial(num_units, np.full(num_units, 1 / num_units), num_draws).astype(float)
    return np.concatenate([np.ones((1, num_units)), draws if num_units > 1 else np.full_like(draws, np.nan)])


def _sums(test: Trial, label: str, policies: Sequence[str], weights: np.ndarray) -> np.ndarray:
    """Counts over layers and weighted prompts, `[1 + draws, P, NUM_COLUMNS]`."""
    place = list(test.slots).index(label)
    per_prompt = np.stack([test.counts[policy][place].sum(axis=0) for policy in policies], axis=1)
    return (weights @ per_prompt.reshape(len(per_prompt), -1)).reshape(len(weights), len(policies), NUM_COLUMNS)


def metrics(sums: np.ndarray, passes: np.ndarray, policies: Sequence[str]) -> dict[str, np.ndarray]:
    """Figures of policies that saw the same requests.

    Args:
        sums: counts `[..., P, NUM_COLUMNS]`.
        passes: tokens x layers `[...]`.
        policies: P names, REFERENCES among them.

    Returns:
        METRICS, each `[..., P]`; NaN where nothing was counted.
    """
    count = {name: sums[..., place].astype(float) for name, place in _COLUMNS.items()}
    misses = count["misses"]
    lru, decayed, least = (misses[..., policies.index(name)][..., None] for name in REFERENCES)
    return {
        "hit_rate": 1 - _ratio(misses, count["accesses"]),
        "reads_per_token": _ratio(misses, passes[..., None]),
        "gap_lru": _ratio(lru - misses, lru - least),
        "gap_decayed": _ratio(decayed - misses, decayed - least),
        "reads_saved": 1 - _ratio(misses, decayed),
        "refetch_5": _ratio(count["refetches"], count["evictions"]),
        "good_decisions": _ratio(count["good"], count["evictions"]),
        "good_decisions_lru": _ratio(count["lru_good"], count["evictions"]),
        "regret": _ratio(misses, least),
    }


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    part, whole = np.broadcast_arrays(part, whole)
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _figures(name: str, slots: Sequence[str], of_slots: Sequence[Mapping[str, np.ndarray]]) -> Figures:
    value, low, high = {}, {}, {}
    for metric in METRICS:
        drawn = np.stack([figures[metric] for figures in of_slots])  # [slots, 1 + draws, P]
        drawn = np.concatenate([drawn, _mean(drawn, 0)[None]])
        value[metric] = drawn[:, 0]
        low[metric], high[metric] = _percentiles(drawn[:, 1:])
    return Figures(name, [*slots, MEAN], value, low, high)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Over what is not NaN."""
    is_known = ~np.isnan(values)
    return _ratio(np.where(is_known, values, 0).sum(axis=axis), is_known.sum(axis=axis))


def _percentiles(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2.5 % and 97.5 % over axis 1; NaN where there is no draw."""
    low, high = np.full((2, len(drawn), drawn.shape[2]), np.nan)
    for place in np.ndindex(low.shape):
        values = drawn[place[0], :, place[1]]
        values = values[~np.isnan(values)]
        if len(values):
            low[place], high[place] = np.percentile(values, [2.5, 97.5])
    return low, high


def layer_gaps(evaluation: Evaluation, policy: str) -> list[tuple[str, list[str], np.ndarray]]:
    """Shares of LRU → MIN closed, per kind of model: its tests' names, its slots, and float `[slots, L]`."""
    kinds: dict[tuple[int, int, tuple[str, ...]], list[Trial]] = {}
    for test in evaluation.tests:
        kinds.setdefault((test.num_layers, test.num_experts, tuple(test.slots)), []).append(test)
    result = []
    for (_, _, slots), tests in kinds.items():
        misses = {
            name: sum(test.counts[name][..., MISSES].sum(axis=2) for test in tests) for name in ("lru", "min", policy)
        }
        gap = _ratio(np.asarray(misses["lru"] - misses[policy]), np.asarray(misses["lru"] - misses["min"]))
        result.append((", ".join(test.name for test in tests), list(slots), gap))
    return result


def rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """One row per test, policy and number of slots; None for what is not known."""
    by_name = {test.name: test for test in evaluation.tests}
    result = []
    for figures in evaluation.figures:
        tests = [by_name[figures.name]] if figures.name != ALL else evaluation.tests
        for column, policy in enumerate(evaluation.policies):
            for place, label in enumerate(figures.slots):
                row: dict[str, Any] = {
                    "test": figures.name,
                    "policy": policy,
                    "slots": label,
                    "slots_per_layer": tests[0].slots.get(label) if len(tests) == 1 else None,
                    "prompts": sum(test.num_prompts for test in tests),
                    "tokens": int(sum(test.tokens.sum() for test in tests)),
                }
                for metric in METRICS:
                    for suffix, values in (("", figures.value), ("_low", figures.low), ("_high", figures.high)):
                        number = values[metric][place, column]
                        row[metric + suffix] = None if np.isnan(number) else round(float(number), 6)
                result.append(row)
    return result
