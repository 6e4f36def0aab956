"""Slot buffers: what lands is what computations see, in place on the CPU, by insertion elsewhere."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashmoe_jax.experts.slots import AliasedSlots, InsertedSlots, SlotBuffer, make_slot_buffer

ROWS, WORDS = 5, 2048  # 2048 uint16 words are one page
DEVICE = jax.devices()[0]
KINDS = [AliasedSlots, InsertedSlots]
row_sum = jax.jit(lambda rows, row: jnp.sum(rows[row].astype(jnp.uint32)))


def make(kind: type, dtype: type = np.uint16) -> SlotBuffer:
    return kind(ROWS, WORDS, np.dtype(dtype), DEVICE)


def fill(slots: SlotBuffer, values: dict[int, int]) -> None:
    for row, value in values.items():
        slots.landing(row)[:] = value
    slots.commit(list(values))


def first_words(slots: SlotBuffer) -> list[int]:
    array = np.asarray(slots.array)
    assert (array == array[:, :1]).all(), "a row is written in part"
    return array[:, 0].tolist()


def test_the_cpu_backend_gets_the_aliased_kind():
    assert isinstance(make_slot_buffer(ROWS, WORDS, np.dtype(np.uint16), jax.devices("cpu")[0]), AliasedSlots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_start_empty_and_keep_what_lands(kind: type, dtype: type):
    slots = make(kind, dtype)
    assert slots.array.dtype == dtype and slots.array.shape == (ROWS, WORDS)
    assert first_words(slots) == [0] * ROWS
    fill(slots, {3: 7, 0: 9})
    fill(slots, {3: 8})
    assert first_words(slots) == [9, 0, 0, 8, 0]
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_landing_changes_nothing(kind: type):
    slots = make(kind)
    fill(slots, {4: 6, 1: 5})
    slots.landing(2)
    slots.release(2)
    slots.release(3)
    fill(slots, {2: 8})
    assert first_words(slots) == [0, 5, 8, 0, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_landings_of_several_rows_are_apart(kind: type):
    slots = make(kind)
    landings = {row: slots.landing(row) for row in (2, 0, 1)}
    for row, landing in landings.items():
        assert landing.shape == (WORDS,) and landing.flags.c_contiguous and landing.flags.writeable
        assert landing.ctypes.data % 4096 == 0
        landing[:] = 10 + row
    slots.commit([2, 0])
    slots.commit([1])
    assert first_words(slots) == [10, 11, 12, 0, 0]


def test_the_aliased_array_never_moves_and_shows_what_landed():
    slots = make(AliasedSlots)
    address, array = slots.array.unsafe_buffer_pointer(), slots.array
    assert address % 4096 == 0
    assert int(row_sum(array, 1)) == 0
    slots.landing(1)[:] = 3
    # The program compiled before, given the very same array, reads memory as it is now.
    assert int(row_sum(array, 1)) == 3 * WORDS
    fill(slots, {1: 4})
    assert slots.array is array
    assert array.unsafe_buffer_pointer() == address
    assert int(row_sum(array, 1)) == 4 * WORDS


def test_inserting_reuses_host_memory_and_donates_the_array():
    slots = make(InsertedSlots)
    addresses = set()
    for step in range(4):
        before = slots.array
        for row in (0, 1):
            addresses.add(slots.landing(row).ctypes.data)
        fill(slots, {0: step, 1: step})
        assert before.is_deleted()
    assert len(addresses) == 2


def test_an_inserted_record_is_not_changed_by_the_next_read():
    slots = make(InsertedSlots)
    fill(slots, {0: 5})
    array = slots.array
    slots.landing(1)[:] = 77  # the same host memory, not committed
    assert np.asarray(array)[:2, 0].tolist() == [5, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_closing_twice_is_harmless_and_use_after_it_is_noticed(kind: type):
    slots = make(kind)
    pending = row_sum(slots.array, 0)
    slots.close()
    slots.close()
    gc.collect()
    assert int(pending) == 0
    with pytest.raises(AssertionError, match="closed"):
        _ = slots.array
