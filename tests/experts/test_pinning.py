"""Pinning is best effort: it says whether it worked, and never fails."""

import ctypes

import jax
import numpy as np
import pytest

from flashmoe_jax.experts import pinning
from flashmoe_jax.experts.slots import pinned_rows


class Driver:
    """Stands for the driver's library; answers every call alike and keeps what it was asked."""

    def __init__(self, answer: int):
        self.answer, self.calls = answer, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(a.value if hasattr(a, "value") else a for a in arguments)))
            return self.answer

        return call


@pytest.fixture(autouse=True)
def _fresh():
    pinning._driver.cache_clear()
    yield
    pinning._driver.cache_clear()


@pytest.mark.parametrize(("answer", "is_pinned"), [(0, True), (2, False)])
def test_memory_is_registered_with_the_driver(answer: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch):
    driver = Driver(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert pinning._driver() is driver
    assert [call[0] for call in driver.calls] == "cuInit cuDeviceGet cuDevicePrimaryCtxRetain cuCtxSetCurrent".split()
    driver.answer = answer
    assert pinning.pin_memory(4096, 8192) is is_pinned
    assert driver.calls[-1] == ("cuMemHostRegister_v2", 4096, 8192, 1)


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert pinning.pin_memory(4096, 8192) is False


def test_a_driver_without_devices_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(100))
    assert pinning._driver() is None


def test_rows_are_aligned_and_apart():
    rows = pinned_rows(3, 2048, np.dtype(np.uint16), jax.devices()[0])
    assert rows.shape == (3, 2048) and rows.ctypes.data % 4096 == 0
    rows[1] = 7
    assert rows[0].max() == 0 and rows[2].max() == 0
