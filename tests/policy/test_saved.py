"""Policies on disk: what is read equals what was written, and everything else is one clear line."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from random_policies import KINDS, random_policy

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy.base import HIDDEN, ROUTER_LOGITS, PolicyShape
from flashmoe_jax.policy.saved import POLICY_JSON, load_saved, save_policy

MODEL = PolicyShape(3, 8, 2, 6)


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_what_is_read_equals_what_was_written(kind: str, shape: str, tmp_path: Path):
    inputs = frozenset({ROUTER_LOGITS, HIDDEN}) if kind == "context" else frozenset()
    saved = random_policy(kind, MODEL, shape=shape, inputs=inputs, heads=3 if kind == "context" else 1)
    save_policy(tmp_path / "p", saved)
    loaded = load_saved(tmp_path / "p")
    assert (loaded.kind, loaded.inputs, loaded.model, loaded.blend, loaded.meta) == (
        kind,
        inputs,
        saved.model,
        saved.blend,
        saved.meta,
    )
    before, after = saved.policy(MODEL, 4), loaded.policy(MODEL, 4)
    assert before == after
    assert after.is_learned and after.name == kind and len(after.params) == MODEL.num_layers
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_heads_are_mixed_for_the_share_of_slots():
    saved = random_policy("context", MODEL, heads=3)
    all_slots, none = saved.policy(MODEL, 8).params[0].last.kernel, saved.policy(MODEL, 0).params[0].last.kernel
    half = saved.policy(MODEL, 4).params[0].last.kernel
    assert not np.array_equal(all_slots, none)
    middle = saved.arrays["last_kernel"][0, 1]
    assert np.corrcoef(half.ravel(), middle.ravel())[0, 1] > 0.999


def test_a_policy_is_replaced_whole(tmp_path: Path):
    save_policy(tmp_path / "p", random_policy("context", MODEL))
    save_policy(tmp_path / "p", random_policy("paper", MODEL, shape="expert"))
    assert load_saved(tmp_path / "p").kind == "paper"


def test_a_policy_of_another_model_is_refused():
    saved = random_policy("context", MODEL)
    with pytest.raises(ConfigError, match="3 layers x 8 experts, 2 per token, the model has 3 layers x 16 experts"):
        saved.policy(PolicyShape(3, 16, 2), 4)
    assert len(random_policy("shared", MODEL).policy(PolicyShape(5, 16, 4), 4).params) == 5


def test_hidden_states_of_another_width_are_refused():
    saved = random_policy("context", MODEL, inputs=frozenset({HIDDEN}))
    with pytest.raises(ConfigError, match="hidden states of 6, the model's have 7"):
        saved.policy(MODEL._replace(hidden_size=7), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "policy format 99"),
        ({"kind": "oracle"}, "kind 'oracle' is unknown"),
        ({"digest": "0"}, "not those that were saved"),
        ({"blend": None}, "not a whole policy"),
        ({"model": {"num_layers": 3, "num_experts": 9, "top_k": 2, "hidden_size": 6}}, "fit it again"),
    ],
)
def test_a_damaged_or_newer_folder_is_one_line(change: dict, message: str, tmp_path: Path):
    save_policy(tmp_path / "p", random_policy("context", MODEL))
    path = tmp_path / "p" / POLICY_JSON
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_saved(tmp_path / "p")
    assert "\n" not in str(caught.value)


def test_no_folder_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no policy"):
        load_saved(tmp_path / "none")
