"""Logits and router choices equal those that transformers gave, from committed files: no torch is needed."""

import numpy as np
import pytest
from cached_model import CachedModel, compiled_reference
from reference_fixtures import FIXTURE_NAMES, FIXTURES, NUM_STEPS, PROMPT_LENGTH, load_fixture

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_reference_forward(name: str):
    fixture = load_fixture(FIXTURES / f"{name}.npz")
    ours = compiled_reference(fixture.config, fixture.weights, fixture.token_T[None])
    np.testing.assert_array_equal(np.stack([choice.expert_id[0] for choice in ours.routing]), fixture.expert_id_LTX)
    np.testing.assert_allclose(ours.logits_BTV[0], fixture.logits_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FIXTURE_NAMES[1::2])
def test_padded_prefill_and_cached_decode(name: str):
    fixture = load_fixture(FIXTURES / f"{name}.npz")
    # The same sequence twice, its prompt cut at different lengths.
    lengths = (PROMPT_LENGTH, 5)
    model = CachedModel(fixture.config, fixture.weights, capacity=PROMPT_LENGTH + NUM_STEPS)
    logits_BTV, ids_LBTX = model.prefill([fixture.token_T[:length] for length in lengths])
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(ids_LBTX[:, row, :length], fixture.expert_id_LTX[:, :length])
        np.testing.assert_allclose(logits_BTV[row, :length], fixture.logits_TV[:length], atol=TOLERANCE, rtol=0)
    for step in range(NUM_STEPS):
        positions = [length + step for length in lengths]
        logits_BV, ids_LBX = model.step(fixture.token_T[positions])
        np.testing.assert_array_equal(ids_LBX, fixture.expert_id_LTX[:, positions])
        np.testing.assert_allclose(logits_BV, fixture.logits_TV[positions], atol=TOLERANCE, rtol=0)
