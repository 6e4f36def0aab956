"""The token loop: prefill, sample, decode, until every sequence has ended.

Owns when a sequence ends and the times that are reported. Text is cut off here (stop strings) but not made here
(`flashmoe_jax/text`). Invariant: the tokens of a sequence do not depend on how fast they are taken, nor on the other
sequences' sampling parameters.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from flashmoe_jax.engine.sampling import SamplingArrays, SamplingParams, mark_output, sample, seen_in_prompts
from flashmoe_jax.engine.session import Session
from flashmoe_jax.text.stop import StopScanner
from flashmoe_jax.text.stream import TextStream
from flashmoe_jax.text.tokenizer import Tokenizer

_mark_output = jax.jit(mark_output, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step added to one sequence.

    `token_id` is None where only text held back was released; `text` is empty without a tokenizer, and while a
    character or a possible stop string is incomplete. `finish_reason` is "stop" or "length" in a sequence's last piece.
    """

    sequence: int
    token_id: int | None
    text: str
    finish_reason: str | None = None


@dataclasses.dataclass
class GenerationTimes:
    """Clock readings of the last generation, in seconds."""

    ttft_s: float | None = None
    step_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When a sequence ends."""

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


class _Output:
    """Text side of one sequence: detokenizer, then stop strings."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]):
        self._stream: TextStream | None = tokenizer.stream() if tokenizer is not None else None
        self._scanner = StopScanner(stop)
        self.num_tokens = 0
        self.is_finished = False

    def push(self, sequence: int, token_id: int, limits: Limits) -> Iterator[Piece]:
        """Pieces for one more token."""
        self.num_tokens += 1
        ends = token_id in limits.stop_token_ids
        text = ""
        if self._stream is not None and not ends:
            text = self._scanner.push(self._stream.push(token_id))
        reason = None
        if ends or self._scanner.is_stopped:
            reason = "stop"
        elif self.num_tokens >= limits.max_new_tokens:
            reason = "length"
        if reason is not None:
            self.is_finished = True
            if self._stream is not None and not self._scanner.is_stopped:
                text += self._scanner.push(self._stream.finish()) + self._scanner.finish()
        yield Piece(sequence, token_id, text, reason)


def generate_pieces(
    session: Session,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    limits: Limits,
    tokenizer: Tokenizer | None,
    times: GenerationTimes,
) -> Iterator[Piece]:
    """Appends the prompts to the session and yields what the model says to each.

    The token that ends a sequence is yielded but, like any last token, is not in the cache afterwards. A consumer may
    stop at any piece; the session then holds the tokens computed so far.
    """
    began = time.perf_counter()
    arrays = SamplingArrays.stack(params)
    outputs = [_Output(tokenizer, limits.stop) for _ in prompts]
    has_penalty = any(p.repetition_penalty != 1 or p.presence_penalty != 0 for p in params)
    logits = session.prefill(prompts)
    seen = seen_in_prompts(session.tokens, session.vocab_size) if has_penalty else None
    last = began
    step = 0
    while True:
        # Tokens of sequences that have ended are chosen too and dropped, so that one program serves all steps.
        step_B = np.full(len(outputs), step, np.int32)
        token = sample(logits, arrays, seen, step_B)
        if seen is not None:
            seen = _mark_output(seen, token)
        token_B = np.asarray(token)
        now = time.perf_counter()
        if step == 0:
            times.ttft_s = now - began
        else:
            times.step_s.append(now - last)
        last = now
        for sequence, output in enumerate(outputs):
            if not output.is_finished:
                yield from output.push(sequence, int(token_B[sequence]), limits)
        active = np.array([not output.is_finished for output in outputs])
        if not active.any():
            return
        logits = session.decode(token_B, active)
        step += 1
