"""The command from end to end, on a tiny model with a tokenizer of its own."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_tokenizers

from checkpoints.convert import convert
from flashmoe_jax import conversation, generate, output
from flashmoe_jax.engine import engine as engine_module
from flashmoe_jax.engine import platform
from flashmoe_jax.engine.generation import Piece
from flashmoe_jax.telemetry.trace import load_trace
from flashmoe_jax.text import ChatTemplate, Tokenizer

PROMPT = "Once upon a time"
# Short turns, and one context for all runs that can share it: every other shape compiles for seconds.
CHAT = (
    "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)
CONTEXT = ("--max-context", "64")


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    backend = tiny_tokenizers.byte_level()
    config = tiny_models.tiny_hf_config("olmoe", vocab_size=backend.get_vocab_size(), eos_token_id=None)
    tiny_models.write_hf_checkpoint(directory, config)
    return tiny_tokenizers.write_dir(directory, backend, chat_template=CHAT)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is a setting of the whole process and would outlive the folder it is in."""
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda directory: None)


@pytest.fixture
def run(hf_dir: Path, cache_dir: Path, capsys: pytest.CaptureFixture):
    """Runs the command; returns exit code, stdout and stderr."""

    def run(*options: str, model: Path = hf_dir, budget: str = "3slots") -> tuple[int, str, str]:
        base = ["--model", str(model), "--cache-dir", str(cache_dir), "--device-budget", budget]
        status = generate.main([*base, *options])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


@pytest.fixture
def run_json(run):
    def run_json(*options: str, **others: Any) -> dict[str, Any]:
        status, out, err = run("--json", *options, **others)
        assert status == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return run_json


def test_text_streams_to_stdout_and_the_rest_to_stderr(run, run_json):
    status, out, err = run("--prompt", PROMPT, "--max-new-tokens", "12")
    assert status == 0
    assert "3 of 5 experts per layer in slots" in err
    assert "TTFT" in err
    assert "read" in err
    result = run_json("--prompt", PROMPT, "--max-new-tokens", "12")
    assert out == result["text"] + "\n"
    assert len(result["token_ids"]) == 12
    assert result["finish_reason"] == "length"
    assert result["seed"] is None
    assert result["prompt_tokens"] > 0
    assert result["accesses"] == result["hits"] + result["misses"]
    assert result["slots_per_layer"] == 3


def test_budget_and_policy_do_not_change_tokens(run_json):
    options = ("--prompt", PROMPT, "--max-new-tokens", "12")
    first = run_json(*options, "--policy", "lru")
    second = run_json(*options, "--policy", "lfu", budget="100%")
    assert first["token_ids"] == second["token_ids"]
    assert (first["policy"], second["policy"]) == ("lru", "lfu")


@pytest.mark.parametrize("options", [("--reader", "array"), ("--reader", "direct", "--prefetch", "on")])
def test_reader_and_prefetch_do_not_change_tokens(options: tuple[str, ...], run_json):
    plain = run_json("--prompt", PROMPT, "--max-new-tokens", "8", "--prefetch", "off", *CONTEXT)
    other = run_json("--prompt", PROMPT, "--max-new-tokens", "8", *options, *CONTEXT)
    assert other["token_ids"] == plain["token_ids"]
    assert (other["reader"], plain["prefetch"]) == (options[1], "off")
    assert other["accesses"] == plain["accesses"] and other["evictions"] == plain["evictions"]
    assert set(other["shares"]) == {"stall", "compute", "host"}


def test_a_profile_is_written(run, tmp_path: Path):
    status, _, _ = run("--prompt", PROMPT, "--max-new-tokens", "3", "--profile", str(tmp_path / "p"), *CONTEXT)
    assert status == 0
    assert list((tmp_path / "p").rglob("*.xplane.pb"))


def test_a_batch_gives_lists(run_json):
    prompts = [PROMPT, "è", "def add(a, b):"]
    options = [o for p in prompts for o in ("--prompt", p)]
    batch = run_json(*options, "--max-new-tokens", "6", "--temperature", "1", "--seed", "5")
    alone = [run_json("--prompt", p, "--max-new-tokens", "6", "--temperature", "1", "--seed", "5") for p in prompts]
    for name in ("text", "token_ids", "prompt_tokens", "finish_reason"):
        assert batch[name] == [result[name] for result in alone]


