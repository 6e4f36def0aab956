"""Axis letters and array types used in the names and annotations of the model code.

| letter | axis | letter | axis |
|---|---|---|---|
| B | sequences in the batch | F | hidden width of one expert |
| T | query tokens | E | experts per layer |
| S | cache positions | X | experts chosen per token |
| D | model width | R | slots per layer |
| N | query heads | L | MoE layers |
| K | key/value heads | V | vocabulary |
| G | query heads per key/value head | W | words of one expert record |
| H | head width | | |
"""

import jax

Array = jax.Array
