"""Penalties and filters equal transformers' logits processors, in the same order."""

import jax.numpy as jnp
import numpy as np
import pytest

from flashmoe_jax.engine.sampling import SamplingArrays, SamplingParams, keep_probable, sample, seen_in_prompts

pytestmark = pytest.mark.parity

V = 211
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.02),
]


def warped_by_transformers(logits: np.ndarray, prompt: list[int], p: SamplingParams) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    processors = transformers.LogitsProcessorList()
    if p.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature not in (0, 1):
        processors.append(transformers.TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        processors.append(transformers.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(p.top_p))
    if p.min_p:
        processors.append(transformers.MinPLogitsWarper(p.min_p))
    return processors(torch.tensor([prompt]), torch.tensor(logits[None]))[0].numpy()


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_filters_are_those_of_transformers(params: SamplingParams):
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0, 2.5, V).astype(np.float32)
        theirs = warped_by_transformers(logits, [0], params)
        arrays = SamplingArrays.stack([params])
        scaled = jnp.asarray(logits) / arrays.temperature_B[0]
        ours = keep_probable(scaled, arrays.top_p_B[0], arrays.top_k_B[0], arrays.min_p_B[0])
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_the_repetition_penalty_is_that_of_transformers():
    params = SamplingParams(repetition_penalty=1.7)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, 2.5, V).astype(np.float32)
        prompt = [*rng.integers(0, V, 60).tolist(), int(logits.argmax())]
        token = sample(jnp.asarray(logits[None]), SamplingArrays.stack([params]), seen_in_prompts([prompt], V))
        assert int(token[0]) == int(warped_by_transformers(logits, prompt, params).argmax())
