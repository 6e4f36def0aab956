"""The loaded kernels, and small records for them."""

import pytest

from flashmoe_jax.native import Library, load


@pytest.fixture(scope="session")
def library() -> Library:
    """The kernels of this install; tests that need them are skipped where there are none."""
    library = load()
    if not library.is_loaded:
        pytest.skip(f"no CPU kernels: {library.reason}")
    return library
