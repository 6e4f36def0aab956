"""Prompts to record, from a file.

Owns how a file becomes texts. Knows no tokenizer and no model. Invariant: a prompt is never empty, and its number says
where in the file it comes from.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from flashmoe_jax.errors import PromptError

FIELDS = ("prompt", "text", "question", "input")


class Prompt(NamedTuple):
    """One text and the line of the file that it stands in, from 1."""

    line: int
    text: str


def read_prompts(path: Path, field: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, in its order; blank lines are skipped.

    Args:
        path: `.txt` with one prompt per line, or `.jsonl` with one JSON object per line.
        field: of the objects; None for the first of FIELDS that the first object has.
        limit: at most so many prompts.

    Raises:
        PromptError: no such file, not UTF-8, another kind of file, a line that is no object with that field, or no
            prompt at all.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise PromptError(f"prompts {path} is neither .txt (a prompt per line) nor .jsonl (an object per line)")
    if field is not None and path.suffix == ".txt":
        raise PromptError(f"--field {field} has no effect on {path.name}; it is for .jsonl")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"prompts {path} cannot be read: {error.strerror}; give a file of UTF-8 text") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"prompts {path} is not UTF-8 (byte {error.start}); convert it, e.g. with iconv") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) == limit:
            break
        text = line.removesuffix("\r")
        if not text.strip():
            continue
        if path.suffix == ".jsonl":
            where = f"{path}, line {number}"
            record = _object(text, where)
            if field is None:
                field = _guess(record, where)
            value = record.get(field)
            if not isinstance(value, str) or not value.strip():
                raise PromptError(f"{where}: field {field!r} holds no text; give the right one with --field")
            text = value
        prompts.append(Prompt(number, text))
    if not prompts:
        raise PromptError(f"prompts {path} holds no prompt; write one per line")
    return prompts


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise PromptError(f"{where} is no JSON object; write one per line")
    return record


def _guess(record: dict[str, Any], where: str) -> str:
    for field in FIELDS:
        if field in record:
            return field
    raise PromptError(f"{where} has none of {', '.join(FIELDS)}; name the field that holds the prompt with --field")
