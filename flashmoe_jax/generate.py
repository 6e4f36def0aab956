"""Generate text: `python -m flashmoe_jax.generate --prompt TEXT`.

Owns the order in which a command is carried out: options, model directory, prompt ids, loading, text. The options'
meaning is in `arguments.py`, a conversation's turns in `conversation.py`, the work in `flashmoe_jax.load` and
`Engine`. Invariant: what can be refused is refused before anything that takes long: JAX, a conversion, loading.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashmoe_jax.arguments import (
    DEFAULT_CHAT_CONTEXT,
    DEFAULT_NEW_TOKENS,
    build_parser,
    check_options,
    choose_sampling,
    read_prompts,
)
from flashmoe_jax.console import INTERRUPTED, StopRequest, guarded, prepare_stdout, say
from flashmoe_jax.conversation import Conversation, converse, first_messages
from flashmoe_jax.errors import ConfigError, PromptError
from flashmoe_jax.output import JsonOutput, StreamOutput, write
from flashmoe_jax.resolve import default_cache_dir, resolve_model
from flashmoe_jax.text import ChatTemplate, GenerationDefaults, SamplingParams, Tokenizer
from flashmoe_jax.text.tokenizer import read_json

if TYPE_CHECKING:
    from flashmoe_jax.engine.engine import Engine

__all__ = ["build_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """The command, once its arguments are parsed; returns the exit code."""
    prepare_stdout()
    texts = read_prompts(args)
    check_options(args, has_prompt=bool(texts))
    _prepare_backend(args)
    front = _Front.of(args, resolve_model(args.model, args.cache_dir))
    return _complete(args, front, texts) if texts else _hold_conversation(args, front)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Front:
    """What a model directory and the options say about text; no weights."""

    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None without --chat
    defaults: GenerationDefaults
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_position: int

    @classmethod
    def of(cls, args: argparse.Namespace, directory: Path) -> "_Front":
        tokenizer = Tokenizer.from_dir(directory)
        defaults = GenerationDefaults.from_dir(directory)
        if defaults.unused:
            say(f"note: generation_config.json also sets {', '.join(defaults.unused)}, which is not followed here")
        template = ChatTemplate.from_dir(directory, tokenizer.special_tokens) if args.chat else None
        stop_ids = set(defaults.eos_token_ids)
        if args.chat:
            if template is None:
                raise PromptError(
                    f"the model has no chat template ({directory} holds neither chat_template.jinja nor one in "
                    "tokenizer_config.json); leave out --chat to continue the prompt as plain text"
                )
            # Chat models end their turn with this one, whatever else ends a text.
            if tokenizer.eos_token_id is not None:
                stop_ids.add(tokenizer.eos_token_id)
        # Another format of the manifest is refused by name when the model is loaded.
        config = read_json(directory / "manifest.json").get("config") or {}
        return cls(
            directory=directory,
            tokenizer=tokenizer,
            template=template,
            defaults=defaults,
            sampling=choose_sampling(args, defaults),
            stop_token_ids=tuple(sorted(stop_ids)),
            max_position=config.get("max_position", sys.maxsize),
        )


def _complete(args: argparse.Namespace, front: _Front, texts: list[str]) -> int:
    """Continues the prompts, as one batch."""
    ids = [_encode(args, front, text) for text in texts]
    longest = max(len(i) for i in ids)
    new_tokens = _new_tokens(args, front, longest)
    with _load(args, front.directory, args.max_context or longest + new_tokens, len(ids)) as engine, _profile(args):
        output = JsonOutput(len(ids)) if args.json else StreamOutput(len(ids))
        pieces = engine.generate(
            ids,
            max_new_tokens=new_tokens,
            sampling=front.sampling,
            stop=args.stop,
            stop_token_ids=front.stop_token_ids,
            ignore_eos=args.ignore_eos,
        )
        try:
            with StopRequest("stopping after this token; Ctrl-C again to leave at once") as stop:
                for piece in pieces:
                    output.add(piece)
                    if stop.is_set:
                        break
        finally:
            output.finish()
        for note in engine.take_notes():
            say(f"note: {note}")
        _save_trace(engine, args.trace)
        if isinstance(output, JsonOutput):
            seed = None if front.sampling.is_greedy else front.sampling.seed
            result = output.result([len(i) for i in ids]) | {"seed": seed} | engine.stats()
            write(json.dumps(result, ensure_ascii=False) + "\n")
        say(engine.summary_line() + _seed_note(args, front.sampling))
        return INTERRUPTED if stop.is_set else 0


def _hold_conversation(args: argparse.Namespace, front: _Front) -> int:
    assert front.template is not None
    context = args.max_context or min(front.max_position, DEFAULT_CHAT_CONTEXT)
    with _load(args, front.directory, context, 1) as engine, _profile(args):
        conversation = Conversation(
            engine,
            front.tokenizer,
            front.template,
            system=args.system,
            variables=args.chat_template_kwargs or {},
            max_new_tokens=args.max_new_tokens or front.defaults.max_new_tokens or DEFAULT_NEW_TOKENS,
            sampling=front.sampling,
            stop=args.stop,
            stop_token_ids=front.stop_token_ids,
            ignore_eos=args.ignore_eos,
        )
        status = converse(conversation)
        _save_trace(engine, args.trace)
        return status


def _profile(args: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Encloses what `--profile` records."""
    if args.profile is None:
        return contextlib.nullcontext()
    import jax

    return jax.profiler.trace(str(args.profile))


