"""The whole way, checkpoint to tokens: Hugging Face directory, conversion, expert store, slots, engine.

Compared with transformers on the same directory, with as few slots as the engine accepts.
"""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from awkward_models import AWKWARD
from parity.hf_models import greedy_tokens, load_model, random_model, run_cached
from tiny_models import FAMILIES, tiny_hf_config, write_hf_checkpoint

import flashmoe_jax
from checkpoints.convert import convert

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
# In bfloat16, as a share of the logits' root mean square over what float32 gives with the same weights.
BFLOAT16_TOLERANCE = 0.01
LEAST_GAP = 2e-6
PROMPT_LENGTHS = (5, 13, 1)
NUM_STEPS = 20


@pytest.mark.parametrize("name", AWKWARD)
def test_logits_and_router_choices(name: str, tmp_path: Path):
    model = random_model(AWKWARD[name], seed=7)
    model.save_pretrained(tmp_path / "hf")
    random = np.random.RandomState(11)
    sequences = [random.randint(model.config.vocab_size, size=length + NUM_STEPS) for length in PROMPT_LENGTHS]
    traces = [run_cached(model, tokens, length) for tokens, length in zip(sequences, PROMPT_LENGTHS, strict=True)]
    assert min(trace.smallest_gap for trace in traces) > LEAST_GAP, "a near tie in the router; choose another seed"
    prompts = [tokens[:length].tolist() for tokens, length in zip(sequences, PROMPT_LENGTHS, strict=True)]

    convert(tmp_path / "hf", tmp_path / "model")
    with flashmoe_jax.load(
        tmp_path / "model",
        policy="lru",  # which has no part in what is compared, and compiles fastest
        device_budget=f"{model.config.num_experts_per_tok}slots",
        max_context=max(PROMPT_LENGTHS) + NUM_STEPS,
        batch_size=len(prompts),
        record_trace=True,
    ) as engine:
        session = engine.session(len(prompts))
        logits = [np.asarray(session.prefill(prompts))]
        for step in range(NUM_STEPS):
            positions = [length + step for length in PROMPT_LENGTHS]
            tokens = np.array([row[position] for row, position in zip(sequences, positions, strict=True)])
            logits.append(np.asarray(session.decode(tokens)))
        routing = engine.trace()
    worst = 0.0
    for row, (trace, length) in enumerate(zip(traces, PROMPT_LENGTHS, strict=True)):
        ids_TLX = routing.ids[routing.seq_id == row]
        np.testing.assert_array_equal(np.moveaxis(ids_TLX, 1, 0), trace.expert_id_LTX)
        ours_TV = np.stack([step_BV[row] for step_BV in logits])
        worst = max(worst, float(np.abs(ours_TV - trace.logits_TV[length - 1 :]).max()))
    print(f"{name}: max abs error {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, tmp_path: Path):
    model = random_model(AWKWARD[family], seed=9)
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    convert(tmp_path / "hf", tmp_path / "model")
    prompts = [[7, 8, 9, 10], [20], [30] * 9]
    expected = [greedy_tokens(model, prompt, NUM_STEPS) for prompt in prompts]
    with flashmoe_jax.load(
        tmp_path / "model", device_budget="4slots", policy="lru", max_context=32, batch_size=3
    ) as engine:
        ours: list[list[int]] = [[] for _ in prompts]
        for piece in engine.generate(
            prompts,
            max_new_tokens=NUM_STEPS,
            ignore_eos=True,
            sampling=flashmoe_jax.SamplingParams(temperature=0.0),
        ):
            ours[piece.sequence].append(piece.token_id)
    assert ours == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_closer_to_float32_than_transformers(family: str, tmp_path: Path):
    hf_config = tiny_hf_config(family, torch_dtype="bfloat16", hidden_size=96, num_hidden_layers=4)
    write_hf_checkpoint(tmp_path / "hf", hf_config, seed=3)
    tokens = np.random.RandomState(5).randint(hf_config["vocab_size"], size=12 + NUM_STEPS)
    exact_TV = run_cached(load_model(tmp_path / "hf"), tokens, 12).logits_TV[11:]
    theirs_TV = run_cached(load_model(tmp_path / "hf", torch.bfloat16), tokens, 12).logits_TV[11:]
    convert(tmp_path / "hf", tmp_path / "model")
    with flashmoe_jax.load(tmp_path / "model", device_budget="3slots", policy="lru", max_context=32) as engine:
        session = engine.session()
        logits = [
            session.prefill([tokens[:12].tolist()]),
            *(session.decode(tokens[[t]]) for t in range(12, len(tokens))),
        ]
        ours_TV = np.concatenate([np.asarray(step_1V) for step_1V in logits])
    scale = root_mean_square(exact_TV)
    ours, theirs = (root_mean_square(x_TV - exact_TV) / scale for x_TV in (ours_TV, theirs_TV))
    print(f"{family}: relative error in bfloat16 {ours:.2%}, transformers {theirs:.2%}")
    assert ours < BFLOAT16_TOLERANCE
    assert ours < theirs


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
