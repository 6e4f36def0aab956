"""Fitting: networks learn what a trace has to teach, repeatably, and mistakes are one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from flashmoe_jax.policy.saved import load_saved
from flashmoe_jax.telemetry.trace import Trace, load_trace, save_trace
from train_policy.__main__ import main
from train_policy.labels import FAR, Label, Target, distances
from train_policy.provenance import read_trained_on
from train_policy.replay import Replayer
from train_policy.replay_steps import make_steps

LAYERS, EXPERTS, TOP_K, PROMPTS, ROWS = 2, 16, 2, 30, 40


def cycling_trace(seed: int = 0, *, num_experts: int = EXPERTS, prompts: int = PROMPTS, **wide: np.ndarray) -> Trace:
    """Every prompt walks along one of four cycles; a layer's choice shows where it is, recency does not."""
    random = np.random.default_rng(seed)
    cycles = np.random.default_rng(99).permuted(np.tile(np.arange(num_experts), (4, LAYERS, TOP_K, 1)), axis=-1)
    ids = []
    for _ in range(prompts):
        cycle, start = cycles[random.integers(4)], random.integers(num_experts)
        at = (start + np.arange(ROWS)) % 7  # a loop longer than the slots: LRU misses all of it
        ids.append(cycle[..., at].transpose(2, 0, 1))
    rows = prompts * ROWS
    return Trace(
        ids=np.concatenate(ids).astype(np.int32),
        seq_id=np.repeat(np.arange(prompts), ROWS).astype(np.int32),
        phase=np.ones(rows, np.uint8),
        step=np.arange(rows, dtype=np.int32),
        token=np.zeros(rows, np.int32),
        meta={"experts": num_experts},
        **wide,
    )


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "cycles.npz"
    save_trace(cycling_trace(), path)
    return path


def fit(*arguments: object) -> int:
    return main(["fit", *map(str, arguments)])


def hits(trace: Trace, policy: str, slots: int) -> int:
    return int(Replayer(trace).replay(policy, [slots])[0].run.decode.hits.sum())


def held_out(path: Path, policy: Path) -> Trace:
    trace = load_trace(path)
    (seen,) = read_trained_on(load_saved(policy).meta)
    assert len(seen.held_out) == PROMPTS // 5
    return trace.take(np.isin(trace.seq_id, list(seen.held_out)))


@pytest.mark.parametrize("label", ["reuse", "victim", "distance"])
def test_context_beats_decayed(trace_file: Path, tmp_path: Path, label: str):
    options = ("--trace", trace_file, "--kind", "context", "--label", label, "--hidden-units", 16, "--epochs", 6)
    assert not fit(*options, "--out", tmp_path / "c")
    test = held_out(trace_file, tmp_path / "c")
    learned, decayed, best = (hits(test, policy, 8) for policy in (str(tmp_path / "c"), "decayed", "min"))
    assert learned - decayed > 0.3 * (best - decayed)


@pytest.mark.parametrize("shape", ["layer", "expert"])
def test_paper_is_no_worse_than_lru_on_loops(trace_file: Path, tmp_path: Path, shape: str):
    assert not fit("--trace", trace_file, "--kind", "paper", "--shape", shape, "--out", tmp_path / "p")
    saved = load_saved(tmp_path / "p")
    assert (saved.kind, saved.shape, saved.activation) == ("paper", shape, "silu")
    test = held_out(trace_file, tmp_path / "p")
    assert hits(test, str(tmp_path / "p"), 4) > hits(test, "lru", 4)


def test_shared_takes_traces_of_several_models(trace_file: Path, tmp_path: Path):
    other = tmp_path / "other.npz"
    save_trace(cycling_trace(1, num_experts=24, prompts=10), other)
    assert not fit("--trace", trace_file, other, "--kind", "shared", "--out", tmp_path / "s", "--epochs", 3)
    saved = load_saved(tmp_path / "s")
    assert saved.kind == "shared" and len(read_trained_on(saved.meta)) == 2
    assert hits(load_trace(other), str(tmp_path / "s"), 6) > hits(load_trace(other), "lru", 6)


