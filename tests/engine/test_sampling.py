import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.engine.sampling import (
    SamplingArrays,
    SamplingParams,
    keep_probable,
    mark_output,
    sample,
    seen_in_prompts,
)

V = 37
KEEP_PROBABLE = jax.jit(keep_probable)


def logits_of(seed: int, rows: int = 1, size: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, size)).astype(np.float32)


def kept_by_numpy(logits: np.ndarray, p: SamplingParams) -> set[int]:
    """Ids that survive the filters, written as plainly as can be."""
    scaled = logits.astype(np.float64) / np.float32(p.temperature)
    kept = set(range(len(logits)))
    if p.top_k:
        least = np.sort(scaled)[::-1][min(p.top_k, len(logits)) - 1]
        kept = {i for i in kept if scaled[i] >= least}
    odds = np.exp(scaled - scaled.max())
    if p.top_p < 1:
        total, mass, nucleus = sum(odds[i] for i in kept), 0.0, set()
        for i in sorted(kept, key=lambda i: (-scaled[i], i)):
            nucleus.add(i)
            mass += odds[i] / total
            if mass >= p.top_p:
                break
        kept = nucleus
    return {i for i in kept if odds[i] >= p.min_p}


def draw(logits: np.ndarray, params: list[SamplingParams], seen: jax.Array | None = None, step: int = 0) -> list[int]:
    arrays = SamplingArrays.stack(params)
    return np.asarray(sample(jnp.asarray(logits), arrays, seen, jnp.full(len(params), step, jnp.int32))).tolist()


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.07, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 7, V, 10**12]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_filters_keep_what_numpy_keeps(seed: int, top_p: float, top_k: int, min_p: float, temperature: float):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = logits_of(seed)[0]
    arrays = SamplingArrays.stack([params])
    kept = KEEP_PROBABLE(jnp.asarray(logits) / temperature, arrays.top_p_B[0], arrays.top_k_B[0], arrays.min_p_B[0])
    assert set(np.flatnonzero(np.isfinite(kept)).tolist()) == kept_by_numpy(logits, params)


def test_ties_at_the_kth_place_stay_as_in_transformers():
    kept = KEEP_PROBABLE(jnp.array([1.0, 2.0, 1.0, -1.0]), jnp.float32(1), jnp.int32(2), jnp.float32(0))
    assert np.asarray(kept).tolist() == [1, 2, 1, -np.inf]


def test_impossible_tokens_stay_impossible():
    """A grammar or a padded vocabulary may set logits to -inf."""
    logits = jnp.array([-jnp.inf, 0.0, -jnp.inf, -5.0])
    for top_p, top_k, min_p in ((1, 0, 0), (0.999999, 0, 0), (1, 3, 0), (1, 0, 0.5)):
        kept = KEEP_PROBABLE(logits, jnp.float32(top_p), jnp.int32(top_k), jnp.float32(min_p))
        assert np.isneginf(kept[jnp.array([0, 2])]).all()
        assert kept[1] == 0


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[0, 5, 1, 5], [7, 7, 7, 7]], np.float32)
    assert draw(logits, [SamplingParams()] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_draws_follow_the_distribution(temperature: float, top_p: float):
    probability = np.array([0.5, 0.3, 0.15, 0.05])
    logits = (temperature * np.log(probability)).astype(np.float32)
    rows = 4000
    params = [SamplingParams(temperature=temperature, top_p=top_p, seed=seed) for seed in range(rows)]
    share = np.bincount(draw(np.tile(logits, (rows, 1)), params), minlength=4) / rows
    if top_p < 1:
        probability[3] = 0
    np.testing.assert_allclose(share, probability / probability.sum(), atol=0.025)


def test_a_member_of_a_batch_samples_what_it_samples_alone():
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=7),
        SamplingParams(),
        SamplingParams(temperature=1.3, seed=2**63 + 5),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.01, repetition_penalty=1.3, seed=7),
    ]
    logits = logits_of(3, rows=4, size=997)
    seen = seen_in_prompts([[1, 2], [3], [4], list(range(500))], 997)
    for step in range(5):
        together = draw(logits, params, seen, step)
        alone = [draw(logits[i : i + 1], [params[i]], seen[i : i + 1], step)[0] for i in range(4)]
        assert together == alone


def test_a_filter_that_drops_nothing_changes_nothing():
    logits = logits_of(5, rows=50, size=200)
    plain = [SamplingParams(temperature=0.7, seed=i) for i in range(50)]
    filtered = [SamplingParams(temperature=0.7, top_k=200, seed=i) for i in range(50)]
    assert draw(logits, plain) == draw(logits, filtered)
    assert draw(logits, plain) != draw(logits, plain, step=1)


def test_both_words_of_the_seed_count():
    logits = np.zeros((3, 1000), np.float32)
    params = [SamplingParams(temperature=1.0, seed=s) for s in (1, 1 + 2**32, 2)]
    assert len(set(draw(logits, params))) == 3


def test_penalties():
    logits = np.array([[3.0, 2.9, -1.0, 2.0]], np.float32)
    seen = seen_in_prompts([[0]], 4)
    assert np.asarray(seen).tolist() == [[1, 0, 0, 0]]
    repetition, presence = SamplingParams(repetition_penalty=1.1), SamplingParams(presence_penalty=0.5)
    # The prompt counts for repetition, not for presence.
    assert draw(logits, [repetition], seen) == [1]
    assert draw(logits, [presence], seen) == [0]
    seen = mark_output(seen, jnp.array([0]))
    assert np.asarray(seen).tolist() == [[3, 0, 0, 0]]
    assert draw(logits, [presence], seen) == [1]
    # A negative logit moves away from zero.
    assert draw(np.array([[-1.0, -1.5]], np.float32), [SamplingParams(repetition_penalty=2.0)], seen[:, :2]) == [1]


def test_other_parameters_do_not_compile_again():
    logits = logits_of(1, rows=2)
    draw(logits, [SamplingParams(temperature=1.0)] * 2)
    before = sample._cache_size()
    draw(logits, [SamplingParams(), SamplingParams(temperature=0.3, top_p=0.4, top_k=3, seed=9)], step=3)
    assert sample._cache_size() == before


def test_logits_of_another_form_are_refused():
    with pytest.raises(TypeError, match="float32 \\[B, V\\]"):
        sample(jnp.zeros((V,)), SamplingArrays.stack([SamplingParams()]))
