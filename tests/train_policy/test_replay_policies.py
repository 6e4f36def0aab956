"""Policies: counts worked out by hand, the same counts as plain Python, and what holds for all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_policies import fewest_misses, plain_policy
from traces import EXPERTS, LAYERS, TOP_K, random_ids, steps_of_layer, trace_of

from train_policy.replay import Replayer, summary
from train_policy.replay_slots import SlotRun
from train_policy.replay_steps import Mode

ENGINE_KINDS = ("lru", "lfu", "lfru", "decayed", "static")
LOOPS = ("fifo", "lfu-resident", "arc", "lecar", "s3fifo")
ADMITTING = (*ENGINE_KINDS, *LOOPS, "random", "min", "min-window:2")


def run_of(policy: str, ids: np.ndarray, slots: int, mode: Mode = Mode.TOKEN, **options) -> SlotRun:
    return Replayer(trace_of(ids), mode=mode, **options).replay(policy, [slots])[0].run


class TestByHand:
    """One layer, three slots, two experts a token; the victim of every miss is worked out in the comments."""

    rows = ([0, 1], [0, 2], [1, 3], [0, 2], [0, 4], [1, 2])

    def test_lru(self):
        # Step 2 leaves [0 1 2]. Step 3 needs 1 3: 0 and 2 are equally old, the lower slot leaves -> [3 1 2].
        # Step 4 needs 0 2: 1 and 3 are equally old, slot 0 leaves -> [0 1 2]. Step 5 needs 0 4: 1 is oldest -> [0 4 2].
        # Step 6 needs 1 2: 0 and 4 are equally old, slot 0 leaves. Misses 2 1 1 1 1 1.
        run = run_of("lru", self.ids(), 3)
        assert run.decode.misses.tolist() == [7]
        assert run.decode.hits.tolist() == [5]
        assert run.decode.evictions.tolist() == [4]
        # 0 left in step 3 and came back in step 4; 3 never did; 1 left in step 5 and came back in step 6.
        assert run.decode.refetches.tolist() == [2]
        assert run.expert_of_slot.tolist() == [[1, 4, 2]]

    def test_lfu(self):
        # Step 3: 0 has two uses, 2 has one -> 2 leaves: [0 1 3]. Step 4 needs 0 2: 1 has two, 3 one -> [0 1 2].
        # Step 5 needs 0 4: 1 and 2 have two each, 1 is older -> [0 4 2]. Step 6 needs 1 2: 4 leaves.
        run = run_of("lfu", self.ids(), 3)
        assert run.decode.misses.tolist() == [7]
        assert run.expert_of_slot.tolist() == [[0, 1, 2]]

    def test_min(self):
        # Step 3: 0 and 2 are both used in step 4, equal -> slot 0 leaves: [3 1 2]. Step 4: 3 is never used: [0 1 2].
        # Step 5: 1 and 2 are both used in step 6, equal -> slot 1: [0 4 2]. Step 6: 0 leaves.
        run = run_of("min", self.ids(), 3)
        assert run.decode.misses.tolist() == [7]
        assert run.expert_of_slot.tolist() == [[1, 4, 2]]

    def test_min_with_bypass(self):
        # 3 and 4 pass through: 0 1 2 stay from step 2 on. Misses 2 1 1 0 1 0.
        run = run_of("min-bypass", self.ids(), 3)
        assert run.decode.misses.tolist() == [5]
        assert run.decode.evictions.tolist() == [0]

    def test_fifo(self):
        # Admitted 0 1 2. Step 3: 0 leaves (1 is needed): 1 2 3. Step 4 needs 0 2: 1 leaves: 2 3 0.
        # Step 5 needs 0 4: 2 leaves: 3 0 4. Step 6 needs 1 2: 3, then 0 leave.
        assert run_of("fifo", self.ids(), 3).decode.misses.tolist() == [8]

    def ids(self) -> np.ndarray:
        return np.array([[row] for row in self.rows])


class TestAgainstPlainPython:
    @pytest.mark.parametrize("policy", [p for p in ADMITTING if p != "random"])
    @given(ids=random_ids(), slots=st.integers(1, EXPERTS))
    @settings(max_examples=40, deadline=None)
    def test_step_by_step(self, policy: str, ids: np.ndarray, slots: int):
        run = run_of(policy, ids, slots)
        for layer in range(LAYERS):
            steps = steps_of_layer(ids, layer)
            plain = plain_policy(policy, slots, steps, EXPERTS, seed=layer)
            for step in steps:
                plain.step(step)
            assert run.decode.misses[layer] == plain.misses
            assert run.decode.evictions[layer] == plain.evictions
            assert run.decode.accesses[layer] == sum(map(len, steps))

    @pytest.mark.parametrize("policy", LOOPS)
    @given(ids=random_ids(), slots=st.integers(1, EXPERTS))
    @settings(max_examples=20, deadline=None)
    def test_access_by_access(self, policy: str, ids: np.ndarray, slots: int):
        run = run_of(policy, ids, slots, Mode.ACCESS)
        for layer in range(LAYERS):
            steps = [(int(e),) for e in ids[:, layer].reshape(-1) if e >= 0]
            plain = plain_policy(policy, slots, steps, EXPERTS, seed=layer)
            for step in steps:
                plain.step(step)
            assert run.decode.misses[layer] == plain.misses
            assert run.decode.evictions[layer] == plain.evictions


class TestOptima:
    @given(ids=random_ids(max_tokens=9), slots=st.integers(TOP_K, EXPERTS))
    @settings(max_examples=40, deadline=None)
    def test_min_is_optimal_among_those_that_admit(self, ids: np.ndarray, slots: int):
        misses = run_of("min", ids, slots).decode.misses
        assert misses.tolist() == [
            fewest_misses(steps_of_layer(ids, layer), slots, must_admit=True) for layer in range(LAYERS)
        ]

    @given(ids=random_ids(max_tokens=9), slots=st.integers(1, EXPERTS))
    @settings(max_examples=40, deadline=None)
    def test_min_with_bypass_is_optimal(self, ids: np.ndarray, slots: int):
        misses = run_of("min-bypass", ids, slots).decode.misses
        assert misses.tolist() == [
            fewest_misses(steps_of_layer(ids, layer), slots, must_admit=False) for layer in range(LAYERS)
        ]

    @given(ids=random_ids(), slots=st.integers(TOP_K, EXPERTS), reset=st.booleans(), mode=st.sampled_from(Mode))
    @settings(max_examples=25, deadline=None)
    def test_no_policy_beats_min(self, ids: np.ndarray, slots: int, reset: bool, mode: Mode):
        mode = Mode.TOKEN if mode is Mode.ENGINE else mode
        replayer = Replayer(trace_of(ids, seq_id=np.arange(len(ids)) // 7), mode=mode, reset=reset)
        least = replayer.replay("min", [slots])[0].run.decode.misses
        assert (replayer.replay("min-bypass", [slots])[0].run.decode.misses <= least).all()
        for policy in ADMITTING:
            assert (replayer.replay(policy, [slots])[0].run.decode.misses >= least).all(), policy

    @given(ids=random_ids())
    @settings(max_examples=15, deadline=None)
    def test_a_trace_that_fits_has_only_cold_misses(self, ids: np.ndarray):
        replayer = Replayer(trace_of(ids))
        distinct = [len(set().union(*steps_of_layer(ids, layer))) for layer in range(LAYERS)]
        for policy in (*ADMITTING, "min-bypass"):
            run = replayer.replay(policy, [max(distinct)])[0].run
            assert run.decode.misses.tolist() == distinct, policy
            assert run.decode.evictions.sum() == 0

    @given(ids=random_ids(), slots=st.integers(1, EXPERTS))
    @settings(max_examples=15, deadline=None)
    def test_a_window_over_the_whole_trace_is_min(self, ids: np.ndarray, slots: int):
        assert (
            run_of("min-window:1000", ids, slots).decode.misses.tolist()
            == run_of("min", ids, slots).decode.misses.tolist()
        )

    @given(ids=random_ids(), seed=st.integers(0, 99))
    @settings(max_examples=10, deadline=None)
    def test_a_prompt_step_by_the_engines_rules_never_beats_bypass(self, ids: np.ndarray, seed: int):
        phase = np.random.default_rng(seed).integers(0, 2, len(ids))
        replayer = Replayer(trace_of(ids, phase=phase), mode=Mode.ENGINE)
        least = total(replayer.replay("min-bypass", [TOP_K])[0].run)
        for policy in (*ENGINE_KINDS, "min", "random"):
            assert (total(replayer.replay(policy, [TOP_K])[0].run) >= least).all()


def total(run: SlotRun) -> np.ndarray:
    return run.decode.misses + run.prefill.misses


class TestRandomness:
    ids = np.random.default_rng(0).integers(0, EXPERTS, (300, 1, 1)).astype(np.int32)

    @pytest.mark.parametrize("policy", ["random", "lecar"])
    def test_the_seed_decides(self, policy: str):
        misses = [int(run_of(policy, self.ids, 3, seed=s).decode.misses[0]) for s in (1, 1, 2, 3, 4)]
        assert misses[0] == misses[1]
        assert len(set(misses)) > 1

    def test_random_is_uniform(self):
        # With every expert equally likely, random replacement of 3 in 6 misses half the time.
        ids = np.random.default_rng(1).integers(0, EXPERTS, (20_000, 1, 1)).astype(np.int32)
        assert run_of("random", ids, 3).decode.misses[0] == pytest.approx(10_000, rel=0.02)


def test_several_slot_counts_at_once_are_each_alone():
    ids = np.random.default_rng(3).integers(0, EXPERTS, (50, LAYERS, TOP_K)).astype(np.int32)
    replayer = Replayer(trace_of(ids))
    for policy in (*ADMITTING, "min-bypass"):
        together = replayer.replay(policy, [3, 4, 5])
        alone = [replayer.replay(policy, [r])[0] for r in (3, 4, 5)]
        assert [r.run.decode.misses.tolist() for r in together] == [r.run.decode.misses.tolist() for r in alone]


def test_summary_averages_over_layers():
    # Layer 0 asks for one expert again and again, layer 1 for two in turn with room for one.
    ids = np.array([[[0], [t % 2]] for t in range(10)])
    replayer = Replayer(trace_of(ids))
    result, best = replayer.replay("lru", [1])[0], replayer.replay("min", [1])[0]
    row = summary(result, best, replayer.steps)
    assert row == {
        "policy": "lru",
        "slots": 1,
        "hit_rate": pytest.approx((0.9 + 0.0) / 2),
        "reads_per_token": pytest.approx((1 + 10) / 2 / 10),
        # Nine evictions in layer 1, of which eight came back within five tokens; layer 0 evicts nothing.
        "refetch_5": pytest.approx(8 / 9),
        "regret": pytest.approx(1.0),
        "accesses": 20,
        "hits": 9,
        "misses": 11,
        "evictions": 9,
    }
