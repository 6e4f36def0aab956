"""At the end of a prefill layer no resident's row is given up while a computation may still read it."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import tiny_hf_config, write_hf_checkpoint

import flashmoe_jax
from checkpoints.convert import convert


@jax.jit
def slowly(y_TD: jax.Array) -> jax.Array:
    """The same values, some milliseconds later."""
    noise = jax.lax.fori_loop(0, 30, lambda _, m: jnp.tanh(m @ m), jnp.full((256, 256), 0.01))
    return y_TD + 0 * noise[0, 0]


def test_residents_are_replaced_when_the_layer_is_done(tmp_path: Path):
    hf_config = tiny_hf_config("olmoe", num_experts=12)
    convert(write_hf_checkpoint(tmp_path / "hf", hf_config), tmp_path / "model")
    with flashmoe_jax.load(tmp_path / "model", device_budget="4slots", max_context=32) as engine:
        memory = engine.memory
        group, exchange = memory.programs.expert_ffn_group, memory.rows.exchange
        dispatched: list[jax.Array] = []
        num_exchanges = 0

        def slow_group(*args):
            y_TD, done = group(*args)
            dispatched.append(slowly(y_TD))
            return dispatched[-1] + 0, done

        def checked_exchange(layer: int, slot: int, row: int) -> None:
            nonlocal num_exchanges
            num_exchanges += 1
            assert all(y_TD.is_ready() for y_TD in dispatched)
            exchange(layer, slot, row)

        memory.programs = dataclasses.replace(memory.programs, expert_ffn_group=slow_group)
        memory.rows.exchange = checked_exchange
        prompts = np.random.RandomState(0).randint(hf_config["vocab_size"], size=(6, 12))
        for prompt in prompts:
            engine.session().prefill([prompt.tolist()])
            dispatched.clear()
    assert num_exchanges > 0