def _load(args: argparse.Namespace, directory: Path, context: int, batch_size: int) -> "Engine":
    import flashmoe_jax
    from flashmoe_jax.engine.platform import enable_compilation_cache

    enable_compilation_cache((args.cache_dir or default_cache_dir()) / "compiled")
    engine = flashmoe_jax.load(
        directory,
        device_budget=args.device_budget,
        memory_limit=args.memory_limit,
        host_budget=args.host_budget,
        policy=args.policy,
        policy_trace=args.policy_trace,
        guard=None if args.guard is None else args.guard == "on",
        reader=args.reader,
        prefetch=args.prefetch,
        max_context=context,
        batch_size=batch_size,
        record_trace=args.trace is not None,
    )
    say(engine.plan_line())
    return engine


def _prepare_backend(args: argparse.Namespace) -> None:
    """Sets what JAX reads when it starts, and checks the options whose rules live beside JAX code."""
    from flashmoe_jax.engine.budget import Budget, parse_size
    from flashmoe_jax.engine.platform import configure_backend
    from flashmoe_jax.policy import check_policy_name

    if args.device_budget is not None:
        Budget.parse(args.device_budget)
    if args.memory_limit is not None:
        parse_size(args.memory_limit)
    if args.host_budget is not None:
        parse_size(args.host_budget)
    check_policy_name(args.policy)
    configure_backend(args.device_budget)


def _encode(args: argparse.Namespace, front: _Front, text: str) -> list[int]:
    if front.template is None:
        return front.tokenizer.encode(text)
    messages = [*first_messages(args.system), {"role": "user", "content": text}]
    # The template writes the special tokens itself.
    return front.tokenizer.encode(front.template.render(messages, args.chat_template_kwargs), add_special=False)


def _new_tokens(args: argparse.Namespace, front: _Front, longest: int) -> int:
    """How many tokens to ask for, so that prompt and output fit the context."""
    limit = min(args.max_context or sys.maxsize, front.max_position)
    if longest == 0:
        raise PromptError("the prompt has no tokens; give other text")
    if longest >= limit:
        raise PromptError(
            f"the prompt has {longest} tokens and prompt and output together may have {limit}; shorten the prompt"
            + (" or give a larger --max-context" if limit < front.max_position else "")
        )
    if args.max_new_tokens is None:
        return min(front.defaults.max_new_tokens or DEFAULT_NEW_TOKENS, limit - longest)
    if longest + args.max_new_tokens > limit:
        raise PromptError(
            f"{longest} prompt tokens and {args.max_new_tokens} new ones exceed the context of {limit}; "
            f"give --max-new-tokens {limit - longest} or fewer"
            + (", or a larger --max-context" if limit < front.max_position else "")
        )
    return args.max_new_tokens


def _seed_note(args: argparse.Namespace, sampling: SamplingParams) -> str:
    return "" if sampling.is_greedy or args.seed is not None else f", seed {sampling.seed}"


def _save_trace(engine: "Engine", path: Path | None) -> None:
    if path is None:
        return
    try:
        engine.save_trace(path)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror}; choose another place") from error


if __name__ == "__main__":
    sys.exit(main())
