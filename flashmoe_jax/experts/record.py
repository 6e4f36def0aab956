"""The bytes of one expert: which fields, in which order, as which words.

Owns the record layout, packing, unpacking and the checksum; knows nothing of files (`shard.py`, `store.py`) or of
models. Invariant: a record is `record_words` unsigned little-endian words as wide as the stored weight, the fields
one after the other without gaps, then zeros up to a multiple of 4096 bytes, so that one aligned range of the drive
is one expert. The words are never converted: a record holds the exact bits of the checkpoint.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from flashmoe_jax.errors import CheckpointError

RECORD_ALIGNMENT = 4096  # bytes; what O_DIRECT and page-aligned slots need
_WORD_OF_WEIGHT = {"bfloat16": "uint16", "float16": "uint16", "float32": "uint32"}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a weight dtype name; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclasses.dataclass(frozen=True)
class RecordField:
    """One matrix within a record; `word_offset` counts words from the start of the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    word_offset: int

    @property
    def num_words(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Fields and size of a record. All experts of a store share one layout."""

    fields: tuple[RecordField, ...]
    word_dtype: str
    payload_words: int
    record_words: int

    @classmethod
    def for_experts(cls, field_specs: Sequence[tuple[str, tuple[int, ...]]], weight_dtype: str) -> "RecordLayout":
        """Lays the fields out in the order given.

        Args:
            field_specs: (name, shape) of each matrix.
            weight_dtype: bfloat16, float16 or float32; every field is stored in it.
        """
        if weight_dtype not in _WORD_OF_WEIGHT:
            raise CheckpointError(
                f"expert weights are {weight_dtype}; stores hold {', '.join(_WORD_OF_WEIGHT)}: "
                "convert with --dtype bfloat16 or float32"
            )
        fields, offset = [], 0
        for name, shape in field_specs:
            fields.append(RecordField(name, weight_dtype, tuple(shape), offset))
            offset += fields[-1].num_words
        word_dtype = _WORD_OF_WEIGHT[weight_dtype]
        alignment = RECORD_ALIGNMENT // np.dtype(word_dtype).itemsize
        return cls(tuple(fields), word_dtype, offset, -(-offset // alignment) * alignment)

    @property
    def record_bytes(self) -> int:
        return self.record_words * np.dtype(self.word_dtype).itemsize

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """One record as words `[record_words]`, zero padded.

        Raises:
            CheckpointError: fields are missing or unknown, or one has another shape or dtype.
        """
        words = np.zeros(self.record_words, self.word_dtype)
        self.pack_into(arrays, words)
        return words

    def pack_into(self, arrays: Mapping[str, np.ndarray], words: np.ndarray) -> None:
        """As `pack`, into the words `[record_words]` given; their padding is left as it is."""
        names = {field.name for field in self.fields}
        if set(arrays) != names:
            raise CheckpointError(f"an expert has fields {sorted(names)}; given were {sorted(arrays)}")
        for field in self.fields:
            array = arrays[field.name]
            if array.shape != field.shape or array.dtype != numpy_dtype(field.dtype):
                raise CheckpointError(
                    f"expert field {field.name} is {field.dtype}{list(field.shape)}; "
                    f"given was {array.dtype}{list(array.shape)}"
                )
            self._words_of(words, field)[...] = np.ascontiguousarray(array).view(self.word_dtype)

    def unpack(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a record as views of `words` `[record_words]`; nothing is copied."""
        assert words.shape == (self.record_words,)
        assert words.dtype == np.dtype(self.word_dtype)
        return {f.name: self._words_of(words, f).view(numpy_dtype(f.dtype)) for f in self.fields}

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for the manifest and the array's attributes; `from_json` reads it back."""
        return {
            "fields": [
                {"name": f.name, "dtype": f.dtype, "shape": list(f.shape), "word_offset": f.word_offset}
                for f in self.fields
            ],
            "word_dtype": self.word_dtype,
            "payload_words": self.payload_words,
            "record_words": self.record_words,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RecordLayout":
        try:
            fields = tuple(
                RecordField(f["name"], f["dtype"], tuple(f["shape"]), f["word_offset"]) for f in values["fields"]
            )
            layout = cls(fields, values["word_dtype"], values["payload_words"], values["record_words"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the record layout lacks {error}; convert the model again") from None
        fits = all(f.word_offset + f.num_words <= layout.payload_words for f in layout.fields)
        if not fits or layout.payload_words > layout.record_words or layout.record_bytes % RECORD_ALIGNMENT:
            raise CheckpointError("the record layout contradicts itself; convert the model again")
        return layout

    @staticmethod
    def _words_of(words: np.ndarray, field: RecordField) -> np.ndarray:
        return words[field.word_offset : field.word_offset + field.num_words].reshape(field.shape)


def checksum(buffer: np.ndarray | bytes) -> str:
    """xxh3-64 of a whole padded record (or of any contiguous buffer), in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(buffer.data if isinstance(buffer, np.ndarray) else buffer)
