"""Stop strings: where text ends before the model does.

Owns the search for stop strings in text that arrives in pieces. Does not know tokens. Invariant: what has been
released never contains a stop string or the beginning of one that a later piece completes, and the result does not
depend on how the text was cut into pieces.
"""

from collections.abc import Sequence

from flashmoe_jax.errors import PromptError


class StopScanner:
    """Releases text up to the first stop string to be completed, and nothing after it.

    Args:
        stop: strings that end the text; the string itself is not released. Empty strings are refused.
    """

    def __init__(self, stop: Sequence[str] = ()):
        if isinstance(stop, str):
            stop = (stop,)
        if any(not s for s in stop):
            raise PromptError("a stop string is empty; give at least one character, or leave --stop out")
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Takes the next piece of text and returns what is safe to show; `is_stopped` says whether to go on."""
        if self.is_stopped:
            return ""
        if not self._stop:
            return text
        held = self._held + text
        # The string that completes first wins: later pieces must not change what an earlier piece decided.
        matches = [(at + len(s), at) for s in self._stop if (at := held.find(s)) >= 0]
        if matches:
            self.is_stopped = True
            self._held = ""
            return held[: min(matches)[1]]
        keep = max(_overlap(held, s) for s in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Releases the text held back, once no more is to come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
