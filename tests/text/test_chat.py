import json
import re
from pathlib import Path, PurePosixPath

import pytest

from flashmoe_jax.errors import CheckpointError, PromptError
from flashmoe_jax.text import ChatTemplate

USER = [{"role": "user", "content": "Ciao <b>&'\""}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list = USER, add_generation_prompt: bool = True, **variables: object) -> str:
    template = ChatTemplate({"default": source}, TOKENS)
    return template.render(messages, variables, add_generation_prompt=add_generation_prompt)


def test_blocks_are_trimmed_and_tokens_are_seen():
    source = (
        "{{ bos_token }}\n"
        "  {% for m in messages %}\n"
        "[{{ m.role }}] {{ m['content'] }}{{ eos_token }}\n"
        "  {% endfor %}\n"
        "{% if add_generation_prompt %}\n"
        "[assistant]\n"
        "{% endif %}\n"
    )
    assert render(source) == "<s>\n[user] Ciao <b>&'\"</s>\n[assistant]\n"
    assert render(source, add_generation_prompt=False) == "<s>\n[user] Ciao <b>&'\"</s>\n"


def test_helpers_of_transformers():
    assert render("{{ {'b': 'è<', 'a': 1} | tojson }}") == '{"b": "è<", "a": 1}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert re.fullmatch(r"20\d\d", render("{{ strftime_now('%Y') }}"))
    assert render("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}{% set x = 1 %}b{% endgeneration %}{{ x }}c") == "abc"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ dict(a=3).a }}") == "23"
    assert render("{{ 'none' if tools is none and documents is none }}") == "none"


def test_variables_come_through_and_override_tokens():
    source = "{{ enable_thinking is defined and enable_thinking is false }} {{ eos_token }}"
    assert render(source) == "False </s>"
    assert render(source, enable_thinking=False, eos_token="<e>") == "True <e>"


def test_reasoning_goes_under_every_name():
    message = {"role": "assistant", "content": "x", "reasoning": "r", "tool_calls": None}
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ messages[0].tool_calls is defined }}"
    assert render(source, [message]) == "rrFalse"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must\n alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content }}",
    ],
)
def test_a_template_that_fails_is_one_clear_line(source: str):
    with pytest.raises(PromptError, match=r"^the model's chat template refuses this conversation: [^\n]+$"):
        render(source)


def test_objects_with_methods_are_refused():
    with pytest.raises(PromptError, match="holds a PurePosixPath"):
        render("{{ x }}", x=PurePosixPath("."))
    with pytest.raises(PromptError, match="'messages' is set by us"):
        ChatTemplate({"default": ""}).render(USER, {"messages": []})


def test_where_templates_are_found(tmp_path: Path):
    assert ChatTemplate.from_dir(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}"}))
    found = ChatTemplate.from_dir(tmp_path, TOKENS)
    assert found is not None
    assert found.render(USER) == "one <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = ChatTemplate.from_dir(tmp_path)
    assert found is not None
    assert found.render(USER) == "plain"
    assert found.render(USER, {"tools": [{"name": "f"}]}) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    found = ChatTemplate.from_dir(tmp_path)
    assert found is not None
    assert found.render(USER, {"tools": [{}]}) == "file"
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("file tools")
    found = ChatTemplate.from_dir(tmp_path)
    assert found is not None
    assert found.render(USER, {"tools": [{}]}) == "file tools"


def test_bad_templates_are_refused():
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        ChatTemplate({"default": "{% if %}"})
    with pytest.raises(PromptError, match="none is named 'default'"):
        ChatTemplate({"rag": "x"}).render(USER)
