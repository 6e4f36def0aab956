"""Pieces of generated text on their way to stdout: streamed for a person, or one JSON object for a program.

Owns the order in which a batch is shown. Invariant: nothing that was generated is lost, whenever generation ends.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashmoe_jax.errors import ConfigError

if TYPE_CHECKING:
    from flashmoe_jax.engine.generation import Piece


class StreamOutput:
    """Text as it is made. Of a batch one sequence at a time is shown live, each under its number; the others wait."""

    def __init__(self, num_sequences: int):
        self._waiting = [""] * num_sequences
        self._is_done = [False] * num_sequences
        self._live = -1
        self._show_next()

    def add(self, piece: "Piece") -> None:
        self._waiting[piece.sequence] += piece.text
        self._is_done[piece.sequence] |= piece.finish_reason is not None
        while self._live < len(self._waiting):
            write(self._waiting[self._live])
            self._waiting[self._live] = ""
            if not self._is_done[self._live]:
                break
            self._show_next()

    def finish(self) -> None:
        """Shows what is left, also of sequences that were cut short."""
        while self._live < len(self._waiting):
            write(self._waiting[self._live])
            self._show_next()

    def _show_next(self) -> None:
        if self._live >= 0:
            write("\n")
        self._live += 1
        if 1 < len(self._waiting) > self._live:
            write(f"[{self._live + 1}/{len(self._waiting)}]\n")


class JsonOutput:
    """Collects text and ids; `result` is the front part of the `--json` object."""

    def __init__(self, num_sequences: int):
        self._text = [""] * num_sequences
        self._token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self._reason = ["interrupted"] * num_sequences

    def add(self, piece: "Piece") -> None:
        self._text[piece.sequence] += piece.text
        if piece.token_id is not None:
            self._token_ids[piece.sequence].append(piece.token_id)
        if piece.finish_reason is not None:
            self._reason[piece.sequence] = piece.finish_reason

    def finish(self) -> None:
        """Nothing: the object is printed whole or not at all."""

    def result(self, prompt_tokens: Sequence[int]) -> dict[str, Any]:
        """`text`, `token_ids`, `prompt_tokens`, `finish_reason`; lists with one entry per prompt for a batch."""
        columns: dict[str, Sequence[Any]] = {
            "text": self._text,
            "token_ids": self._token_ids,
            "prompt_tokens": list(prompt_tokens),
            "finish_reason": self._reason,
        }
        return dict(columns) if len(self._text) > 1 else {name: column[0] for name, column in columns.items()}


def write(text: str) -> None:
    """Text to stdout, at once.

    Raises:
        BrokenPipeError: the reader is gone.
        ConfigError: any other failure, such as a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"stdout cannot be written: {error.strerror}; send it elsewhere") from error
