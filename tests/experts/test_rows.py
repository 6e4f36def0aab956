"""Every row is one slot's, or spare, or taken, whatever is done."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_jax.experts.rows import RowTable

LAYERS, SLOTS, SPARE = 2, 3, 2


@given(st.lists(st.tuples(st.sampled_from(["take", "give_back", "exchange"]), st.integers(0, 5)), max_size=40))
def test_rows_are_never_lost_nor_shared(actions: list[tuple[str, int]]):
    rows, taken = RowTable(LAYERS, SLOTS, SPARE), []
    for action, which in actions:
        if action == "take":
            row = rows.take()
            assert (row is None) == (len(taken) == SPARE)
            taken += [] if row is None else [row]
        elif taken:
            row = taken.pop(which % len(taken))
            if action == "give_back":
                rows.give_back(row)
            else:
                layer, slot = which % LAYERS, which // LAYERS
                before = rows.row(layer, slot)
                rows.exchange(layer, slot, row)
                assert rows.row(layer, slot) == row != before
        held = [rows.row(layer, slot) for layer in range(LAYERS) for slot in range(SLOTS)]
        assert held == np.concatenate([rows.rows_of(layer) for layer in range(LAYERS)]).tolist()
        assert len({*held, *taken}) == len(held) + len(taken)
        assert rows.num_free == rows.num_rows - len(held) - len(taken)
    rows.reset()
    assert rows.num_free == SPARE and rows.rows_of(1).tolist() == [3, 4, 5]


def test_rows_of_a_layer_are_a_copy():
    rows = RowTable(LAYERS, SLOTS, SPARE)
    shown = rows.rows_of(0)
    rows.exchange(0, 1, rows.take())
    assert shown.tolist() == [0, 1, 2] and rows.rows_of(0).tolist() == [0, 6, 2]


def test_a_row_is_not_given_back_twice():
    rows = RowTable(LAYERS, SLOTS, SPARE)
    row = rows.take()
    rows.give_back(row)
    with pytest.raises(AssertionError):
        rows.give_back(row)
