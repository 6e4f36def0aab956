"""The options of `flashmoe generate`: how they are written, what they mean together, which are refused.

Owns everything about them that needs no model. Imports no JAX, so that help and mistakes are answered at once.
Invariant: an option that would have no effect is refused, or named in a note where refusing would be in the way.
"""

import argparse
import dataclasses
import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from flashmoe_jax.config import PrefetchMode, ReaderName
from flashmoe_jax.console import OneLineParser, say
from flashmoe_jax.errors import ConfigError, PromptError
from flashmoe_jax.resolve import CACHE_VARIABLE
from flashmoe_jax.text import GenerationDefaults, SamplingParams, StopScanner

DEFAULT_NEW_TOKENS = 256
DEFAULT_CHAT_CONTEXT = 4096
PRESETS = {"paper": {"policy": "paper", "guard": "off", "prefetch": "off"}}
_FILTERS = ("top_p", "top_k", "min_p")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="flashmoe generate",
        description="Generate text with a Mixture-of-Experts model whose experts stay on the drive.",
        epilog="Text goes to stdout as it is made, everything else to stderr. Sizes are written 512MiB, 4GiB or 1.5GB.",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="DIR|HUB_NAME",
        help="model directory, Hugging Face directory or hub name (org/name[@revision]); the last two are converted on "
        "first use (default: the bundled demo model)",
    )
    model.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help=f"where converted models are kept (default: ${CACHE_VARIABLE}, else the user's cache directory)",
    )
    prompt = parser.add_argument_group("prompt (several make a batch)")
    prompt.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="read one prompt from stdin")
    prompt.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable; - reads stdin")
    prompt.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 text, one prompt per file, without its last line break; repeatable; - reads stdin",
    )
    prompt.add_argument(
        "--chat",
        action="store_true",
        help="put each prompt through the model's chat template; without a prompt, hold a conversation "
        "(/reset starts over, /exit leaves)",
    )
    prompt.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    prompt.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="""variables for the chat template, e.g. '{"enable_thinking": false}', with --chat""",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--max-new-tokens",
        type=_positive,
        metavar="N",
        help="tokens per prompt or answer at most (default: generation_config.json, else "
        f"{DEFAULT_NEW_TOKENS}, or what the context leaves)",
    )
    output.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    output.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-text tokens")
    output.add_argument("--json", action="store_true", help="print one JSON object with text, ids and counters")
    output.add_argument(
        "--profile", type=Path, metavar="DIR", help="write a trace for TensorBoard or Perfetto there, by JAX's profiler"
    )
    output.add_argument("--trace", type=Path, metavar="FILE.npz", help="record which experts every token chose")
    sampling = parser.add_argument_group("sampling (defaults: generation_config.json; greedy unless it sets do_sample)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 takes the most probable token")
    sampling.add_argument("--top-p", type=float, metavar="P", help="fewest tokens that reach this probability")
    sampling.add_argument("--top-k", type=int, metavar="K", help="the K most probable tokens, 0 for all")
    sampling.add_argument("--min-p", type=float, metavar="P", help="tokens of at least this share of the most probable")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", help="on tokens seen so far, 1 is none")
    sampling.add_argument("--presence-penalty", type=float, metavar="X", help="on tokens of the output, 0 is none")
    sampling.add_argument("--seed", type=int, metavar="N", help="of the random choice (default: drawn, and reported)")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--device-budget",
        metavar="B",
        help="25%% or 16slots: expert slots per layer; 4GiB: everything on the device (default: all free, less 5%%)",
    )
    memory.add_argument("--memory-limit", metavar="SIZE", help="the whole process, on the CPU backend")
    memory.add_argument(
        "--host-budget", metavar="SIZE", help="on a GPU: host memory for experts that leave the slots (default: none)"
    )
    memory.add_argument(
        "--max-context",
        type=_positive,
        metavar="N",
        help="tokens of prompt and output together (default: what the prompts need; for a conversation up to "
        f"{DEFAULT_CHAT_CONTEXT})",
    )
    memory.add_argument(
        "--policy",
        metavar="NAME|DIR",
        help="which expert leaves when a slot is needed: auto (the model's own learned policy, else shared), context, "
        "paper, shared, lru, lfu, lfru, decayed, static, or a folder that the training command wrote (default: auto)",
    )
    memory.add_argument(
        "--prefetch",
        choices=[str(mode) for mode in PrefetchMode],
        help="read ahead what the next layer may miss: auto, where the drive would be idle and the guess is good; "
        "on, all that is guessed; off (default: auto)",
    )
    memory.add_argument(
        "--reader",
        choices=[str(name) for name in ReaderName],
        default="auto",
        help="how records are read: array (through the tensorstore array), range (byte ranges of its files), direct "
        "(preadv into the slot), auto (the fastest when the model is loaded) (default: %(default)s)",
    )
    memory.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        help="paper: FlashMoE as its paper describes it, the policy paper, no guard, no prefetch",
    )
    memory.add_argument(
        "--policy-trace", type=Path, metavar="FILE.npz", help="trace whose popular experts static keeps"
    )
    memory.add_argument(
        "--guard",
        choices=["on", "off"],
        help="whether a learned policy falls back to decayed in a layer where it reads more (default: on)",
    )
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Texts of all prompts, in the order --prompt, --prompt-file, stdin.

    Raises:
        PromptError: nothing to read, nothing in it, or no UTF-8.
    """
    sources = [("text", text) if text != "-" else ("stdin", "-") for text in args.prompt]
    sources += [("file", name) if name != "-" else ("stdin", "-") for name in args.prompt_file]
    sources += [("stdin", "-")] * (args.stdin is not None)
    if sum(kind == "stdin" for kind, _ in sources) > 1:
        raise PromptError("stdin is asked for more than once; it holds one prompt")
    prompts = []
    for kind, value in sources:
        if kind == "text":
            name, text = "the prompt", value
        else:
            name, text = _read_text(value)
        if not text:
            raise PromptError(f"{name} is empty; give at least one character")
        prompts.append(text)
    if not prompts and not args.chat:
        raise PromptError(
            "no prompt; give --prompt TEXT, --prompt-file FILE or - for stdin, or --chat for a conversation"
        )
    return prompts


def _read_text(name: str) -> tuple[str, str]:
    """What a file or stdin (-) is called in messages, and its text without the last line break."""
    shown = "stdin" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise PromptError(f"{shown} cannot be read: {error.strerror}; give a file of UTF-8 text") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{shown} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it, e.g. with iconv"
        ) from error
    return shown, text.removesuffix("\n").removesuffix("\r")


def check_options(args: argparse.Namespace, has_prompt: bool) -> None:
    """Refuses what can be refused without a model, and fills in presets.

    Raises:
        FlashMoEError: a value out of range, options that contradict each other or have no effect, a missing or
            unwritable file.
    """
    if not args.chat:
        for name in ("system", "chat_template_kwargs"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{flag_of(name)} has no effect without --chat; add it or leave {flag_of(name)} out")
    elif not has_prompt and args.json:
        raise ConfigError("--json needs a prompt; a conversation prints text only")
    for field in dataclasses.fields(SamplingParams):
        value = getattr(args, field.name)
        if value is not None:
            try:
                SamplingParams(**{field.name: value})
            except ConfigError as error:
                raise ConfigError(str(error).replace(field.name, flag_of(field.name), 1)) from None
    StopScanner(args.stop)
    if args.preset is not None:
        for name, value in PRESETS[args.preset].items():
            if getattr(args, name) not in (None, value):
                raise ConfigError(
                    f"{flag_of(name)} {getattr(args, name)} contradicts --preset {args.preset}, which sets "
                    f"{flag_of(name)} {value}; leave one of them out"
                )
            setattr(args, name, value)
    if args.policy is None:
        args.policy = "auto"
    if args.prefetch is None:
        args.prefetch = str(PrefetchMode.AUTO)
    if args.policy_trace is not None:
        if args.policy != "static":
            raise ConfigError(f"--policy-trace has no effect with --policy {args.policy}; use --policy static")
        if not args.policy_trace.is_file():
            raise ConfigError(f"--policy-trace {args.policy_trace} does not exist; record one with --trace FILE.npz")
    if args.trace is not None:
        check_writable(args.trace)
    if args.profile is not None:
        _make_folder(args.profile)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be made: {error.strerror}; choose another place") from error


def check_writable(path: Path) -> None:
    """Raises ConfigError unless a file can be made at `path`; leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"--trace {path} is a directory; give a file name")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror}; choose another place") from error


def choose_sampling(args: argparse.Namespace, defaults: GenerationDefaults) -> SamplingParams:
    """Parameters from the options and, where an option is absent, from the model's defaults.

    Raises:
        ConfigError: a filter is given, and neither the options nor the model ask for sampling.
    """
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(SamplingParams)
        if getattr(args, field.name) is not None
    }
    if given.get("temperature", 1 if defaults.do_sample else 0) > 0:
        return dataclasses.replace(defaults.sampling, **{"seed": secrets.randbits(32), **given})
    plain = SamplingParams()
    idle = [name for name in (*_FILTERS, "seed") if name in given and given[name] != getattr(plain, name)]
    if idle:
        flags = ", ".join(map(flag_of, idle))
        if "temperature" not in given and idle != ["seed"]:
            raise ConfigError(
                f"{flags} would have no effect, as this model is greedy by default; add --temperature, e.g. 0.7"
            )
        say(f"note: {flags} has no effect at temperature 0")
    penalty = given.get("repetition_penalty", defaults.sampling.repetition_penalty)
    return SamplingParams(repetition_penalty=penalty, presence_penalty=given.get("presence_penalty", 0.0))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object, e.g. {"enable_thinking": false}')
    return value
