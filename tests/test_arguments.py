import io
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_jax.arguments import build_parser, check_options, choose_sampling, read_prompts
from flashmoe_jax.errors import FlashMoEError
from flashmoe_jax.text import GenerationDefaults, SamplingParams

QWEN3 = GenerationDefaults(
    do_sample=True, sampling=SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
)
GREEDY = GenerationDefaults(sampling=SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1))


def parse(*options: str):
    return build_parser().parse_args(options)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def test_prompts_come_in_order(tmp_path: Path, stdin):
    stdin(b"from the pipe\n\n")
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffperché\r\n".encode())
    args = parse("--prompt-file", str(file), "--prompt", "a", "--prompt", "b\n", "-")
    assert read_prompts(args) == ["a", "b\n", "perché", "from the pipe\n"]


@pytest.mark.parametrize("options", [["-"], ["--prompt", "-"], ["--prompt-file", "-"]])
def test_a_dash_is_stdin(options: list[str], stdin):
    stdin(b"x\n")
    assert read_prompts(parse(*options)) == ["x"]


def test_a_conversation_needs_no_prompt():
    assert read_prompts(parse("--chat")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompt; give --prompt TEXT"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "empty"], "empty is empty"),
        (["--prompt-file", "missing"], "missing cannot be read: No such file"),
        (["--prompt-file", "."], r"\. cannot be read: Is a directory"),
        (["--prompt-file", "latin1"], r"latin1 is not UTF-8 \(byte 4 is 0xe9\)"),
        (["-", "--prompt", "-"], "stdin is asked for more than once"),
        (["-"], "stdin is empty"),
    ],
)
def test_prompts_that_cannot_be_used(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin
):
    stdin(b"\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1").write_bytes("perché".encode("latin-1")[1:])
    (tmp_path / "empty").write_bytes(b"\n")
    with pytest.raises(FlashMoEError, match=message):
        read_prompts(parse(*options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "x"], "--system has no effect without --chat"),
        (["--chat-template-kwargs", "{}"], "--chat-template-kwargs has no effect without --chat"),
        (["--top-p", "0"], "--top-p is 0.0; it must be above 0"),
        (["--top-k", "-1"], "--top-k is -1"),
        (["--min-p", "1.5"], "--min-p is 1.5"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--repetition-penalty", "0"], "--repetition-penalty is 0.0"),
        (["--presence-penalty", "inf"], "--presence-penalty is inf"),
        (["--seed", "-3"], "--seed is -3"),
        (["--stop", ""], "a stop string is empty"),
        (["--policy-trace", "t.npz"], "--policy-trace has no effect with --policy auto"),
        (
            ["--preset", "paper", "--policy", "lru"],
            "--policy lru contradicts --preset paper, which sets --policy paper",
        ),
        (["--preset", "paper", "--guard", "on"], "--guard on contradicts --preset paper, which sets --guard off"),
        (["--policy", "static", "--policy-trace", "t.npz"], "t.npz does not exist"),
        (["--trace", "."], r"--trace \. is a directory"),
        (["--trace", "no/such/t.npz"], "no/such/t.npz cannot be written: No such file"),
    ],
)
def test_options_that_are_refused(options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlashMoEError, match=message):
        check_options(parse(*options), has_prompt=True)


def test_a_preset_fills_in_options_and_auto_is_the_policy_without_one():
    preset, plain = parse("--preset", "paper"), parse()
    for args in (preset, plain):
        check_options(args, has_prompt=True)
    assert (preset.policy, preset.guard, preset.prefetch) == ("paper", "off", "off")
    assert (plain.prefetch, plain.reader) == ("auto", "auto")
    assert (plain.policy, plain.guard) == ("auto", None)


def test_a_conversation_prints_no_json():
    with pytest.raises(FlashMoEError, match="--json needs a prompt"):
        check_options(parse("--chat", "--json"), has_prompt=False)


def test_checking_a_trace_file_leaves_nothing_behind(tmp_path: Path):
    check_options(parse("--trace", str(tmp_path / "t.npz")), has_prompt=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--max-new-tokens", "0"],
        ["--max-context", "x"],
        ["--chat-template-kwargs", "[1]"],
        ["--chat-template-kwargs", "{"],
        ["--top-k", "1.5"],
        ["--no-such-option"],
        ["text without --prompt"],
    ],
)
def test_what_cannot_be_parsed_is_one_line(options: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_info:
        parse(*options)
    assert exit_info.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "defaults", "expected"),
    [
        ([], GREEDY, SamplingParams(repetition_penalty=1.1)),
        (["--repetition-penalty", "1", "--presence-penalty", "2"], GREEDY, SamplingParams(presence_penalty=2)),
        (
            ["--temperature", "0.5", "--seed", "3"],
            GREEDY,
            SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.1, seed=3),
        ),
        (["--temperature", "0"], QWEN3, SamplingParams(repetition_penalty=1.1)),
        (
            ["--top-p", "0.5", "--seed", "4"],
            QWEN3,
            SamplingParams(temperature=0.6, top_p=0.5, top_k=20, repetition_penalty=1.1, seed=4),
        ),
    ],
)
def test_options_come_before_the_models_defaults(
    options: list[str], defaults: GenerationDefaults, expected: SamplingParams
):
    assert choose_sampling(parse(*options), defaults) == expected


def test_a_seed_is_drawn():
    seeds = {choose_sampling(parse(), QWEN3).seed for _ in range(4)}
    assert len(seeds) > 1


def test_filters_that_would_do_nothing(capsys: pytest.CaptureFixture):
    with pytest.raises(FlashMoEError, match=r"--top-p, --top-k would have no effect.*add --temperature"):
        choose_sampling(parse("--top-p", "0.9", "--top-k", "5"), GREEDY)
    assert choose_sampling(parse("--top-p", "0.9", "--temperature", "0"), QWEN3).is_greedy
    assert choose_sampling(parse("--seed", "1"), GREEDY).is_greedy
    assert choose_sampling(parse("--top-p", "1", "--top-k", "0"), GREEDY).is_greedy
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"note: {flag} has no effect at temperature 0" for flag in ("--top-p", "--seed")]


def test_options_are_checked_without_jax():
    code = (
        "import sys, flashmoe_jax.generate as g\n"
        "assert g.main(['--prompt', 'x', '--top-p', '0']) == 2\n"
        "sys.exit('jax' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