def test_sampling_is_repeated_by_its_seed(run, run_json):
    options = ("--prompt", PROMPT, "--max-new-tokens", "8", "--temperature", "1.5", "--top-p", "0.95")
    first = run_json(*options)
    again = run_json(*options, "--seed", str(first["seed"]))
    assert first["token_ids"] == again["token_ids"]
    other = run_json(*options, "--seed", str(first["seed"] ^ 1))
    assert first["token_ids"] != other["token_ids"]
    assert ", seed " in run(*options)[2]


def test_stop_strings_and_end_ids(run_json, hf_dir: Path, cache_dir: Path, tmp_path: Path):
    whole = run_json("--prompt", PROMPT, "--max-new-tokens", "16")
    middle = whole["text"][len(whole["text"]) // 2 :][:2]
    cut = run_json("--prompt", PROMPT, "--max-new-tokens", "16", "--stop", "never said", "--stop", middle)
    assert cut["text"] == whole["text"][: whole["text"].index(middle)]
    assert cut["finish_reason"] == "stop"
    # The same model with one of its words as the end of text.
    ends = tmp_path / "ends"
    ends.mkdir()
    for path in hf_dir.iterdir():
        (ends / path.name).write_bytes(path.read_bytes())
    end = whole["token_ids"][5]
    (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "num_beams": 2}))
    options = ("--prompt", PROMPT, "--max-new-tokens", "16")
    first = whole["token_ids"].index(end)
    ended = run_json(*options, model=ends)
    assert ended["token_ids"] == whole["token_ids"][: first + 1]
    assert ended["finish_reason"] == "stop"
    assert run_json(*options, "--ignore-eos", model=ends)["token_ids"] == whole["token_ids"]


def test_what_generation_config_asks_beyond_us_is_named(run, hf_dir: Path, tmp_path: Path):
    for path in hf_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 2, "max_new_tokens": 3}))
    status, out, err = run("--prompt", PROMPT, "--json", model=tmp_path)
    assert status == 0
    assert len(json.loads(out)["token_ids"]) == 3
    assert "note: generation_config.json also sets num_beams" in err


def test_chat_uses_the_template(run_json, hf_dir: Path):
    options = ("--max-new-tokens", "6")
    chat = run_json("--chat", "--system", "Ok", "--prompt", "Ciao", *options)
    text = "<s>sOk</s><s>uCiao</s><s>a"
    assert chat["token_ids"] == run_json("--prompt", text, *options)["token_ids"]
    assert chat["prompt_tokens"] == len(Tokenizer.from_dir(hf_dir).encode(text))


def test_a_trace_of_everything_is_written(run, run_json, tmp_path: Path):
    path = tmp_path / "trace.npz"
    status, out, _ = run("--prompt", PROMPT, "--max-new-tokens", "5", "--json", "--trace", str(path))
    assert status == 0
    result = json.loads(out)
    trace = load_trace(path)
    assert trace.ids.shape == (result["prompt_tokens"] + 4, 3, 3)  # the last token is never put in
    assert [p.name for p in tmp_path.iterdir()] == ["trace.npz"]
    static = run_json("--prompt", PROMPT, "--max-new-tokens", "5", "--policy", "static", "--policy-trace", str(path))
    assert static["token_ids"] == result["token_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", PROMPT, "--policy", "best"], "policy 'best' is unknown; choose one of auto"),
        (["--prompt", PROMPT, "--memory-limit", "lots"], "size 'lots' is not understood"),
        (["--prompt", PROMPT, "--device-budget", "200%"], "budget 200% is out of range"),
        (["--prompt", PROMPT, "--device-budget", "1slots"], "give at least"),
        (["--prompt", PROMPT, "--max-new-tokens", "300"], "give --max-new-tokens 252 or fewer"),
        (["--prompt", PROMPT, "--max-context", "9", "--max-new-tokens", "9"], "or a larger --max-context"),
        (["--prompt", PROMPT, "--max-context", "999"], "allow 1 to 256"),
        (["--prompt", PROMPT * 70], "prompt and output together may have 256; shorten the prompt"),
        (["--chat", "--max-context", "999"], "allow 1 to 256"),
        (["--prompt", PROMPT, "--model", "/no/such/model"], "/no/such/model does not exist"),
        (["--prompt", "x", "--chat", "--chat-template-kwargs", '{"messages": []}'], "'messages' is set by us"),
    ],
)
def test_bad_input_is_one_clear_line(options: list[str], message: str, run):
    status, out, err = run(*options)
    assert status == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("tokenizer.json", [], "no tokenizer: "),
        ("tokenizer_config.json", ["--chat"], "the model has no chat template"),
    ],
)
def test_models_without_text_files(missing: str, options: list[str], message: str, run, hf_dir: Path, tmp_path: Path):
    for path in hf_dir.iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    status, out, err = run("--prompt", PROMPT, *options, model=tmp_path)
    assert status == 2
    assert out == ""
    assert f"error: {message}" in err


