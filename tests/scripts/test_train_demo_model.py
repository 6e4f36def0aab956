"""The demo model's training: it learns, resumes exactly, agrees with inference and exports a whole checkpoint."""

import csv
import functools
import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.models.decoder import head_logits
from flashmoe_jax.models.families import hf_name_map

pytest.importorskip("optax", reason="training needs the extra `train`")
SCRIPTS = Path(__file__).parents[2] / "scripts"
LENGTH = 16


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture(scope="module")
def parts(scripts_on_path):
    names = ("corpus", "evaluation", "export", "model", "training")
    return {name: importlib.import_module(f"demo_model.{name}") for name in names}


@pytest.fixture(scope="module")
def flat(parts):
    config = parts["model"].demo_config(
        300,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=2,
        num_layers=2,
        num_experts=4,
        experts_per_token=2,
        expert_hidden=8,
    )
    return parts["model"].FlatModel(config)


@pytest.fixture(scope="module")
def domains(parts):
    """A made-up corpus of one domain for each real one: arithmetic progressions of tokens, which are easy to learn."""
    made = []
    for i, domain in enumerate(parts["corpus"].DOMAINS):
        tokens = (np.arange(400, dtype=np.int32) * (i + 1)) % 50
        starts = np.arange(0, 400, 20)
        made.append(parts["corpus"].TokenDomain(domain.name, domain.share, tokens, starts, tokens[:100], 300))
    return made


def options(parts, **changes):
    return parts["training"].TrainOptions(
        **{"steps": 12, "tokens_per_step": 8 * LENGTH, "lengths": ((0.0, LENGTH),), "warmup_steps": 2, **changes}
    )


