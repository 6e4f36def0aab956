import json
from pathlib import Path

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.errors import CheckpointError, PromptError
from flashmoe_jax.text import Tokenizer
from flashmoe_jax.text.stream import ByteRule, ByteStream, WindowStream

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]
BY_KIND = {kind: Tokenizer(getattr(tiny_tokenizers, kind)()) for kind in KINDS}
REAL = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
REAL_NAMES = ["granite-3.1", "olmoe-gpt-neox", "qwen3", "gpt2"]
SAMPLE = "Hello  world,\n\tça va? 漢字🙂👩‍👩‍👧 — «più» \u200d e\u0301 ﷽ x=1;\r\n   def f():"


def pieces_of(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize(
    ("kind", "stream_type"),
    [
        ("byte_level", ByteStream),
        ("byte_fallback", ByteStream),
        ("metaspace", ByteStream),
        ("word_piece", WindowStream),
    ],
)
def test_the_stream_fits_the_decoder(kind: str, stream_type: type):
    assert isinstance(BY_KIND[kind].stream(), stream_type)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_are_the_text_of_all_tokens(kind: str, text: str):
    tokenizer = BY_KIND[kind]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, at_start=True)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_text_comes_back_as_it_went_in(kind: str, text: str):
    tokenizer = BY_KIND[kind]
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text), at_start=True)) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_any_ids_stream_like_they_decode(kind: str, data: st.DataObject):
    """A random model emits anything: special tokens, half characters, ids outside the vocabulary."""
    tokenizer = BY_KIND[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=30))
    text = "".join(pieces_of(tokenizer, ids, at_start=True))
    if kind == "byte_fallback":
        # The library writes one U+FFFD per byte of a broken run, whole characters in it included.
        assert text.encode().decode() == text
    else:
        assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(before=st.text("ab ", min_size=1, max_size=8), after=st.text("ab ☃", max_size=8))
def test_a_continuation_keeps_its_spaces(kind: str, before: str, after: str):
    tokenizer = BY_KIND[kind]
    prompt, both = tokenizer.encode(before), tokenizer.encode(before + after)
    if not prompt or both[: len(prompt)] != prompt or not tokenizer.decode(prompt).strip():
        return
    text = "".join(pieces_of(tokenizer, both[len(prompt) :]))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(both)


def test_a_character_waits_for_its_last_byte():
    tokenizer = BY_KIND["byte_level"]
    ids = tokenizer.encode("\N{BALLOT BOX}")  # seen by none of the merges: one token per byte
    assert len(ids) == 3
    assert pieces_of(tokenizer, ids) == ["", "", "\N{BALLOT BOX}", ""]
    assert pieces_of(tokenizer, ids[:2]) == ["", "", "\N{REPLACEMENT CHARACTER}"]
    letter = tokenizer.encode("x")
    assert pieces_of(tokenizer, ids[:2] + letter) == ["", "", "\N{REPLACEMENT CHARACTER}x", ""]


def test_special_tokens_show_only_when_asked_for():
    tokenizer = BY_KIND["byte_level"]
    ids = tokenizer.encode("a<|end|>b")
    assert "".join(pieces_of(tokenizer, ids)) == "ab"
    assert "".join(pieces_of(tokenizer, ids, skip_special=False)) == "a<|end|>b"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
)
def test_decoders_that_are_not_token_by_token_have_no_rule(decoder: dict | None):
    assert ByteRule.of(decoder) is None


def test_named_tokens_of_the_config_are_added_and_special(tmp_path: Path):
    backend = tiny_tokenizers.byte_level()
    size = backend.get_vocab_size()
    added = {str(size): {"content": "<think>", "special": False}, "3": {"content": "<|end|>", "special": True}}
    directory = tiny_tokenizers.write_dir(
        tmp_path, backend, pad_token={"content": "<pad>", "special": True}, added_tokens_decoder=added
    )
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.eos_token_id == 2
    ids = tokenizer.encode("<think>x<pad>")
    assert (ids[0], ids[-1]) == (size, size + 1)
    assert tokenizer.decode(ids) == "<think>x"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path):
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_dir(tiny_tokenizers.write_dir(tmp_path, backend))
    assert 4 < len(tokenizer.encode("Once upon a midnight dreary")) < 64


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no tokenizer: .*tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer that can be read"):
        Tokenizer.from_dir(tmp_path)
    tiny_tokenizers.write_dir(tmp_path, tiny_tokenizers.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="an object is expected"):
        Tokenizer.from_dir(tmp_path)


def test_half_a_surrogate_pair_is_no_prompt():
    with pytest.raises(PromptError, match="not valid text"):
        BY_KIND["byte_level"].encode("a\ud800")


@pytest.mark.parametrize("name", REAL_NAMES)
def test_real_tokenizers_stream_their_text(name: str):
    if not (REAL / name / "tokenizer.json").is_file():
        pytest.skip("the shared tokenizers are not here")
    tokenizer = Tokenizer.from_dir(REAL / name)
    ids = tokenizer.encode(SAMPLE)
    pieces = pieces_of(tokenizer, ids, at_start=True)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    # Every id of the vocabulary, in runs that break characters at their seams.
    every = list(range(0, tokenizer.vocab_size, 97))
    assert "".join(pieces_of(tokenizer, every, at_start=True)) == tokenizer.decode(every)


def test_special_tokens_map_is_a_fallback(tmp_path: Path):
    tiny_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert Tokenizer.from_dir(tmp_path).eos_token_id == 2