def converted(hf_dir: Path, target: Path) -> Path:
    convert(hf_dir, target)
    return target


def test_a_damaged_expert_is_named(run, hf_dir: Path, tmp_path: Path):
    directory = converted(hf_dir, tmp_path / "model")
    for shard in (directory / "experts.zarr" / "c" / "1").rglob("*"):
        if shard.is_file():
            data = bytearray(shard.read_bytes())
            for start in range(0, 5 * 4096, 4096):
                data[start] ^= 1
            shard.write_bytes(data)
    status, out, err = run("--prompt", PROMPT, "--max-new-tokens", "4", model=directory)
    assert status == 2
    assert out.strip() == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.search(r"layer 1\b.*expert \d", line)


def test_a_newer_format_is_refused_by_name(run, hf_dir: Path, tmp_path: Path):
    directory = converted(hf_dir, tmp_path / "model")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["format_version"] = 99
    (directory / "manifest.json").write_text(json.dumps(manifest))
    status, out, err = run("--prompt", PROMPT, "--max-new-tokens", "4", model=directory)
    assert (status, out) == (2, "")
    assert "has format 99" in err


def test_a_batch_is_shown_one_after_the_other(capsys: pytest.CaptureFixture):
    stream = output.StreamOutput(3)
    for sequence, text, reason in [(1, "b", None), (0, "a", None), (2, "c", "stop"), (0, "A", "stop")]:
        stream.add(Piece(sequence, 7, text, reason))
    assert capsys.readouterr().out == "[1/3]\naA\n[2/3]\nb"
    stream.add(Piece(1, 7, "B"))
    stream.finish()
    assert capsys.readouterr().out == "B\n[3/3]\nc\n"


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while the n-th piece of text is written."""

    def interrupt_after(num_pieces: int, times: int = 1) -> None:
        num_written = 0

        def write(text: str) -> None:
            nonlocal num_written
            sys.stdout.write(text)
            num_written += 1
            if num_written == num_pieces:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(output, "write", write)
        monkeypatch.setattr(conversation, "write", write)

    return interrupt_after


def test_an_interrupt_ends_cleanly_and_keeps_the_text(run, run_json, interrupt_after, tmp_path: Path):
    whole = run_json("--prompt", PROMPT, "--max-new-tokens", "30")["text"]
    interrupt_after(4)
    path = tmp_path / "t.npz"
    status, out, err = run("--prompt", PROMPT, "--max-new-tokens", "30", "--trace", str(path))
    assert status == 130
    assert out.endswith("\n")
    assert whole.startswith(out[:-1])
    assert 0 < len(out[:-1]) < len(whole)
    assert "TTFT" in err
    assert path.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupt_leaves_at_once(run, interrupt_after):
    interrupt_after(4, times=2)
    status, out, err = run("--prompt", PROMPT, "--max-new-tokens", "30")
    assert status == 130
    assert out.endswith("\n")
    assert err.endswith("interrupted\n")


def test_a_closed_pipe_ends_quietly(run, monkeypatch: pytest.MonkeyPatch):
    def write(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(output, "write", write)
    status, _, err = run("--prompt", PROMPT, "--max-new-tokens", "30")
    assert status == 141
    assert "error" not in err


class Spy:
    """What the conversation asked of the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.fed: list[list[int]] = []
        self.token_ids: list[list[int]] = []
        plain = engine_module.Engine.generate

        def generate(engine: engine_module.Engine, prompts: list[list[int]], **options: Any):
            self.fed.append(list(prompts[0]))
            self.token_ids.append([])
            for piece in plain(engine, prompts, **options):
                self.token_ids[-1].append(piece.token_id)
                yield piece

        monkeypatch.setattr(engine_module.Engine, "generate", generate)


