"""From names, folders and `auto` to policies."""

from pathlib import Path

import numpy as np
import pytest
from random_policies import random_policy

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import choice
from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.choice import check_policy_name, choose_policy
from flashmoe_jax.policy.popularity import STATIC_NAME, save_popularity
from flashmoe_jax.policy.saved import save_policy

MODEL = PolicyShape(3, 8, 2, 6)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that ships nothing yet."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(choice, "SHIPPED", folder)
    return folder


def save(folder: Path, kind: str, model: PolicyShape = MODEL) -> None:
    save_policy(folder, random_policy(kind, model, shape="expert" if kind == "paper" else ""))


def test_auto_takes_the_models_own_then_the_shipped_then_decayed(shipped: Path, tmp_path: Path):
    own = tmp_path / "policy"
    assert str(choose_policy("auto", MODEL, own)) == "decayed"
    save(shipped / "shared", "shared")
    assert str(choose_policy("auto", MODEL, own)) == "shared (shipped with this package)"
    save(own / "paper", "paper")
    assert str(choose_policy("auto", MODEL, own)) == "paper (of the model directory)"
    save(own / "context", "context")
    chosen = choose_policy("auto", MODEL, own)
    assert str(chosen) == "context (of the model directory)"
    assert chosen.is_learned and chosen.of_slots(4).is_learned and chosen.of_slots(4).name == "context"


def test_a_name_takes_that_kind_and_a_folder_that_folder(shipped: Path, tmp_path: Path):
    save(tmp_path / "policy" / "context", "context")
    save(shipped / "shared", "shared")
    assert choose_policy("context", MODEL, tmp_path / "policy").kind == "context"
    assert choose_policy("shared", MODEL, tmp_path / "policy").source == "shipped with this package"
    elsewhere = str(tmp_path / "policy" / "context")
    assert str(choose_policy(elsewhere, MODEL)) == f"context (of {elsewhere})"


def test_what_is_found_but_does_not_fit_is_refused_and_not_passed_over(shipped: Path, tmp_path: Path):
    save(shipped / "shared", "shared")
    save(tmp_path / "policy" / "context", "context", PolicyShape(3, 16, 2))
    with pytest.raises(ConfigError, match="3 layers x 16 experts"):
        choose_policy("auto", MODEL, tmp_path / "policy")


@pytest.mark.parametrize("kind", ["context", "paper"])
def test_a_kind_that_the_model_lacks_says_how_to_get_it(kind: str, shipped: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"brings no {kind} policy; fit one .* --kind {kind} --trace T --into MODEL"):
        choose_policy(kind, MODEL, tmp_path / "policy")


def test_static_takes_the_popularity_given_then_that_of_the_model(tmp_path: Path):
    counts = np.arange(24.0).reshape(3, 8)
    with pytest.raises(ConfigError, match="policy static needs the popularity"):
        choose_policy("static", MODEL, tmp_path)
    save_popularity(tmp_path / STATIC_NAME, counts, {})
    assert np.array_equal(np.stack(choose_policy("static", MODEL, tmp_path).of_slots(4).params), counts)
    given = choose_policy("static", MODEL, tmp_path, counts + 1)
    assert np.array_equal(np.stack(given.of_slots(4).params), counts + 1)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(ConfigError, match="policy 'best' is unknown; choose one of auto, context, paper, shared, lru"):
        check_policy_name("best")
