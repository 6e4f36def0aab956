"""Chat prompts equal those of transformers' own `apply_chat_template`."""

import json
from pathlib import Path

import pytest

from flashmoe_jax.text import ChatTemplate, Tokenizer

pytestmark = pytest.mark.parity

REAL = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- bos_token + '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
{% generation %}{{ message | tojson(indent=2) }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + eos_token }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Perché? 🙂 <|im_end|> & <b>"}],
    [
        {"role": "system", "content": "You answer in rhyme. "},
        {"role": "user", "content": "What is 2 + 2?\n"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\nFour.", "tool_calls": None},
        {"role": "user", "content": "And è?"},
    ],
    [
        {"role": "user", "content": "weather in Roma"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "call it",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Roma", "unit": "°C"}}}],
        },
        {"role": "tool", "content": '{"t": 21}'},
    ],
]
VARIABLES = [{}, {"enable_thinking": False}, {"tools": [{"name": "weather", "parameters": {"è": [1, None]}}]}]


@pytest.mark.parametrize("template", [None, CHATML], ids=["qwen3", "chatml"])
@pytest.mark.parametrize("variables", VARIABLES, ids=["plain", "thinking off", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one turn", "four turns", "tool call"])
def test_rendered_and_encoded_alike(tmp_path: Path, template: str | None, variables: dict, messages: list):
    transformers = pytest.importorskip("transformers")
    source = REAL / "qwen3"
    if not source.is_dir():
        pytest.skip("the shared tokenizers are not here")
    for path in source.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_start|>"}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer = Tokenizer.from_dir(tmp_path)
    chat = ChatTemplate.from_dir(tmp_path, tokenizer.special_tokens)
    assert chat is not None
    for add_generation_prompt in (True, False):
        options = {"add_generation_prompt": add_generation_prompt, **variables}
        text = chat.render(messages, variables, add_generation_prompt=add_generation_prompt)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert tokenizer.encode(text, add_special=False) == ids
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