def test_the_same_seed_makes_the_same_network(trace_file: Path, tmp_path: Path):
    options = ("--trace", trace_file, "--kind", "context", "--hidden-units", 16, "--epochs", 2)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert not fit(*options, "--seed", seed, "--out", tmp_path / name)
    digests = [json.loads((tmp_path / name / "policy.json").read_text())["digest"] for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_router_logits_and_hidden_states_are_learned_from(tmp_path: Path):
    random = np.random.default_rng(0)
    rows = PROMPTS * ROWS
    trace = cycling_trace(
        router_logits=random.normal(0, 3, (rows, LAYERS, EXPERTS)).astype(np.float16),
        hidden=random.normal(0, 1, (rows, LAYERS, 5)).astype(np.float16),
    )
    save_trace(trace, tmp_path / "t.npz")
    options = ("--trace", tmp_path / "t.npz", "--kind", "context", "--hidden-units", 16, "--epochs", 1)
    assert not fit(*options, "--inputs", "router_logits,hidden", "--out", tmp_path / "c")
    saved = load_saved(tmp_path / "c")
    assert saved.inputs == {"router_logits", "hidden"} and saved.model.hidden_size == 5
    assert hits(load_trace(tmp_path / "t.npz"), str(tmp_path / "c"), 4) > 0


def test_json(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert not fit(
        "--trace",
        trace_file,
        "--kind",
        "context",
        "--out",
        tmp_path / "c",
        "--hidden-units",
        8,
        "--epochs",
        1,
        "--json",
    )
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == str(tmp_path / "c") and result["epochs"] == 1
    assert set(result["gap_closed"][0]) == {"2", "4", "6", "8"}


def test_numbered_test_prompts_are_held_out(trace_file: Path, tmp_path: Path):
    options = ("--trace", trace_file, "--kind", "paper", "--epochs", 1, "--out", tmp_path / "p")
    assert not fit(*options, "--test-prompts", "3,10-12")
    assert read_trained_on(load_saved(tmp_path / "p").meta)[0].held_out == {3, 10, 11, 12}


def test_distances_are_those_of_the_trace():
    ids = cycling_trace(prompts=2).ids
    found = distances(make_steps(cycling_trace(prompts=2)))
    for layer in range(LAYERS):
        for step in range(len(ids)):
            for expert in range(EXPERTS):
                later = np.flatnonzero((ids[step + 1 :, layer] == expert).any(axis=1))
                assert found[layer, step, expert] == (min(later[0] + 1, FAR) if len(later) else FAR)


def test_boundaries_are_of_the_experts_used_soonest():
    distance = np.array([[5, 1, 2, 9, 255, 3, 4, 7]], np.uint8)
    assert Target(Label.VICTIM, 8, 1).boundaries(distance).tolist() == [[1, 2, 3, 4]]
    assert Target(Label.REUSE, 8, 1).boundaries(distance).shape == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "context", "--inputs", "router_logits"], "has no router_logits; record one with --router-logits"),
        (["--kind", "context", "--inputs", "weights"], "--inputs weights: unknown; choose of router_logits, hidden"),
        (["--kind", "paper", "--test-prompts", "97-99"], "has none of the prompts 97-99; it has 0 to 29"),
        (["--kind", "paper", "--test-prompts", "some"], "--test-prompts 'some' is not understood"),
        (["--kind", "paper", "--test-prompts", "100%"], "write a share below 100%"),
        (
            ["--kind", "paper", "--test-prompts", "0-28"],
            "30 prompts, 29 of them held out for testing; training needs 2",
        ),
        (["--kind", "paper", "--experts", "12"], "a model with 16 experts per layer and --experts is 12"),
        (["--kind", "paper", "--epochs", "0"], "--epochs is 0; it must be at least 1"),
        (["--kind", "paper", "--inputs", "hidden"], "--inputs has an effect with --kind context only"),
        (["--kind", "static", "--seed", "1"], "--seed has an effect with --kind paper or context or shared only"),
    ],
)
def test_mistakes_are_one_line(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert fit("--trace", trace_file, "--out", tmp_path / "p", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "p").exists()


def test_traces_of_different_models_are_refused(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_trace(cycling_trace(num_experts=24), tmp_path / "other.npz")
    assert fit("--trace", trace_file, tmp_path / "other.npz", "--kind", "context", "--out", tmp_path / "c") == 2
    assert "the traces are of different models: experts per layer 16 and 24" in capsys.readouterr().err


def test_one_prompt_is_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_trace(cycling_trace(prompts=1), tmp_path / "t.npz")
    assert fit("--trace", tmp_path / "t.npz", "--kind", "context", "--out", tmp_path / "c") == 2
    assert "has 1 prompts, 0 of them held out for testing" in capsys.readouterr().err
