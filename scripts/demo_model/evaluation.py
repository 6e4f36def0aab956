"""What a trained model is worth: held-out loss per domain, expert load, and a few continuations to read.

Owns measurement only. Invariant: no token is dropped here, so the numbers are those of inference.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from demo_model import corpus
from demo_model.model import FlatModel, Params, expert_load, forward, token_losses

Array = jax.Array


class Evaluation(NamedTuple):
    """Held-out quality of one domain, and the load of its experts as shares `[L, E]`."""

    name: str
    tokens: int
    nats_per_token: float
    bits_per_byte: float
    load: np.ndarray


class Sample(NamedTuple):
    """A prompt and what the model wrote after it."""

    prompt: str
    continuation: str


def evaluate(
    flat: FlatModel, params: Params, domains: Iterable[corpus.TokenDomain], *, length: int, max_tokens: int
) -> list[Evaluation]:
    """Held-out loss per domain over rows of `length` tokens that do not overlap; a row sees nothing before it."""

    @jax.jit
    def row_losses(params: Params, token_BT: Array) -> tuple[Array, Array]:
        out = forward(flat.merge(params), flat.config, token_BT[:, :-1], None)
        load = jnp.stack([expert_load(r.expert_id, flat.config.num_experts) for r in out.routings])
        return jnp.mean(token_losses(out.logits, token_BT[:, 1:])), load

    results = []
    for domain in domains:
        rows = corpus.held_out_rows(domain, length, max_tokens)
        losses, loads = zip(*(jax.device_get(row_losses(params, row[None])) for row in rows), strict=True)
        nats = float(np.mean(losses))
        tokens_per_byte = len(domain.held_out) / domain.held_out_bytes
        results.append(
            Evaluation(
                name=domain.name,
                tokens=rows.shape[0] * length,
                nats_per_token=nats,
                bits_per_byte=nats * tokens_per_byte / math.log(2),
                load=np.mean(loads, axis=0),
            )
        )
    return results


def continue_text(
    flat: FlatModel,
    params: Params,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> Sample:
    """Samples until end of text; the whole row is computed anew for every token, which a short row can afford."""
    token_ids = tokenizer.encode(prompt).ids
    length = len(token_ids) + max_tokens
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    rng = np.random.default_rng(seed)

    @jax.jit
    def next_logits(params: Params, token_BT: Array, position: Array) -> Array:
        return forward(flat.merge(params), flat.config, token_BT, None).logits[0, position]

    row = np.full((1, length), end, np.int32)
    row[0, : len(token_ids)] = token_ids
    for position in range(len(token_ids), length):
        logits = np.asarray(next_logits(params, row, position - 1), np.float64) / temperature
        weight = np.exp(logits - logits.max())
        row[0, position] = rng.choice(len(weight), p=weight / weight.sum())
        if row[0, position] == end:
            break
    return Sample(prompt, tokenizer.decode(row[0, len(token_ids) : position + 1].tolist()))
