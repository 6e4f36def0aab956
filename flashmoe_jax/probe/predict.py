"""Tokens per second of decode, from rates and misses: a model simple enough to be checked by hand.

Per MoE layer the engine computes the dense part, then begins the reads of the `m` missing experts, computes the
resident ones meanwhile, and computes the missing ones when they are there:

    layer(m)  = dense + max(resident(m), read(m)) + missing(m)
    in_turn   = layers x mean over m of layer(m)
    at_least  = max(layers x mean over m of read(m), layers x (dense + resident + missing))
    token     = at_least + (1 - PREFETCH_SHARE) x (in_turn - at_least)

`read(m)` is m records at the drive's rate with as many reads in flight as the engine keeps, `dense`, `resident` and
`missing` are bytes of weights at the rate of the kernels, which is at most the memory's. `at_least` is reached when
drive and cores never wait for each other; prefetching the next layers' experts closes a share of the gap. Not in it:
the KV cache, work of the host between the layers, and that cores and drive slow each other down.
Invariant: a faster drive, faster memory or fewer misses never make a prediction slower.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from flashmoe_jax.experts.fetcher import reads_in_flight

# What look-ahead gained of the gap between in_turn and at_least in the measurements that the design rests on (OLMoE,
# recall 0.8: 0.5 at 34 of 64 slots, 0.3 at 14 of 64).
PREFETCH_SHARE = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenWork:
    """What one decoded token needs of a model, apart from which experts are resident."""

    num_layers: int  # MoE layers
    experts_per_token: int
    record_bytes: int  # read from the drive
    expert_bytes: int  # weights of one expert, read from memory
    dense_bytes: int  # all other weights that a token touches, read from memory

    @property
    def touched_bytes(self) -> int:
        """Weights that pass through the cores."""
        return self.dense_bytes + self.num_layers * self.experts_per_token * self.expert_bytes


@dataclasses.dataclass(frozen=True)
class Drive:
    """A drive's rates by the number of reads in flight; one rate for a drive that is only imagined."""

    name: str
    bytes_per_s: Mapping[int, float]

    @classmethod
    def of_rate(cls, name: str, bytes_per_s: float) -> "Drive":
        return cls(name, {1: bytes_per_s})

    def read_seconds(self, num_records: int, record_bytes: int) -> float:
        """Of the missing experts of one layer, all in flight together as far as the engine lets them."""
        longest = 0.0
        for count in range(1, num_records + 1):
            depth = max(d for d in self.bytes_per_s if d <= min(count, reads_in_flight(record_bytes)))
            # Where a measurement says that two reads are done before one, it is noise.
            longest = max(longest, count * record_bytes / self.bytes_per_s[depth])
        return longest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one budget and drive."""

    tokens_per_s: float
    limit_tokens_per_s: float  # if nothing ever waited for anything
    read_bytes_per_s: float  # of the drive with this many misses
    bound: str  # drive, copy or memory: what takes the larger part


def predict(
    work: TokenWork,
    miss_shares: np.ndarray,
    drive: Drive,
    *,
    compute_bytes_per_s: float,
    copy_bytes_per_s: float | None = None,
    prefetch_share: float = PREFETCH_SHARE,
) -> Prediction:
    """Predicts decode of one sequence.

    Args:
        work: of a token.
        miss_shares: `[X + 1]` as `MissModel.miss_shares` gives them.
        drive: to read from.
        compute_bytes_per_s: of the kernels, at most that of the memory.
        copy_bytes_per_s: from host to device, beside the reads; None where device memory is host memory.
        prefetch_share: of the gap between in_turn and at_least; 0 for an engine that does not prefetch.
    """
    L, X = work.num_layers, work.experts_per_token
    num_missed = np.arange(X + 1)
    read_s = np.array([drive.read_seconds(m, work.record_bytes) for m in range(X + 1)])
    copy_s = num_missed * work.record_bytes / copy_bytes_per_s if copy_bytes_per_s else np.zeros(X + 1)
    arrive_s = np.maximum(read_s, copy_s)
    expert_s = work.expert_bytes / compute_bytes_per_s
    dense_s = work.dense_bytes / L / compute_bytes_per_s
    layer_s = dense_s + np.maximum((X - num_missed) * expert_s, arrive_s) + num_missed * expert_s
    in_turn_s, arriving_s = L * float(miss_shares @ layer_s), L * float(miss_shares @ arrive_s)
    computing_s = work.touched_bytes / compute_bytes_per_s
    at_least_s = max(arriving_s, computing_s)
    reading_s = L * float(miss_shares @ read_s)
    read_bytes = L * float(miss_shares @ num_missed) * work.record_bytes
    return Prediction(
        tokens_per_s=1 / (at_least_s + (1 - prefetch_share) * (in_turn_s - at_least_s)),
        limit_tokens_per_s=1 / at_least_s,
        read_bytes_per_s=read_bytes / reading_s if reading_s else drive.bytes_per_s[min(drive.bytes_per_s)],
        bound="memory" if computing_s >= arriving_s else "drive" if reading_s >= arriving_s else "copy",
    )
