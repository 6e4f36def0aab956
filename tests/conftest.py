"""Fixtures for all tests. Importing this file also puts this folder on the path, for `tiny_models`."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A folder of real configs and text beside the clone; tests that use it are skipped where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the clone")
    return SHARED_DATA
