"""Logits and router choices equal those of transformers: every family, awkward shapes, prefill and cached decode."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from awkward_models import AWKWARD
from cached_model import CachedModel, compiled_reference
from parity.hf_models import random_model, run_cached
from tiny_models import read_hf_checkpoint

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
# Two probabilities closer than this could change places by rounding; then the seed is to blame, not the code.
LEAST_GAP = 2e-6
PROMPT_LENGTHS = (5, 13, 1)
NUM_STEPS = 20


@pytest.mark.parametrize("name", AWKWARD)
def test_prefill_and_cached_decode(name: str, tmp_path: Path):
    model = random_model(AWKWARD[name], seed=7)
    model.save_pretrained(tmp_path)
    config, weights = read_hf_checkpoint(tmp_path)
    random = np.random.RandomState(11)
    sequences = [random.randint(config.vocab_size, size=length + NUM_STEPS) for length in PROMPT_LENGTHS]
    traces = [run_cached(model, tokens, length) for tokens, length in zip(sequences, PROMPT_LENGTHS, strict=True)]
    assert min(trace.smallest_gap for trace in traces) > LEAST_GAP, "a near tie in the router; choose another seed"

    ours = CachedModel(config, weights, capacity=max(PROMPT_LENGTHS) + NUM_STEPS)
    prompts = [tokens[:length] for tokens, length in zip(sequences, PROMPT_LENGTHS, strict=True)]
    logits_BTV, ids_LBTX = ours.prefill(prompts)
    worst = 0.0
    for row, (trace, length) in enumerate(zip(traces, PROMPT_LENGTHS, strict=True)):
        np.testing.assert_array_equal(ids_LBTX[:, row, :length], trace.expert_id_LTX[:, :length])
        worst = max(worst, np.abs(logits_BTV[row, :length] - trace.logits_TV[:length]).max())
    for step in range(NUM_STEPS):
        logits_BV, ids_LBX = ours.step(np.array([s[n + step] for s, n in zip(sequences, PROMPT_LENGTHS, strict=True)]))
        for row, (trace, length) in enumerate(zip(traces, PROMPT_LENGTHS, strict=True)):
            np.testing.assert_array_equal(ids_LBX[:, row], trace.expert_id_LTX[:, length + step])
            worst = max(worst, np.abs(logits_BV[row] - trace.logits_TV[length + step]).max())
    print(f"{name}: max abs error {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("name", AWKWARD)
def test_reference_forward(name: str, tmp_path: Path):
    model = random_model(AWKWARD[name], seed=8)
    model.save_pretrained(tmp_path, save_original_format=False)
    config, weights = read_hf_checkpoint(tmp_path)
    tokens = np.random.RandomState(12).randint(config.vocab_size, size=33)
    trace = run_cached(model, tokens, prompt_length=9)
    assert trace.smallest_gap > LEAST_GAP, "a near tie in the router; choose another seed"
    ours = compiled_reference(config, weights, tokens[None])
    ids_LTX = np.stack([np.asarray(choice.expert_id[0]) for choice in ours.routing])
    np.testing.assert_array_equal(ids_LTX, trace.expert_id_LTX)
    np.testing.assert_allclose(ours.logits_BTV[0], trace.logits_TV, atol=TOLERANCE, rtol=0)
