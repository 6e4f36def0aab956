"""Chat messages to prompt text, by the template that the model brings along.

Owns the finding and the rendering of Jinja chat templates, with the semantics of transformers' `apply_chat_template`.
Does not encode. Invariant: a template is untrusted code, so it runs in Jinja's immutable sandbox and sees nothing but
strings, numbers, lists and dictionaries.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from flashmoe_jax.errors import CheckpointError, PromptError
from flashmoe_jax.text.tokenizer import read_json

Message = Mapping[str, Any]

# Under which names a message may carry its reasoning; templates read the first, those of gpt-oss the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_OWN_ARGUMENTS = ("messages", "add_generation_prompt")


class ChatTemplate:
    """Chat template of one model.

    Args:
        templates: template text by name; `default` is used, or `tool_use` where tools are given.
        special_tokens: what the template sees as `bos_token`, `eos_token`, ...
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise CheckpointError(f"the model's chat template {name!r} is not valid Jinja: {error}") from error

    @classmethod
    def from_dir(cls, directory: str | Path, special_tokens: Mapping[str, str] | None = None) -> "ChatTemplate | None":
        """The template of a directory, None where it has none.

        `chat_template.jinja` (and `additional_chat_templates/NAME.jinja`) come before the `chat_template` of
        `tokenizer_config.json`, which is a string or a list of named templates.
        """
        directory = Path(directory)
        files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
        if (directory / "chat_template.jinja").is_file():
            files["default"] = directory / "chat_template.jinja"
        if files:
            return cls({k: path.read_text(encoding="utf-8") for k, path in files.items()}, special_tokens)
        found = read_json(directory / "tokenizer_config.json").get("chat_template")
        if not found:
            return None
        if isinstance(found, str):
            found = {"default": found}
        elif isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        return cls(found, special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Prompt text of a conversation.

        Args:
            messages: dictionaries with `role` and `content`; keys whose value is None are left out.
            variables: what else the template sees, e.g. `enable_thinking` or `tools`; JSON values only.
            add_generation_prompt: whether the text ends where the assistant's answer begins.

        Raises:
            PromptError: the template refuses the messages or cannot handle them.
        """
        variables = _plain(variables or {})
        for name in _OWN_ARGUMENTS:
            if name in variables:
                raise PromptError(f"the chat template variable {name!r} is set by us; leave it out")
        seen = {"tools": None, "documents": None, **self._special_tokens, **variables}
        seen["messages"] = [_with_reasoning({k: v for k, v in _plain(m).items() if v is not None}) for m in messages]
        seen["add_generation_prompt"] = add_generation_prompt
        template = self._pick(seen["tools"])
        try:
            return template.render(seen)
        except Exception as error:  # a template is a program: it can fail in any way
            detail = " ".join(str(error).split())
            raise PromptError(f"the model's chat template refuses this conversation: {detail}") from error

    def _pick(self, tools: Any) -> jinja2.Template:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise PromptError(
                f"the model has chat templates {', '.join(sorted(self._templates))} and none is named 'default'; "
                "leave out --chat, or rename one"
            )
        return self._templates[name]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["dict"] = _PlainDict()
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; models were trained without either."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - a class attribute by Jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


class _PlainDict:
    """`dict(...)` for templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(jinja2.utils.Namespace):
    """`namespace(...)` for templates; names that begin with an underscore could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # not a parameter of its own, so that `namespace(self=...)` works
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON types only: other objects may have methods that the sandbox does not know as dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise PromptError(f"a chat message or template variable holds a {type(value).__name__}; use JSON values only")
