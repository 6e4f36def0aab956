"""Look-ahead: reads of experts that the next MoE layer may miss, in spare rows, while the drive would be idle.

Owns the reads ahead that nobody has asked for yet, and the decision how many are worth their bytes. Reads ahead never
change who is resident: a record that is needed becomes its slot's by an exchange of rows. Invariant: at any time the
reads ahead are those of one layer, the next to be computed.

How many: `auto` expects of the i-th read ahead that it saves what it runs of in the drive's idle time, if it is
needed, and delays the reads that are, by what is left of it, if it is not:
`p * idle_i - (1 - p) * max(0, read - idle_i) > 0`, with `idle_i = idle - i * read`. The idle time between the last
read of one layer and the first of the next, the time of a read, and the share p of predictions of a class that came
true are measured all the time, whether anything is read ahead or not. Prefill and decode have a prefetcher each: of
one token the class of a prediction is its place among the likeliest, of a prompt the number of tokens it is made for.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashmoe_jax.config import PrefetchMode
from flashmoe_jax.experts.fetcher import Fetcher, Read
from flashmoe_jax.experts.rows import RowTable
from flashmoe_jax.telemetry.counters import StageCounters

# Weight of the newest measurement.
NEWEST = 0.05
# Share of predictions that come true, before any was seen.
FIRST_PRECISION = 0.7


class Prediction(NamedTuple):
    """An expert that is not resident and may be needed; how likely is learned per class."""

    expert: int
    grade: int  # class, from 0


def of_tokens(predicted_BX: np.ndarray) -> list[Prediction]:
    """Predictions for one token of each sequence, likeliest first; graded by their place.

    Args:
        predicted_BX: experts, likeliest first; -1 is none.
    """
    # Rank by rank over the sequences: the likeliest of each come first.
    experts = dict.fromkeys(int(e) for e in predicted_BX.T.reshape(-1) if e >= 0)
    return [Prediction(e, min(i, predicted_BX.shape[1] - 1)) for i, e in enumerate(experts)]


def of_prompt(count_E: np.ndarray, num_grades: int) -> list[Prediction]:
    """Predictions for many tokens, in the order in which they will compute; graded by the tokens they are made for."""
    return [Prediction(int(e), min(int(count_E[e]), num_grades) - 1) for e in np.flatnonzero(count_E > 0)]


class Prefetcher:
    """Reads ahead for one stage.

    Args:
        mode: `on` reads all that is predicted, `auto` what is expected to pay, `off` nothing.
        counters: of the stage.
        num_grades: classes of predictions.
    """

    def __init__(self, mode: PrefetchMode, fetcher: Fetcher, rows: RowTable, counters: StageCounters, num_grades: int):
        self.mode = mode
        self._fetcher, self._rows, self._counters = fetcher, rows, counters
        self._reads: dict[int, Read] = {}  # of the next layer, by expert
        self._draining: list[Read] = []  # not needed, still on their way
        self._predicted: Sequence[Prediction] = ()
        self._precision = [FIRST_PRECISION] * num_grades
        self._idle_s: float | None = None
        self._idle_since: float | None = None
        self._clock = (0, 0.0)  # reads and busy seconds when last looked at
        self._read_s = 0.0

    def adopt(self, missing: Sequence[int] | np.ndarray) -> dict[int, Read]:
        """The layer's misses are known: returns the reads ahead among them, by expert, and gives the others up.

        The rows of those returned are taken; the caller gives them to slots, or back.
        """
        self._measure(missing)
        needed = {int(e) for e in missing}
        adopted = {e: read for e, read in self._reads.items() if e in needed and read.has_begun}
        given_up = [read for e, read in self._reads.items() if e not in adopted]
        self._reads = {}
        dropped = self._fetcher.drop(given_up)
        for read in dropped:
            self._rows.give_back(read.row)
        self._draining += [read for read in given_up if read not in dropped]
        late = sum(not read.done.done() for read in adopted.values())
        self._counters.prefetch_late += late
        self._counters.prefetch_useful += len(adopted) - late
        self._counters.prefetch_cancelled += len(dropped)
        self._counters.prefetch_wasted += len(given_up) - len(dropped)
        self._fetcher.demand(list(adopted.values()))
        self.settle()
        return adopted

    @property
    def num_grades(self) -> int:
        return len(self._precision)

    def begin(self) -> None:
        """A prompt begins: all spare rows are its own, and how long the drive idles depends on its length."""
        self.settle(must=True)
        self._idle_s = None

    def look_ahead(self, layer: int, predicted: Sequence[Prediction], *, num_left: int = 0) -> None:
        """Begins reads for a layer, behind all that is demanded, as far as spare rows reach.

        Args:
            predicted: in the order in which they are to be read.
            num_left: rows that stay spare.
        """
        self._predicted = predicted
        self.settle()
        placements: list[tuple[int, int]] = []
        for expert, grade in predicted:
            if self._rows.num_free <= num_left:
                break
            if self._is_worth_reading(self._precision[grade], len(placements)):
                row = self._rows.take()
                assert row is not None
                placements.append((expert, row))
        self._reads = {read.expert: read for read in self._fetcher.read_ahead(layer, placements)}

    def demand_is_served(self) -> None:
        """No demanded read is left: from now on the drive would be idle until the next layer's misses are known."""
        self._idle_since = time.perf_counter()

    def settle(self, *, must: bool = False) -> None:
        """Gives back the rows of reads that nobody needed and that have ended; `must` waits for them."""
        going_on = []
        for read in self._draining:
            if must:
                read.done.exception()
            if read.done.done():
                self._fetcher.forget(read)
                self._rows.give_back(read.row)
            else:
                going_on.append(read)
        self._draining = going_on

    @property
    def is_draining(self) -> bool:
        """Whether rows are held by reads that nobody needs."""
        return bool(self._draining)

    def forget(self) -> None:
        """The queue was drained and all rows are as at the beginning."""
        self._reads, self._draining, self._predicted = {}, [], ()
        self._idle_since = None

    def _measure(self, missing: Sequence[int] | np.ndarray) -> None:
        if self._idle_since is not None:
            idle_s = time.perf_counter() - self._idle_since
            self._idle_s = idle_s if self._idle_s is None else self._idle_s + NEWEST * (idle_s - self._idle_s)
            self._idle_since = None
        needed = {int(e) for e in missing}
        for expert, grade in self._predicted:
            self._precision[grade] += NEWEST * ((expert in needed) - self._precision[grade])
        self._predicted = ()
        num_reads, busy_s = self._fetcher.num_reads, self._fetcher.busy_s
        if num_reads > self._clock[0]:
            read_s = (busy_s - self._clock[1]) / (num_reads - self._clock[0])
            self._read_s = read_s if self._read_s == 0 else self._read_s + NEWEST * (read_s - self._read_s)
            self._clock = (num_reads, busy_s)

    def _is_worth_reading(self, precision: float, num_before: int) -> bool:
        if self.mode is not PrefetchMode.AUTO:
            return self.mode is PrefetchMode.ON
        idle_s = (self._idle_s or 0.0) - num_before * self._read_s
        return precision * idle_s > (1 - precision) * max(0.0, self._read_s - idle_s)
