"""Keep values are those of the engine's own functions, bit for bit, whatever the chunks."""

import jax
import numpy as np
import pytest
from traces import EXPERTS, LAYERS, TOP_K, trace_of

from flashmoe_jax.policy import POLICIES, PolicyShape, make_policy
from flashmoe_jax.telemetry.trace import DECODE, PREFILL
from train_policy import replay_keep
from train_policy.policies.optimal import FARTHEST
from train_policy.replay_keep import min_keep, policy_keep, random_keep, window_keep
from train_policy.replay_steps import Mode, make_steps

ROWS = 150


def random_trace(seed: int = 0):
    """Prompts of three sequences side by side, then decode steps of those that go on; some ids are missing."""
    random = np.random.default_rng(seed)
    ids = np.stack([[random.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(ROWS)])
    ids[random.random((ROWS, LAYERS)) < 0.1] = -1
    ids[random.random(ids.shape) < 0.05] = -1
    prompt = np.repeat([0, 1, 2], [4, 1, 6])
    decode = np.concatenate([[s for s in (0, 1, 2) if random.random() < 0.7 or s == 0] for _ in range(ROWS)])
    seq_id = np.concatenate([prompt, decode])[:ROWS]
    step = np.concatenate([np.zeros(len(prompt), int), np.cumsum(decode == 0)])[:ROWS]
    phase = np.where(np.arange(ROWS) < len(prompt), PREFILL, DECODE)
    return trace_of(ids, seq_id=seq_id, step=step, phase=phase)


@pytest.mark.parametrize("mode", [Mode.TOKEN, Mode.ENGINE])
@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_engines_functions_called_step_by_step(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay_keep, "_MAX_CHUNK", 64)  # several chunks
    trace = random_trace()
    shape = PolicyShape(LAYERS, EXPERTS, TOP_K)
    uses = np.random.default_rng(1).integers(0, 99, (LAYERS, EXPERTS))
    policy = make_policy(name, shape, uses if name == "static" else None)
    steps = make_steps(trace, mode)
    keep = np.concatenate(list(policy_keep(policy, steps, TOP_K)))

    update = jax.jit(policy.update)
    score = jax.jit(policy.score)
    state, expected = policy.init(shape), []
    for step in range(steps.num_steps):
        rows = trace.ids[trace.step == step] if mode is Mode.ENGINE else trace.ids[step : step + 1]
        seq_id = trace.seq_id[trace.step == step] if mode is Mode.ENGINE else np.zeros(1)
        if steps.is_prefill[step]:
            longest = max(int((seq_id == s).sum()) for s in (0, 1, 2))
            shown = np.full((longest, 3, LAYERS, TOP_K), -1, np.int32)
            for s in (0, 1, 2):
                shown[: int((seq_id == s).sum()), s] = rows[seq_id == s]
        else:
            shown = rows[None]
        for ids_BLX in shown:
            padded = np.full((3, LAYERS, TOP_K), -1, np.int32)
            padded[: len(ids_BLX)] = ids_BLX
            for layer in range(LAYERS):
                state = update(policy.layer_params(layer), state, np.int32(layer), padded[:, layer], None, None)
        scores = [score(policy.layer_params(layer), state, np.int32(layer)) for layer in range(LAYERS)]
        expected.append([np.asarray(of_layer) for of_layer in scores])
    assert keep.dtype == np.float32
    assert np.array_equal(keep, np.array(expected))


def test_a_cold_start_forgets_everything():
    ids = random_trace().ids
    seq_id = np.repeat([5, 3, 4], 50)
    policy = make_policy("decayed", PolicyShape(LAYERS, EXPERTS, TOP_K))
    together = np.concatenate(list(policy_keep(policy, make_steps(trace_of(ids, seq_id=seq_id), reset=True), TOP_K)))
    for first in (0, 50, 100):
        alone = policy_keep(policy, make_steps(trace_of(ids[first : first + 50])), TOP_K)
        assert np.array_equal(together[first : first + 50], np.concatenate(list(alone)))


def test_programs_are_shared():
    policy = make_policy("lru", PolicyShape(LAYERS, EXPERTS, TOP_K))
    steps = make_steps(random_trace())
    list(policy_keep(policy, steps, TOP_K))
    scan = replay_keep._scan(make_policy("lru", PolicyShape(LAYERS, EXPERTS, TOP_K)))
    compiled = scan._cache_size()
    list(policy_keep(policy, make_steps(random_trace(2)), TOP_K))
    assert scan._cache_size() == compiled


def test_min_counts_steps_to_the_next_use():
    ids = np.array([[[0, 1]], [[2, -1]], [[0, -1]], [[-1, -1]], [[1, 2]]])
    keep = np.concatenate(list(min_keep(make_steps(trace_of(ids)))))
    assert keep[0, 0, :2].tolist() == [-2, -4]
    assert keep[1, 0, :3].tolist() == [-1, -3, -3]
    assert keep[2, 0, :3].tolist() == [-FARTHEST, -2, -2]
    assert keep[4, 0, :3].tolist() == [-FARTHEST] * 3


def test_min_does_not_see_past_a_cold_start():
    ids = np.array([[[0]], [[0]], [[1]], [[0]]])
    steps = make_steps(trace_of(ids, seq_id=[0, 0, 1, 1]), reset=True)
    keep = np.concatenate(list(min_keep(steps)))
    assert keep[:, 0, 0].tolist()[:2] == [-1, -FARTHEST]


def test_window_prefers_what_it_sees():
    ids = np.array([[[0, 1, 2]], [[0, -1, -1]], [[1, -1, -1]], [[2, -1, -1]]])
    steps = make_steps(trace_of(ids))
    beyond = np.zeros((4, 1, EXPERTS), np.float32)
    beyond[:, :, 2] = 5
    keep = np.concatenate(list(window_keep(steps, 1, iter(np.split(beyond, [3])))))
    assert keep[0, 0, 0] > keep[0, 0, 2] > keep[0, 0, 1]


def test_random_values_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch):
    steps = make_steps(random_trace())
    whole = np.concatenate(list(random_keep(steps, 7)))
    monkeypatch.setattr(replay_keep, "_MAX_CHUNK", 64)
    assert np.array_equal(whole, np.concatenate(list(random_keep(steps, 7))))
    assert not np.array_equal(whole, np.concatenate(list(random_keep(steps, 8))))
    assert whole.min() >= 0 and whole.max() < 1
    assert whole.mean() == pytest.approx(0.5, abs=0.05)
