"""Measuring several things in turn, so that a drift of the machine meets all of them alike."""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def in_turn(
    measure: Mapping[Key, Callable[[], float]], num_rounds: int, *, warm_up: bool = True
) -> dict[Key, list[float]]:
    """What each measurement returned, over rounds in which each is made once.

    Args:
        measure: by what is measured; called in this order.
        num_rounds: that count, at least 1.
        warm_up: whether one more round goes first that does not count (compilation, first touch of memory).
    """
    results: dict[Key, list[float]] = {key: [] for key in measure}
    for round_id in range(-1 if warm_up else 0, num_rounds):
        for key, run in measure.items():
            result = run()
            if round_id >= 0:
                results[key].append(result)
    return results
