"""Residency against a plain Python model of the same rules: one dict per layer, victims chosen by sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.experts.residency import Residency, fill_free_slots, init_residency, lowest, plan_step, replace

LAYERS, EXPERTS, TOP_K = 2, 7, 2
SLOTS = (2, 4, 7)
BATCHES = (1, 3)
deterministic = settings(derandomize=True, deadline=None, max_examples=25)


class PlainResidency:
    """Who is in which slot of one layer."""

    def __init__(self, num_slots: int):
        self.expert_of_slot = [-1] * num_slots

    def slot_of(self, expert: int) -> int:
        return self.expert_of_slot.index(expert) if expert in self.expert_of_slot else -1

    def slots_to_give(self, needed: set[int], keep: np.ndarray) -> list[int]:
        """Free slots by number, then those of the residents that are not needed, the lowest keep value first."""
        free = [s for s, e in enumerate(self.expert_of_slot) if e < 0]
        held = [s for s, e in enumerate(self.expert_of_slot) if e >= 0 and e not in needed]
        return free + sorted(held, key=lambda s: (keep[self.expert_of_slot[s]], s))

    def step(self, chosen: np.ndarray, keep: np.ndarray) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """Place of every needed expert after the step, and (expert, place, evicted) of the missed, best first."""
        needed = {int(e) for e in chosen.ravel() if e >= 0}
        missed = sorted((e for e in needed if self.slot_of(e) < 0), key=lambda e: (-keep[e], e))
        slots = self.slots_to_give(needed, keep)
        places = {e: self.slot_of(e) for e in needed if self.slot_of(e) >= 0}
        arrivals = []
        for rank, expert in enumerate(missed):
            evicted = -1
            if rank < len(slots):
                place = slots[rank]
                evicted, self.expert_of_slot[place] = self.expert_of_slot[place], expert
            else:
                place = len(self.expert_of_slot) + rank - len(slots)
            places[expert] = place
            arrivals.append((expert, place, evicted))
        return places, arrivals


jitted_step = jax.jit(lambda residency, layer, ids, keep: plan_step(residency, layer, ids, lambda: keep))
jitted_fill = jax.jit(fill_free_slots)


def assert_tables_agree(residency: Residency, layer: int, plain: PlainResidency) -> None:
    assert residency.expert_of_slot[layer].tolist() == plain.expert_of_slot
    assert residency.slot_of_expert[layer].tolist() == [plain.slot_of(e) for e in range(EXPERTS)]


def keep_values() -> st.SearchStrategy[np.ndarray]:
    # Few values, so that ties are common.
    return st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=EXPERTS, max_size=EXPERTS).map(
        lambda values: np.array(values, np.float32)
    )


def choices(batch: int) -> st.SearchStrategy[np.ndarray]:
    row = st.one_of(
        st.just([-1] * TOP_K),
        st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True),
    )
    return st.lists(row, min_size=batch, max_size=batch).map(lambda rows: np.array(rows, np.int32))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_slots", SLOTS)
@deterministic
@given(data=st.data())
def test_steps_follow_the_rules(num_slots: int, batch: int, data):
    residency = init_residency(LAYERS, EXPERTS, num_slots)
    plain = [PlainResidency(num_slots) for _ in range(LAYERS)]
    for _ in range(data.draw(st.integers(1, 6))):
        layer = data.draw(st.integers(0, LAYERS - 1))
        chosen, keep = data.draw(choices(batch)), data.draw(keep_values())
        before = [p.expert_of_slot.copy() for p in plain]
        was_resident = {e: plain[layer].slot_of(e) >= 0 for e in range(EXPERTS)}
        places, arrivals = plain[layer].step(chosen, keep)
        residency, plan = jax.device_get(jitted_step(residency, np.int32(layer), chosen, keep))

        for other in range(LAYERS):
            assert_tables_agree(residency, other, plain[other])
            assert other == layer or plain[other].expert_of_slot == before[other]
        assert plan.slot.tolist() == [[places.get(int(e), -1) for e in row] for row in chosen]
        assert plan.is_hit.tolist() == [[e >= 0 and was_resident[int(e)] for e in row] for row in chosen]
        most = min(chosen.size, EXPERTS)
        padded = arrivals + [(-1, -1, -1)] * (most - len(arrivals))
        assert np.stack(plan[2:], axis=1).tolist() == [list(arrival) for arrival in padded]
        assert not {evicted for _, _, evicted in arrivals} & {int(e) for e in chosen.ravel() if e >= 0}


def test_surplus_is_numbered_from_the_slots_on():
    residency = init_residency(1, EXPERTS, 2)
    keep = np.arange(EXPERTS, dtype=np.float32)
    chosen = np.array([[0, 1], [2, 3], [4, -1]], np.int32)
    residency, plan = jitted_step(residency, np.int32(0), chosen, keep)
    # The two most valuable are admitted to the free slots, the others stream through places 2, 3, 4.
    assert plan.miss_expert.tolist()[:5] == [4, 3, 2, 1, 0]
    assert plan.miss_slot.tolist()[:5] == [0, 1, 2, 3, 4]
    assert residency.expert_of_slot.tolist() == [[4, 3]]
    # The next step needs the same: the residents are hits and stay, so no slot is left and nobody is admitted.
    after, plan = jitted_step(residency, np.int32(0), chosen, keep)
    assert plan.miss_expert.tolist()[:4] == [2, 1, 0, -1]
    assert plan.miss_slot.tolist()[:4] == [2, 3, 4, -1]
    assert plan.slot.tolist() == [[4, 3], [2, 1], [0, -1]]
    assert after.expert_of_slot.tolist() == [[4, 3]]
    assert set(plan.evicted.tolist()) == {-1}


def test_a_step_without_misses_asks_for_no_scores_and_changes_nothing():
    residency, _ = jitted_step(
        init_residency(1, EXPERTS, 4), np.int32(0), np.array([[5, 2]], np.int32), np.zeros(EXPERTS, np.float32)
    )
    not_a_number = np.full(EXPERTS, np.nan, np.float32)
    for chosen in ([[2, 5]], [[5, -1]], [[-1, -1]]):
        after, plan = jitted_step(residency, np.int32(0), np.array(chosen, np.int32), not_a_number)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), residency, after))
        assert set(plan.miss_expert.tolist()) == set(plan.evicted.tolist()) == {-1}


@pytest.mark.parametrize("num_slots", SLOTS)
@deterministic
@given(data=st.data())
def test_prefill_fills_free_slots_and_evicts_nobody(num_slots: int, data):
    residency = init_residency(LAYERS, EXPERTS, num_slots)
    for _ in range(data.draw(st.integers(1, 3))):
        layer = data.draw(st.integers(0, LAYERS - 1))
        needed = np.array(data.draw(st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS)))
        keep = data.draw(keep_values())
        before = np.asarray(residency.expert_of_slot)
        residency = jax.device_get(jitted_fill(residency, np.int32(layer), needed, keep))
        expected = before.copy()
        missed = [e for e in np.flatnonzero(needed) if e not in before[layer]]
        best = sorted(missed, key=lambda e: (-keep[e], e))
        for slot, expert in zip(np.flatnonzero(before[layer] < 0), best, strict=False):
            expected[layer, slot] = expert
        np.testing.assert_array_equal(residency.expert_of_slot, expected)
        inverse = np.full((LAYERS, EXPERTS), -1)
        for row, slot in zip(*np.nonzero(expected >= 0), strict=True):
            inverse[row, expected[row, slot]] = slot
        np.testing.assert_array_equal(residency.slot_of_expert, inverse)


def test_replace_puts_one_expert_in_the_place_of_another():
    residency = Residency(jnp.array([[0, -1, 1, -1]], jnp.int32), jnp.array([[0, 2]], jnp.int32))
    after = replace(residency, np.int32(0), np.int32(1), np.int32(3))
    assert after.expert_of_slot.tolist() == [[0, 3]]
    assert after.slot_of_expert.tolist() == [[0, -1, -1, 1]]


@deterministic
@given(st.lists(st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf]), min_size=9, max_size=9))
def test_the_lowest_come_in_the_order_of_a_stable_sort(values: list[float]):
    key = np.array(values, np.float32)
    for count in (9, 4):
        found = jax.jit(lowest, static_argnums=1)(key, count)
        np.testing.assert_array_equal(found, np.argsort(key, kind="stable")[:count])
