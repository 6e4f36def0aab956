"""Characters to token ids and back, from the `tokenizer.json` of a model.

Owns the vocabulary and the named special tokens (`bos_token`, ...). Does not own chat templates (`chat.py`) or the ids
that end a text (`generation_config.py`). Invariant: ids and text are those of the `tokenizers` library for the same
files, with the special tokens of `tokenizer_config.json` added as transformers adds them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from flashmoe_jax.errors import CheckpointError, PromptError
from flashmoe_jax.text.stream import ByteRule, ByteStream, TextStream, WindowStream

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Tokenizer of one model; build it with `from_dir`.

    Args:
        backend: a loaded `tokenizers.Tokenizer`; its truncation and padding are switched off.
        special_tokens: the named special tokens that exist, e.g. `{"bos_token": "<s>"}`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str] | None = None):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._hidden = frozenset(token_id for token_id, token in added.items() if token.special)
        self._rule = ByteRule.of(json.loads(backend.to_str())["decoder"])

    @classmethod
    def from_dir(cls, directory: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json` and, where present, `tokenizer_config.json` and `special_tokens_map.json`.

        Raises:
            CheckpointError: no or a damaged tokenizer in `directory`.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            other = " (tokenizer.model alone is not enough)" if (directory / "tokenizer.model").exists() else ""
            raise CheckpointError(
                f"no tokenizer: {path} does not exist{other}; put the model's tokenizer.json there, "
                "or call the Python interface with token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
        config = read_json(directory / "tokenizer_config.json")
        named = {**read_json(directory / "special_tokens_map.json"), **config}
        special_tokens = {name: _content(named[name]) for name in NAMED_SPECIAL_TOKENS if named.get(name) is not None}
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, special_tokens)
        return cls(backend, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; a model may have more rows than that."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the `eos_token` of tokenizer_config.json, if it names one."""
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self._backend.token_to_id(eos)

    def token_id(self, token: str) -> int | None:
        """Id of one token by its text, None where the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: special tokens written out in it are recognised.
            add_special: whether to add what the model expects around a text, e.g. a leading `<s>`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid text: {error}; give it as UTF-8") from error
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `token_ids`, as the beginning of a text; ids outside the vocabulary show nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def stream(self, at_start: bool = False, skip_special: bool = True) -> TextStream:
        """Detokenizer for ids that come one at a time.

        Args:
            at_start: False when the ids continue a prompt: a leading space then belongs to the text. True when they
                begin a text, where some decoders drop it.
            skip_special: whether special tokens stay invisible.
        """

        def token_of(token_id: int) -> str | None:
            if skip_special and token_id in self._hidden:
                return None
            return self._backend.id_to_token(token_id)

        if self._rule is not None:
            return ByteStream(self._rule, token_of, at_start)
        return WindowStream(
            lambda ids: self.decode(ids, skip_special=False),
            lambda token_id: token_of(token_id) is not None,
            [] if at_start else self.encode("a", add_special=False),
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where the file does not exist.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; an object is expected")
    return value


def _content(token: Any) -> str:
    """Text of a token that is written either as a string or as an AddedToken object."""
    return token["content"] if isinstance(token, dict) else str(token)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, added: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Adds the tokens that tokenizer_config.json lists and tokenizer.json lacks, or lists with other properties."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = []
    for _, entry in sorted(added.items(), key=lambda item: int(item[0])):
        flags = {k: entry[k] for k in ("lstrip", "rstrip", "normalized", "single_word", "special") if k in entry}
        token = tokenizers.AddedToken(entry["content"], **flags)
        if repr(known.get(token.content)) != repr(token):
            tokens.append(token)
        known[token.content] = token
    tokens += [tokenizers.AddedToken(t, special=True) for t in special_tokens.values() if t not in known]
    if tokens:
        backend.add_tokens(tokens)
