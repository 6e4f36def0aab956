"""Models that several test files of the engine share; each is made once per session."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_engines import MIXED, TinyModel, make_model


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], TinyModel]:
    """The model of a config.json."""
    made: dict[str, TinyModel] = {}

    def get(hf_config: dict[str, Any]) -> TinyModel:
        key = repr(sorted(hf_config.items()))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model"), hf_config)
        return made[key]

    return get


@pytest.fixture(scope="session")
def mixed(model_of: Callable[[dict[str, Any]], TinyModel]) -> TinyModel:
    """The model most tests use."""
    return model_of(MIXED)
