"""A conversation at the terminal: turns of a person and of the model over one KV cache.

Owns the messages and what of them is already in the cache. Does not own the cache (`engine/session.py`). Invariant:
the model sees the token ids that the whole conversation has when it is rendered and encoded afresh. Only what is new
since the last turn is computed; a template that rewrites earlier turns (many drop old reasoning) makes more new.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashmoe_jax.console import INTERRUPTED, StopRequest, say
from flashmoe_jax.errors import PromptError
from flashmoe_jax.output import write
from flashmoe_jax.text import ChatTemplate, SamplingParams, Tokenizer
from flashmoe_jax.text.sampling_params import MAX_SEED

if TYPE_CHECKING:
    from flashmoe_jax.engine.engine import Engine
    from flashmoe_jax.engine.generation import Piece

PROMPT = "> "


class Conversation:
    """Messages so far and the session that holds them.

    Args:
        system: first message of every start, or None.
        variables: for the chat template.
        max_new_tokens: of one answer; less where the context is nearly full.
        sampling, stop, stop_token_ids, ignore_eos: as for `Engine.generate`.
    """

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system: str | None,
        variables: Mapping[str, Any],
        max_new_tokens: int,
        sampling: SamplingParams,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ):
        self._engine, self._tokenizer, self._template = engine, tokenizer, template
        self._system, self._variables = system, variables
        self._max_new_tokens = max_new_tokens
        self._sampling, self._num_answers = sampling, 0
        self._options: dict[str, Any] = {
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "ignore_eos": ignore_eos,
        }
        self._session = engine.session()
        self.messages = first_messages(system)

    def reset(self) -> None:
        """Forgets all turns; the experts stay where they are."""
        self.messages = first_messages(self._system)
        self._session.rewind(0, 0)

    def answer(self, text: str) -> Generator["Piece", None, None]:
        """Pieces of the answer to `text`. Both become part of the conversation, the answer as far as it was taken.

        Raises:
            PromptError: the template refuses the message, or the context has no room for an answer.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._tokenizer.encode(self._template.render(messages, self._variables), add_special=False)
        room = self._session.context - len(ids)
        if room < 1:
            raise PromptError(
                f"the conversation has {len(ids)} tokens with this message and the context holds "
                f"{self._session.context}; /reset starts over, --max-context gives more room"
            )
        cached = self._session.tokens[0]
        # The last token is always computed, as its logits choose the first of the answer.
        num_known = min(_common_prefix(cached, ids), len(ids) - 1)
        self._session.rewind(0, num_known)
        self.messages = messages
        # Each answer has its own seed, or every answer would be drawn with the same luck.
        seed = (self._sampling.seed + self._num_answers) % (MAX_SEED + 1)
        self._num_answers += 1
        answer = ""
        try:
            for piece in self._engine.generate(
                [ids[num_known:]],
                max_new_tokens=min(self._max_new_tokens, room),
                sampling=dataclasses.replace(self._sampling, seed=seed),
                session=self._session,
                **self._options,
            ):
                answer += piece.text
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def summary_line(self) -> str:
        return self._engine.summary_line()

    def take_notes(self) -> list[str]:
        return self._engine.take_notes()


def first_messages(system: str | None) -> list[dict[str, Any]]:
    """Messages before the first turn."""
    return [] if system is None else [{"role": "system", "content": system}]


def converse(conversation: Conversation) -> int:
    """Asks, answers, until the input ends or /exit; returns the exit code.

    Ctrl-C while the model answers ends the answer; at the prompt, or pressed a second time, it ends the conversation.
    """
    try:
        while (line := _ask()) is not None and line.strip() != "/exit":
            if line.strip() == "/reset":
                conversation.reset()
                say("the conversation starts over")
            elif line.strip():
                _show_answer(conversation, line)
    except KeyboardInterrupt:
        write("\n")
        return INTERRUPTED
    return 0


def _show_answer(conversation: Conversation, line: str) -> None:
    pieces = conversation.answer(line)
    try:
        with StopRequest("stopping the answer; Ctrl-C again to leave") as stop:
            for piece in pieces:
                write(piece.text)
                if stop.is_set:
                    break
    except PromptError as error:
        # The conversation can go on: with a shorter message, or after /reset.
        say(f"error: {error}")
        return
    finally:
        pieces.close()
    write("\n")
    for note in conversation.take_notes():
        say(f"note: {note}")
    say(f"({conversation.summary_line()})")


def _ask() -> str | None:
    """The next line of input without its line break, None at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its line editing
        try:
            return input(PROMPT)
        except EOFError:
            write("\n")
            return None
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    line = sys.stdin.readline()
    return line.removesuffix("\n").removesuffix("\r") if line else None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
