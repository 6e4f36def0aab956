"""How the next token is chosen: the parameters and their ranges.

Owns names, defaults and validation; the arithmetic is in `engine/sampling.py`. Needs no JAX, so that a command line
can refuse a bad value at once. Invariant: an instance that exists is valid.
"""

import dataclasses
import math

from flashmoe_jax.errors import ConfigError

MAX_SEED = 2**64 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one sequence; the defaults choose the most probable token.

    temperature: divides the logits; 0 chooses the most probable token (the lowest id among equals).
    top_p: keep the fewest tokens whose probability reaches this share; 1 keeps all.
    top_k: keep this many most probable tokens; 0 keeps all.
    min_p: drop tokens less probable than this share of the most probable one; 0 drops none.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
    presence_penalty: subtracted from the logits of tokens in the output.
    seed: of the random choice; step i of a sequence uses the same randomness whatever else is in its batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("temperature", self.temperature >= 0, "0 (greedy) or more")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all tokens)")
        self._check("top_k", self.top_k >= 0 and self.top_k == int(self.top_k), "0 (all tokens) or a whole number")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 (keeps all tokens) and 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is no penalty)")
        self._check("presence_penalty", True, "a number (0 is no penalty)")
        self._check("seed", 0 <= self.seed <= MAX_SEED and self.seed == int(self.seed), "between 0 and 2**64 - 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def _check(self, name: str, is_in_range: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or not is_in_range:
            raise ConfigError(f"{name} is {value}; it must be {allowed}")
