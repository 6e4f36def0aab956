import sys
import types

import pytest

import flashmoe_jax
from flashmoe_jax import cli


def test_version(capsys: pytest.CaptureFixture):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flashmoe {flashmoe_jax.__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(flag: str, capsys: pytest.CaptureFixture):
    assert cli.main([flag]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize(("argv", "given"), [(["talk"], "'talk' is no command"), ([], "no command is given")])
def test_an_unknown_command_is_one_line(argv: list[str], given: str, capsys: pytest.CaptureFixture):
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"error: {given}; commands: generate, convert, verify, export, probe, train-policy (see flashmoe --help)\n"
    )


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_commands_get_the_rest_of_the_arguments(name: str, monkeypatch: pytest.MonkeyPatch):
    seen = []
    module = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 7)
    monkeypatch.setitem(sys.modules, cli.COMMANDS[name][0], module)
    assert cli.main([name, "--x", "1"]) == 7
    assert seen == [["--x", "1"]]


@pytest.mark.parametrize("name", ["generate", "convert", "verify", "export", "probe"])
def test_commands_exist(name: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([name, "--help"])
    assert exit_info.value.code == 0
    assert "usage: " in capsys.readouterr().out
