"""`python -m train_policy record`: what it writes is what the model did, also after an interruption and in batches."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import tiny_tokenizers

import flashmoe_jax
from checkpoints.convert import convert
from flashmoe_jax.engine import platform
from flashmoe_jax.models.reference import reference_forward
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, Trace, load_trace, save_trace
from train_policy import record as recording
from train_policy.__main__ import main

# Six prompts of different lengths, so that three of a batch end up with others than their neighbours.
PROMPTS = ("Once", "upon a time there was", "a", "little girl who lived near a big", "def add(a, b):", "forest near")
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def hf_config() -> dict:
    vocab_size = tiny_tokenizers.byte_level().get_vocab_size()
    return tiny_models.tiny_hf_config(
        "olmoe", vocab_size=vocab_size, num_experts=8, num_hidden_layers=2, eos_token_id=None
    )


@pytest.fixture(scope="module")
def model(hf_config: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record")
    tiny_models.write_hf_checkpoint(folder / "hf", hf_config)
    tiny_tokenizers.write_dir(folder / "hf", tiny_tokenizers.byte_level())
    return convert(folder / "hf", folder / "model")


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is a setting of the whole process and would outlive the folder it is in."""
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda directory: None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


@pytest.fixture
def run(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Runs `record`; returns exit code, stdout and stderr."""

    def run(*options: str, out: str = "trace.npz", prompts: Path = prompts) -> tuple[int, str, str]:
        base = ["--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / out)]
        try:
            status = main(["record", *base, "--max-new-tokens", str(NEW_TOKENS), "--batch", "3", *options])
        except SystemExit as end:
            status = int(end.code or 0)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def of_prompt(trace: Trace, prompt: int) -> Trace:
    return trace.take(trace.seq_id == prompt)


def assert_same(one: Trace, other: Trace, tolerance: float = 0.0) -> None:
    for name in ("ids", "phase", "token"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for name in ("router_logits", "hidden"):
        if getattr(one, name) is not None:
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=tolerance, rtol=0)


class TestTrace:
    def test_json_says_what_was_recorded(self, run, tmp_path: Path):
        status, out, err = run("--json", "--domain", "tales", "--licence", "public domain", "--seed", "3")
        assert status == 0, err
        assert "recording takes about" in err
        trace = load_trace(tmp_path / "trace.npz")
        result = json.loads(out)
        assert result["prompts"] == len(PROMPTS)
        assert result["tokens"] == len(trace.ids) == result["prefill_tokens"] + result["decode_tokens"]
        # The last token is not put into the model.
        assert result["decode_tokens"] == len(PROMPTS) * (NEW_TOKENS - 1)
        assert trace.meta["experts"] == 8 and trace.meta["top_k"] == 3
        assert trace.meta["domain"] == "tales" and trace.meta["licence"] == "public domain"
        assert trace.meta["sampling"]["temperature"] == 0 and trace.meta["sampling"]["seed"] == 3
        assert not any(prompt in json.dumps(trace.meta) for prompt in PROMPTS if len(prompt) > 3)
        assert trace.router_logits is None and trace.hidden is None
        assert not (tmp_path / "trace.npz.parts").exists()

    def test_prompts_follow_each_other_in_the_order_of_the_file(self, run, model: Path, tmp_path: Path):
        assert run()[0] == 0
        trace = load_trace(tmp_path / "trace.npz")
        assert (np.diff(trace.seq_id) >= 0).all()
        encode = flashmoe_jax.text.Tokenizer.from_dir(model).encode
        for number, prompt in enumerate(PROMPTS):
            rows = of_prompt(trace, number)
            assert rows.token[rows.phase == PREFILL].tolist() == encode(prompt)
            assert len(set(rows.step[rows.phase == PREFILL])) == 1
            assert (np.diff(rows.step[rows.phase == DECODE]) == 1).all()
        assert (np.diff(trace.step) >= 0).all()

    def test_router_logits_and_inputs_are_the_models_own(self, run, hf_config: dict, tmp_path: Path):
        assert run("--router-logits", "--hidden", "--temperature", "0.8")[0] == 0
        trace = load_trace(tmp_path / "trace.npz")
        config = flashmoe_jax.config.ModelConfig.from_hf(hf_config)
        weights = tiny_models.random_weights(config, 0)
        assert trace.router_logits is not None and trace.hidden is not None
        assert trace.router_logits.dtype == trace.hidden.dtype == np.float16
        assert trace.hidden.shape[1:] == (config.num_moe_layers, config.hidden_size)
        for number in (1, 2):
            rows = of_prompt(trace, number)
            reference = reference_forward(config, weights.dense, weights.experts, rows.token[None])
            for layer, routing in enumerate(reference.routing):
                np.testing.assert_allclose(rows.router_logits[:, layer], routing.logits[0], atol=2e-3, rtol=2e-3)
                assert np.array_equal(np.sort(rows.ids[:, layer]), np.sort(routing.expert_id[0]))
                kernel = np.asarray(weights.dense[f"layers.{layer}.router.kernel"], np.float32)
                again = rows.hidden[:, layer].astype(np.float32) @ kernel.T
                np.testing.assert_allclose(again, rows.router_logits[:, layer], atol=2e-2, rtol=2e-2)

    def test_a_batch_of_three_records_what_each_prompt_does_alone(self, run, tmp_path: Path):
        # Five prompts: the second batch of three is filled up.
        for batch in ("1", "3"):
            options = ("--batch", batch, "--router-logits", "--temperature", "0.8", "--prompt-limit", "5")
            assert run(*options, out=f"{batch}.npz")[0] == 0
        alone, together = load_trace(tmp_path / "1.npz"), load_trace(tmp_path / "3.npz")
        np.testing.assert_array_equal(together.seq_id, alone.seq_id)
        np.testing.assert_array_equal(together.step, alone.step)
        assert_same(together, alone, tolerance=2e-3)

    def test_recording_does_not_change_tokens(self, run, model: Path, tmp_path: Path):
        assert run("--batch", "1", "--router-logits", "--hidden")[0] == 0
        trace = load_trace(tmp_path / "trace.npz")
        with flashmoe_jax.load(model, device_budget="100%", max_context=64) as engine:
            for number, prompt in enumerate(PROMPTS[:2]):
                pieces = engine.generate(prompt, max_new_tokens=NEW_TOKENS)
                tokens = [piece.token_id for piece in pieces]
                rows = of_prompt(trace, number)
                assert rows.token[rows.phase == DECODE].tolist() == tokens[:-1]

    def test_prompts_are_cut_and_limited(self, run, tmp_path: Path):
        assert run("--max-prompt-tokens", "2", "--prompt-limit", "4")[0] == 0
        trace = load_trace(tmp_path / "trace.npz")
        prefill = trace.seq_id[trace.phase == PREFILL]
        assert set(np.bincount(prefill)) <= {1, 2}
        assert set(prefill) == {0, 1, 2, 3}

    def test_fields_of_jsonl(self, run, tmp_path: Path):
        path = tmp_path / "prompts.jsonl"
        lines = [{"id": "x", "question": text, "other": "a"} for text in PROMPTS[:3]]
        path.write_text("\n".join(map(json.dumps, lines)))
        assert run("--temperature", "0", prompts=path)[0] == 0
        assert run("--prompt-limit", "3", out="plain.npz")[0] == 0
        guessed, plain = load_trace(tmp_path / "trace.npz"), load_trace(tmp_path / "plain.npz")
        assert_same(guessed, plain)
        assert run("--field", "other", prompts=path, out="other.npz")[0] == 0
        other = load_trace(tmp_path / "other.npz")
        assert np.bincount(other.seq_id[other.phase == PREFILL]).tolist() == [1, 1, 1]


class TestInterruption:
    OPTIONS = ("--router-logits",)

    @pytest.fixture
    def interrupted(self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Parts of a run that was stopped while its second batch was under way."""
        write, written = recording.Parts.write, []

        def one_part(self: recording.Parts, number: int, columns: dict[str, np.ndarray]) -> None:
            if written:
                raise KeyboardInterrupt
            written.append(number)
            write(self, number, columns)

        with monkeypatch.context() as patch:
            patch.setattr(recording.Parts, "write", one_part)
            status, out, err = run(*self.OPTIONS)
        assert status == 130
        assert "the same command goes on" in err and not out
        parts = tmp_path / "trace.npz.parts"
        assert len([p for p in parts.iterdir() if p.name.isdecimal()]) == 1
        assert not (tmp_path / "trace.npz").exists()
        return parts

    def test_the_same_command_ends_with_the_same_file(self, interrupted: Path, run, tmp_path: Path):
        status, _, err = run(*self.OPTIONS)
        assert status == 0, err
        assert run(*self.OPTIONS, out="whole.npz")[0] == 0
        assert (tmp_path / "trace.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
        assert not interrupted.exists()

    def test_a_part_that_was_being_written_is_none(self, interrupted: Path, run, tmp_path: Path):
        (interrupted / ".part-x").mkdir()
        (interrupted / ".part-x" / "ids.npy").write_bytes(b"half")
        assert run(*self.OPTIONS)[0] == 0
        assert not interrupted.exists()

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (("--batch", "2", "--router-logits"), "--batch 3 and --batch is 2 now"),
            ((), "--router-logits True"),
            ((*OPTIONS, "--seed", "1"), "--seed 0 and --seed is 1 now"),
            ((*OPTIONS, "--temperature", "0.5"), "--temperature 0"),
            ((*OPTIONS, "--prompt-limit", "5"), "--prompts "),
        ],
    )
    def test_a_changed_command_is_refused(self, interrupted: Path, run, options: tuple[str, ...], named: str):
        status, _, err = run(*options)
        assert status == 2
        assert err.count("\n") == 1
        assert f"was begun with {named}" in err
        assert "repeat the first command" in err

    def test_a_folder_that_is_not_ours_is_left_alone(self, run, tmp_path: Path):
        (tmp_path / "trace.npz.parts").mkdir()
        (tmp_path / "trace.npz.parts" / "mine").write_text("x")
        status, _, err = run()
        assert status == 2 and "was not made by record" in err
        assert (tmp_path / "trace.npz.parts" / "mine").exists()


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("p.csv", "a", (), "neither .txt"),
        ("p.txt", None, (), "cannot be read"),
        ("p.txt", "\n \n", (), "holds no prompt"),
        ("p.txt", b"\xff\xfe", (), "is not UTF-8"),
        ("p.txt", "a", ("--field", "x"), "has no effect"),
        ("p.jsonl", "[1]", (), "line 1 is no JSON object"),
        ("p.jsonl", '{"text": "a"}\n{', (), "line 2 is no JSON"),
        ("p.jsonl", '{"body": "a"}', (), "has none of prompt, text, question, input"),
        ("p.jsonl", '{"text": "a"}\n\n{"text": 3}', (), "line 3: field 'text' holds no text"),
        ("p.txt", "a", ("--batch", "0"), "--batch is 0"),
        ("p.txt", "a", ("--max-new-tokens", "0"), "--max-new-tokens is 0"),
        ("p.txt", "a", ("--max-new-tokens", "256"), "give at most 255"),
        ("p.txt", "once upon a time " * 90, (), "--max-prompt-tokens 250"),
        ("p.txt", "a", ("--temperature", "-1"), "--temperature is -1"),
        ("p.txt", "a", ("--device-budget", "lots"), "is not understood"),
        ("p.txt", "a", ("--device-budget", "2slots"), "a token needs 3"),
        ("p.txt", "a", ("--model", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path: Path, name: str, content, options: tuple[str, ...], message: str):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = run(*options, prompts=path)
    assert status == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "trace.npz").exists()