def test_a_few_steps_lower_the_loss_and_resuming_changes_nothing(parts, flat, domains, tmp_path, monkeypatch):
    training = parts["training"]
    # One compilation for the three runs; the options are the same.
    monkeypatch.setattr(training, "make_step", functools.cache(training.make_step))
    chosen = options(parts, peak_rate=1e-2)
    whole = training.train(flat, domains, chosen, training.Run(tmp_path / "whole"), log_every=1)
    halves = training.Run(tmp_path / "halves")
    training.train(flat, domains, chosen, halves, stop_after=5)
    resumed = training.train(flat, domains, chosen, halves, resume=True)

    assert resumed.steps == whole.steps == 12
    for name, value in whole.params.items():
        np.testing.assert_array_equal(resumed.params[name], value, err_msg=name)
    with (tmp_path / "whole/metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5


def test_state_is_donated(parts, flat, domains):
    training = parts["training"]
    state = training.init_state(flat, options(parts))
    rows = parts["corpus"].batch(domains, 0, 0, 8, LENGTH)
    training.make_step(flat, options(parts))(state, rows, np.float32(1e-3))
    assert state.params["experts.0.gate_proj"].is_deleted()


def test_batches_follow_the_shares_and_depend_on_seed_and_step_alone(parts, domains):
    batch = parts["corpus"].batch
    np.testing.assert_array_equal(batch(domains, 1, 7, 8, LENGTH), batch(domains, 1, 7, 8, LENGTH))
    assert (batch(domains, 1, 7, 8, LENGTH) != batch(domains, 1, 8, 8, LENGTH)).any()
    # Domain 0 counts up by one and has 40 % of the rows.
    rows = np.concatenate([batch(domains, 0, step, 10, LENGTH) for step in range(50)])
    steps_by_one = ((np.diff(rows, axis=1) % 50) == 1).all(axis=1)
    assert abs(steps_by_one.mean() - 0.40) < 0.05


def test_training_forward_equals_the_inference_modules(parts, flat):
    """The rearranged attention and dispatch against `DecoderLayer.attend` and one expert after the other."""
    model_part = parts["model"]
    params = {name: value * 3 for name, value in flat.init(0).items()}
    token_BT = jax.random.randint(jax.random.key(1), (2, 150), 0, flat.config.vocab_size)

    @jax.jit
    def trained(params):
        return model_part.forward(flat.merge(params), flat.config, token_BT, None).logits

    @jax.jit
    def reference(params):
        model = flat.merge(params)
        x_BTD = model.decoder.embedder(token_BT)
        position_BT = jnp.broadcast_to(jnp.arange(150), token_BT.shape)
        for layer, experts in zip(model.decoder.layers, model.experts, strict=True):
            x_BTD, h_BTD, _ = layer.attend(x_BTD, position_BT, None)
            routing = layer.router(h_BTD)
            for expert in range(flat.config.num_experts):
                gate, up, down = (w[...][expert] for w in (experts.gate_proj, experts.up_proj, experts.down_proj))
                y_BTD = (jax.nn.silu(h_BTD @ gate.T) * (h_BTD @ up.T)) @ down.T
                weight_BT = jnp.sum(jnp.where(routing.expert_id == expert, routing.weight, 0), axis=-1)
                x_BTD = x_BTD + weight_BT[..., None] * y_BTD
        return head_logits(model.decoder.final_norm, model.decoder.embedder.embedding[...], x_BTD)

    np.testing.assert_allclose(trained(params), reference(params), atol=1e-4)


def test_training_attention_has_the_gradient_of_the_inference_attention(parts, flat):
    attention = flat.merge(flat.init(0)).decoder.layers[0].attention
    h_BTD = jax.random.normal(jax.random.key(0), (2, 70, flat.config.hidden_size))
    position_BT = jnp.broadcast_to(jnp.arange(70), (2, 70))

    def gradient(attend):
        return jax.jit(jax.grad(lambda h: jnp.sum(jnp.sin(100 * attend(h)))))(h_BTD)

    trained = gradient(lambda h: parts["model"].causal_attention(attention, h))
    reference = gradient(lambda h: attention(h, position_BT, None)[0])
    np.testing.assert_allclose(trained, reference, atol=1e-4)


def test_expert_capacity_drops_the_surplus_only(parts, flat):
    model_part = parts["model"]
    model = flat.merge(flat.init(0))
    routing = model_part.Routing(
        expert_id=jnp.array([[0, 1], [0, 2], [0, 3]]), weight=jnp.ones((3, 2)), logits=jnp.zeros((3, 4))
    )
    x_MD = jax.random.normal(jax.random.key(0), (3, flat.config.hidden_size))
    full, none_dropped = model_part.routed_experts(model.experts[0], x_MD, routing, 3)
    capped, dropped = model_part.routed_experts(model.experts[0], x_MD, routing, 2)
    assert (int(none_dropped), int(dropped)) == (0, 1)
    np.testing.assert_allclose(capped[:2], full[:2], atol=1e-6)
    assert np.abs(capped[2] - full[2]).max() > 1e-4


def test_gradient_of_the_dispatch_is_that_of_plain_indexing(parts, flat):
    model_part = parts["model"]
    model = flat.merge(flat.init(0))
    x_MD = jax.random.normal(jax.random.key(0), (10, flat.config.hidden_size))

    def dispatched(x_MD):
        routing = model.decoder.layers[0].router(x_MD)
        return jnp.sum(jnp.sin(model_part.routed_experts(model.experts[0], x_MD, routing, 10)[0]))

    def dense(x_MD):
        routing = model.decoder.layers[0].router(x_MD)
        y_EMD = model.experts[0](jnp.broadcast_to(x_MD, (flat.config.num_experts, *x_MD.shape)))
        y_MXD = y_EMD[routing.expert_id, jnp.arange(10)[:, None]]
        return jnp.sum(jnp.sin(jnp.einsum("MXD,MX->MD", y_MXD, routing.weight)))

    np.testing.assert_allclose(jax.jit(jax.grad(dispatched))(x_MD), jax.jit(jax.grad(dense))(x_MD), atol=1e-5)


def test_export_is_a_whole_checkpoint(parts, flat, domains, tmp_path):
    tokenizer = parts["corpus"].train_tokenizer(["Once upon a time there was 1 fox, 22 hens."] * 3, 300)
    params = flat.init(0)
    trained = parts["training"].Trained(params, 1, 128, 60.0)
    results = parts["evaluation"].evaluate(flat, params, domains, length=LENGTH, max_tokens=32)
    sample = parts["evaluation"].continue_text(flat, params, tokenizer, "Once", max_tokens=4, temperature=1.0, seed=0)
    card = parts["export"].model_card(flat, trained, domains, results, [sample], options(parts))
    parts["export"].export(tmp_path / "out", flat, params, tokenizer, card)

    config = ModelConfig.from_hf(json.loads((tmp_path / "out/config.json").read_text()))
    assert config == flat.config
    with safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(hf_name_map(config).expected_keys())
        key = "model.layers.1.mlp.experts.3.down_proj.weight"
        np.testing.assert_array_equal(file.get_tensor(key), params["experts.1.down_proj"][3].astype(jnp.bfloat16))
    assert "held out" in (tmp_path / "out/README.md").read_text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_tokenizer_keeps_text_and_splits_digits(parts):
    tokenizer = parts["corpus"].train_tokenizer(["ab 2024 è così"] * 3, 300)
    text = " ab  2024\n\tè così 漢"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("2024").ids) == 4


def test_missing_corpus_is_one_line(parts, tmp_path, capsys):
    script = importlib.import_module("train_demo_model")
    assert script.main(["--data", str(tmp_path / "none"), "--run", str(tmp_path / "run"), "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "--data" in error
    assert error.count("\n") == 1