@pytest.fixture
def talk(run, monkeypatch: pytest.MonkeyPatch):
    def talk(*lines: str, options: tuple[str, ...] = ("--max-new-tokens", "8")) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("--chat", *CONTEXT, *options)

    return talk


def test_a_conversation_keeps_its_cache(talk, run_json, hf_dir: Path, monkeypatch: pytest.MonkeyPatch):
    spy = Spy(monkeypatch)
    status, out, err = talk("Ciao", "", "E poi?", "/exit", "never reached")
    assert status == 0
    assert err.count("> ") == 4
    tokenizer = Tokenizer.from_dir(hf_dir)
    template = ChatTemplate({"default": CHAT})
    answers = []
    for fed, token_ids in zip(spy.fed, spy.token_ids, strict=True):
        stream = tokenizer.stream()
        answers.append("".join([*(stream.push(t) for t in token_ids), stream.finish()]))
        assert fed
    assert out == "".join(f"{a}\n" for a in answers)
    # The second turn is answered as if the whole conversation were put afresh, but only its end is computed.
    messages = [
        {"role": "user", "content": "Ciao"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "E poi?"},
    ]
    text = template.render(messages)
    afresh = run_json("--prompt", text, *CONTEXT, "--max-new-tokens", "8")
    assert spy.token_ids[1] == afresh["token_ids"]
    assert len(spy.fed[1]) < len(tokenizer.encode(text))
    assert tokenizer.encode(text)[-len(spy.fed[1]) :] == spy.fed[1]


def test_reset_forgets(talk, monkeypatch: pytest.MonkeyPatch):
    spy = Spy(monkeypatch)
    status, _, err = talk("Ciao", "/reset", "Ciao")
    assert status == 0
    assert "the conversation starts over" in err
    assert spy.fed[0] == spy.fed[1]
    assert spy.token_ids[0] == spy.token_ids[1]


def test_each_answer_is_drawn_anew(talk, monkeypatch: pytest.MonkeyPatch):
    spy = Spy(monkeypatch)
    options = ("--max-new-tokens", "8", "--temperature", "2", "--seed", "3")
    talk("Ciao", "/reset", "Ciao", options=options)
    talk("Ciao", options=options)
    assert spy.token_ids[0] != spy.token_ids[1]
    assert spy.token_ids[0] == spy.token_ids[2]


def test_a_full_context_does_not_end_the_conversation(talk):
    options = ("--max-new-tokens", "8", "--max-context", "40")
    status, out, err = talk("Ciao", "a long message " * 9, "/reset", "Ciao", options=options)
    assert status == 0
    assert "the context holds 40; /reset starts over" in err
    first, second = out.split("\n")[0], out.split("\n")[-2]
    assert first
    assert first == second


def test_an_interrupt_stops_the_answer_only(talk, interrupt_after, monkeypatch: pytest.MonkeyPatch):
    spy = Spy(monkeypatch)
    interrupt_after(3)
    status, _, _ = talk("Ciao", "E poi?", options=("--max-new-tokens", "20"))
    assert status == 0
    assert len(spy.token_ids[0]) < 20
    assert len(spy.token_ids[1]) == 20


def test_two_interrupts_leave_the_conversation(talk, interrupt_after):
    interrupt_after(3, times=2)
    assert talk("Ciao", "E poi?", options=("--max-new-tokens", "20"))[0] == 130
