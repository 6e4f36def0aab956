"""Text from token ids, one at a time.

Owns the incremental detokenizer. Does not own the vocabulary (`tokenizer.py`). Invariant: the pieces together are the
text of all the tokens together, and no piece ends inside a character; bytes that are no UTF-8 become U+FFFD.

A byte-level or SentencePiece-like decoder maps each token to bytes of its own, so those are decoded byte by byte
(`ByteRule`). Any other decoder is asked for the text of a short window of tokens, with and without the newest one.
"""

import codecs
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class TextStream(Protocol):
    """Incremental detokenizer of one sequence."""

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the whole characters that it completes, possibly none."""

    def finish(self) -> str:
        """Returns what is left, once no more tokens come: U+FFFD for a character that was never completed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteRule:
    """How a decoder of tokenizer.json turns one token into bytes.

    `is_byte_level`: each character stands for a byte (GPT-2); a token with any other character is literal text.
    `has_byte_fallback`: the token `<0xE2>` is that byte. `replacements` are literal (old, new) pairs.
    `first_drops` is removed from the first token of a text wherever it stands (Metaspace). Up to `strip_start` leading
    `strip_char` of a text are removed. Both concern a text's very start only.
    """

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    first_drops: str = ""
    strip_start: int = 0
    strip_char: str = " "

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> "ByteRule | None":
        """The rule of a `decoder` block of tokenizer.json; None where tokens do not map to bytes one by one."""
        if decoder is None:
            return None
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if "Fuse" in kinds:
            # After Fuse the steps see the whole text, so only stripping its start can still be done token by token.
            after = kinds[kinds.index("Fuse") + 1 :]
            if after not in ([], ["Strip"]):
                return None
            steps = [step for step in steps if step["type"] != "Fuse"]
        rule = cls()
        for i, step in enumerate(steps):
            is_last = i == len(steps) - 1
            match step["type"]:
                case "ByteLevel" if len(steps) == 1:
                    rule = cls(is_byte_level=True)
                case "Metaspace" if len(steps) == 1:
                    mark = step["replacement"]
                    first_drops = "" if step.get("prepend_scheme", "always") == "never" else mark
                    rule = cls(replacements=((mark, " "),), first_drops=first_drops)
                case "Replace" if "String" in step["pattern"] and not rule.has_byte_fallback:
                    pair = (step["pattern"]["String"], step["content"])
                    rule = dataclasses.replace(rule, replacements=(*rule.replacements, pair))
                case "ByteFallback":
                    rule = dataclasses.replace(rule, has_byte_fallback=True)
                case "Strip" if is_last and step["stop"] == 0 and "Fuse" in kinds:
                    rule = dataclasses.replace(rule, strip_start=step["start"], strip_char=step["content"])
                case _:
                    return None
        return rule

    def token_bytes(self, token: str, is_first: bool) -> bytes:
        """Bytes of one token; `is_first` when it is the first shown token of a text."""
        if self.is_byte_level:
            if all(c in _BYTE_OF_CHAR for c in token):
                return bytes(_BYTE_OF_CHAR[c] for c in token)
            return token.encode()
        if is_first and self.first_drops:
            token = token.replace(self.first_drops, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()


class ByteStream:
    """`TextStream` over a `ByteRule`; constant work per token.

    Args:
        rule: the decoder's rule.
        token_of: token id to token text, None for ids that show nothing (special and unknown ones).
        at_start: True when the first token begins a text, False when it continues one.
    """

    def __init__(self, rule: ByteRule, token_of: Callable[[int], str | None], at_start: bool):
        self._rule = rule
        self._token_of = token_of
        self._is_first = at_start
        self._to_strip = rule.strip_start if at_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token is None:
            return ""
        data = self._rule.token_bytes(token, self._is_first)
        self._is_first = False
        return self._stripped(self._utf8.decode(data))

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._rule.strip_char):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class WindowStream:
    """`TextStream` over any decoder: the text that the newest tokens add to the ones shown just before.

    A window that ends in U+FFFD may end inside a character, so it waits for the next token.

    Args:
        decode: the text of some token ids, special ones included as the caller wants them.
        is_shown: whether a token id shows anything; the others never enter the window.
        context: ids that the stream continues; empty when it begins a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], is_shown: Callable[[int], bool], context: Sequence[int]):
        self._decode = decode
        self._is_shown = is_shown
        self._window = list(context)
        self._num_context = len(self._window)
        self._context_text = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._release(text)

    def finish(self) -> str:
        if len(self._window) == self._num_context:
            return ""
        return self._release(self._decode(self._window))

    def _release(self, text: str) -> str:
        added = text[len(self._context_text) :]
        # The tokens just shown stay as context: decoders treat the first token of a text differently.
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return added


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of the byte-level alphabet (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
