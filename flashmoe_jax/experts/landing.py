"""One record on its way from the drive to memory: what the store hands to a reader, and what the reader hands back.

Owns the check of the bytes and the words of every error. Invariant: the future completes without an error only after
the checksum of the whole record was found right, and exactly once.
"""

import concurrent.futures
from typing import NamedTuple

import numpy as np
import xxhash

from flashmoe_jax.errors import CheckpointError, DamagedRecordError
from flashmoe_jax.experts.shard import ARRAY_NAME


class ByteRange(NamedTuple):
    """Where a record stands: bytes `[start, end)` of the file `key` within the array."""

    key: str
    start: int
    end: int


class Landing:
    """A read that has begun: it cannot be cancelled, and its memory is written until the future is done.

    Args:
        place: of the record in its shard.
        written: checksum of the record as it was written.
        out: uint8, contiguous, of the record's size.
    """

    def __init__(self, layer: int, expert: int, place: ByteRange, written: str, out: np.ndarray):
        self.layer, self.expert, self.place, self.out = layer, expert, place, out
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()
        self._written = written

    def arrived(self, digest: "xxhash.xxh3_64") -> None:
        """All bytes are in place and were given to `digest`, in order."""
        error = damage(self.layer, self.expert, self.place, digest.hexdigest(), self._written)
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def arrived_whole(self) -> None:
        """All bytes are in place, and nobody has looked at them."""
        self.arrived(xxhash.xxh3_64(self.out.data))

    def failed(self, error: BaseException) -> None:
        """The read ended with an error; ValueError and OSError mean that bytes are missing or cannot be read."""
        kind = DamagedRecordError if isinstance(error, ValueError | OSError) else CheckpointError
        where = place_name(self.layer, self.expert, self.place)
        self.future.set_exception(kind(f"{where} cannot be read: {first_line(error)}"))


def damage(layer: int, expert: int, place: ByteRange, found: str, written: str) -> DamagedRecordError | None:
    """An error unless the checksums agree."""
    if found == written:
        return None
    return DamagedRecordError(
        f"{place_name(layer, expert, place)} is damaged: its checksum is {found}, the manifest has {written}; "
        "convert the model again"
    )


def place_name(layer: int, expert: int, place: ByteRange) -> str:
    return f"layer {layer} expert {expert} ({ARRAY_NAME}/{place.key}, bytes {place.start} to {place.end})"


def first_line(error: BaseException) -> str:
    """The first line of a tensorstore error, without its source locations."""
    return str(error).split("\n")[0].split(" [tensorstore_spec")[0].strip()
