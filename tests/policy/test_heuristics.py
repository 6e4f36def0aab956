"""Eviction heuristics on sequences worked out by hand."""

import functools

import jax
import numpy as np
import pytest

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import POLICIES, PolicyShape, load_popularity, make_policy, save_popularity
from flashmoe_jax.policy.heuristics import HEURISTICS, UsageState, init_usage, update_usage

SHAPE = PolicyShape(num_layers=2, num_experts=5, top_k=2)
update = functools.partial(jax.jit(update_usage), ())
POPULARITY = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.float32)


def after(steps: list[list[list[int]]], layer: int = 0, state: UsageState | None = None) -> UsageState:
    """State after steps of one layer, each a list of rows of expert ids."""
    state = init_usage(SHAPE) if state is None else state
    for ids in steps:
        state = update(state, np.int32(layer), np.array(ids, np.int32), None, None)
    return state


def scores(name: str, state: UsageState, layer: int = 0) -> np.ndarray:
    policy = make_policy(name, SHAPE, POPULARITY if name == "static" else None)
    keep = np.asarray(policy.score(policy.layer_params(layer), state, np.int32(layer)))
    assert keep.dtype == np.float32 and keep.shape == (SHAPE.num_experts,)
    assert np.isfinite(keep).all()
    return keep


# Expert 0 is used often and early, 1 twice, 2 once and last, 3 once, 4 never.
STEPS = [[[0, 1]], [[0, 3]], [[0, 1]], [[2, 2]]]


def test_lru_is_minus_the_steps_since_the_last_use():
    assert scores("lru", after(STEPS)).tolist() == [-1, -1, 0, -2, -4]


def test_lfu_counts_uses_and_breaks_ties_by_recency():
    np.testing.assert_allclose(scores("lfu", after(STEPS)), [3 - 1 / 5, 2 - 1 / 5, 1, 1 - 2 / 5, -4 / 5], rtol=1e-6)


def test_lfru_divides_uses_by_age():
    np.testing.assert_allclose(scores("lfru", after(STEPS)), [3 / 2, 2 / 2, 1 / 1, 1 / 3, 0], rtol=1e-6)


def test_decayed_halves_in_sixteen_steps():
    d = 0.5 ** (1 / 16)
    np.testing.assert_allclose(scores("decayed", after(STEPS)), [d**3 + d**2 + d, d**3 + d, 1, d**2, 0], rtol=1e-6)
    later = after([[[1, 2]]] + [[[3, 4]]] * 16)
    np.testing.assert_allclose(scores("decayed", later)[:3], [0, 0.5, 0.5], rtol=1e-5)


def test_static_is_the_recorded_popularity_whatever_happens():
    for layer in range(SHAPE.num_layers):
        assert scores("static", after(STEPS), layer).tolist() == POPULARITY[layer].tolist()


def test_an_expert_counts_once_per_step_however_many_chose_it():
    one_row, three_rows = after([[[1, 2]]]), after([[[1, 2], [2, 1], [1, -1]]])
    assert jax.tree.all(jax.tree.map(np.array_equal, one_row, three_rows))


def test_absent_sequences_change_nothing():
    state = after(STEPS)
    same = after([[[-1, -1]], [[-1, -1], [-1, -1]]], state=state)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, same))
    with_absent, without = after([[[0, 3], [-1, -1]]], state=state), after([[[0, 3]]], state=state)
    assert jax.tree.all(jax.tree.map(np.array_equal, with_absent, without))


def test_layers_are_apart():
    state = after([[[0, 4]]], layer=1, state=after(STEPS))
    assert scores("lru", state, layer=0).tolist() == [-1, -1, 0, -2, -4]
    assert scores("lru", state, layer=1).tolist() == [0, -1, -1, -1, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_scores_are_finite_from_the_first_step_on(name: str):
    scores(name, init_usage(SHAPE))
    far = UsageState(*(np.asarray(field) for field in after(STEPS)))
    scores(name, far._replace(clock=np.full(2, 2**30, np.int32), uses=far.uses + np.float32(2**30)))


@pytest.mark.parametrize("name", HEURISTICS)
def test_a_heuristic_is_one_object_by_value(name: str):
    # Programs are memoised by policy: two of one name must share them.
    assert make_policy(name, SHAPE) == make_policy(name, SHAPE)
    assert hash(make_policy(name, SHAPE)) == hash(make_policy(name, SHAPE))


def test_static_policies_share_programs_and_differ_in_parameters():
    first, second = make_policy("static", SHAPE, POPULARITY), make_policy("static", SHAPE, POPULARITY + 1)
    assert first == second and hash(first) == hash(second)
    assert np.array_equal(np.stack(second.params), POPULARITY + 1)


def test_names_and_popularity_are_checked():
    with pytest.raises(
        ConfigError, match=r"policy 'fifo' is unknown; choose one of auto, .*, lru, lfu, lfru, decayed, static"
    ):
        make_policy("fifo", SHAPE)
    with pytest.raises(ConfigError, match=r"needs the popularity .* --trace FILE .* --policy-trace FILE"):
        make_policy("static", SHAPE)
    with pytest.raises(ConfigError, match=r"2 layers x 4 experts, the model has 2 x 5"):
        make_policy("static", SHAPE, POPULARITY[:, :4])


def test_popularity_round_trip(tmp_path):
    path = tmp_path / "static.npz"
    save_popularity(path, POPULARITY.astype(np.float64), {"source": "a trace"})
    assert load_popularity(path).dtype == np.float32
    np.testing.assert_array_equal(load_popularity(path), POPULARITY)


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "cut", "zip", "npy", "other"])
def test_what_is_no_popularity_is_refused(kind: str, tmp_path):
    path = tmp_path / "static.npz"
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, POPULARITY)
    elif kind == "other":
        np.savez(path, ids=np.zeros(3))
    elif kind == "cut":
        save_popularity(path, POPULARITY, {})
        path.write_bytes(path.read_bytes()[:-30])
    elif kind != "missing":
        path.write_bytes({"empty": b"", "text": b"popularity", "zip": b"PK\x03\x04 not a zip"}[kind])
    with pytest.raises(ConfigError, match=r"static\.npz is not a static policy"):
        load_popularity(path)
