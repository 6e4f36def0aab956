"""Text on both sides of the model: tokenizer, chat template, stop strings, decoding defaults.

Owns everything between characters and token ids. Knows nothing of models, devices or JAX, so that a command line can
read a prompt and refuse a bad option before the slow imports. Invariant: no text that leaves this package contains
half a character.
"""

from flashmoe_jax.text.chat import ChatTemplate
from flashmoe_jax.text.generation_config import GenerationDefaults
from flashmoe_jax.text.sampling_params import SamplingParams
from flashmoe_jax.text.stop import StopScanner
from flashmoe_jax.text.stream import TextStream
from flashmoe_jax.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "GenerationDefaults", "SamplingParams", "StopScanner", "TextStream", "Tokenizer"]
