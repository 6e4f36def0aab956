"""The command `flashmoe`: one name for the programs that can also be started with `python -m`.

Owns the list of subcommands, nothing of what they do. Invariant: only the chosen program is imported, so that help
costs nothing.
"""

import importlib
import sys
from collections.abc import Sequence

import flashmoe_jax
from flashmoe_jax.console import BAD_INPUT, say

# Name to (module with a `main(argv) -> int`, what it does).
COMMANDS = {
    "generate": ("flashmoe_jax.generate", "generate text, or hold a conversation"),
    "convert": ("checkpoints.convert", "make a model directory of a Hugging Face directory or an orbax checkpoint"),
    "verify": ("checkpoints.verify", "read every byte of a model directory and name each damaged expert"),
    "export": ("checkpoints.export", "write safetensors of a model directory"),
    "probe": ("flashmoe_jax.probe.__main__", "measure this machine, predict tokens/s of a model, recommend a budget"),
    "train-policy": ("train_policy.__main__", "train an eviction policy on recorded traces"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<14}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: flashmoe COMMAND [OPTIONS]",
            "",
            "Exact inference of Mixture-of-Experts language models larger than memory.",
            "",
            *lines,
            "",
            "flashmoe COMMAND --help lists the options of a command; flashmoe --version prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"flashmoe {flashmoe_jax.__version__}")
        return 0
    if name not in COMMANDS:
        given = f"{name!r} is no command" if name else "no command is given"
        say(f"error: {given}; commands: {', '.join(COMMANDS)} (see flashmoe --help)")
        return BAD_INPUT
    module = importlib.import_module(COMMANDS[name][0])
    return module.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