def test_a_place_that_cannot_be_written_is_refused(run, tmp_path: Path):
    (tmp_path / "there.npz").write_bytes(b"mine")
    assert "exists" in run(out="there.npz")[2]
    assert "does not end in .npz" in run(out="trace")[2]
    assert "cannot be written" in run(out="no/such/folder.npz")[2]
    assert (tmp_path / "there.npz").read_bytes() == b"mine"


def test_a_large_column_is_written_in_pieces(tmp_path: Path):
    """What `join` streams is what `save_trace` writes of a whole trace."""
    random = np.random.default_rng(0)
    hidden = random.standard_normal((7, 2, 5)).astype(np.float16)
    columns = {name: np.zeros(7, np.int32) for name in ("seq_id", "step", "token")}
    trace = Trace(
        ids=np.zeros((7, 2, 1), np.int32), phase=np.zeros(7, np.uint8), meta={"experts": 3}, hidden=hidden, **columns
    )
    save_trace(trace, tmp_path / "whole.npz")
    pieces = recording.Pieces(hidden.shape, iter((hidden[:3], hidden[3:3], hidden[3:])))
    save_trace(trace._replace(hidden=None), tmp_path / "pieces.npz", {"hidden": pieces})
    assert (tmp_path / "whole.npz").read_bytes() == (tmp_path / "pieces.npz").read_bytes()
    shutil.copy(tmp_path / "pieces.npz", tmp_path / "again.npz")
    assert np.array_equal(load_trace(tmp_path / "again.npz").hidden, hidden)
