"""Fixtures for all tests. Importing this file also puts this folder on the path, for `tiny_models`."""

import os
from pathlib import Path

import pytest

# Most of the tests' time is compilation. What one test compiled serves the others, commands in subprocesses included;
# each worker has a folder of its own, as JAX does not write an entry atomically. JAX reads these when it is imported.
_COMPILED = Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED / os.environ.get("PYTEST_XDIST_WORKER", "main")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reader", choices=["auto", "array", "range", "direct"], help="how stores read where a test does not say"
    )


@pytest.fixture(scope="session", autouse=True)
def _default_reader(request: pytest.FixtureRequest) -> None:
    reader = request.config.getoption("--reader")
    if reader is not None:
        from flashmoe_jax.engine.engine import load
        from flashmoe_jax.experts.store import ExpertStore

        for function in (load, ExpertStore.open):
            assert function.__kwdefaults__ is not None
            function.__kwdefaults__["reader"] = reader


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A folder of real configs and text beside the clone; tests that use it are skipped where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the clone")
    return SHARED_DATA
