"""The training text: domains, their documents, the tokenizer and the batches drawn from them.

Owns how a file becomes documents and how documents become rows of tokens. Knows nothing of models. Invariant: the
held-out documents of a domain are never in a training row, and a batch depends on (seed, step) alone, so a resumed
run sees the batches that an uninterrupted one would have seen.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flashmoe_jax.errors import FlashMoEError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
# Share of rows that begin where a document or a paragraph does; the others begin anywhere. A prompt is read from
# position 0, so the model must have seen beginnings there.
ALIGNED_SHARE = 0.7


@dataclasses.dataclass(frozen=True)
class Domain:
    """One file of the corpus. `share` is its part of a batch in percent; `book` texts are split at blank lines."""

    name: str
    file: str
    share: float
    documents: Callable[[str], list[str]]
    book: bool = False


@dataclasses.dataclass(frozen=True)
class TokenDomain:
    """A domain as tokens: one stream for training with the positions where a row may begin, and one held out."""

    name: str
    share: float
    train: np.ndarray
    starts: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int


def _stories(text: str) -> list[str]:
    """TinyStories: paragraphs are parted by a blank line, stories by a single line break."""
    return [story.strip() for story in re.split(r"(?<!\n)\n(?!\n)", text) if len(story.strip()) > 200]


def _unwrap(text: str) -> str:
    """Joins the lines of each paragraph; keeps the blank lines between paragraphs."""
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
    return "\n\n".join(p for p in paragraphs if p)


def _books(text: str) -> list[str]:
    """Books one after the other, each under a line `=== name ===`; some have been cut into one sentence per line."""
    books = [book for book in re.split(r"^=== .* ===$", text, flags=re.MULTILINE) if book.strip()]
    return [_unwrap(book) if len(re.findall(r"\n\s*\n", book)) > 20 else _rejoin_words(book) for book in books]


def _rejoin_words(book: str) -> str:
    """Undoes the cutting into words (`Emma 's`, `` `` Well , '' ``); five sentences make a paragraph."""
    book = re.sub(r"(?:``|(?<=\s)'')\s?(?=\S)", '"', re.sub(r"\s?''(?=\s)", '"', book))
    book = re.sub(r" ([,.;:!?)\]]|'(?:s|m|ll|d|re|ve|t)\b|n't\b)", r"\1", book)
    book = re.sub(r"([(\[]) ", r"\1", book).replace(" -- ", " - ").replace("can not", "cannot")
    sentences = [line.strip() for line in book.splitlines() if line.strip()]
    return "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))


def _play(text: str) -> list[str]:
    return [text.strip()]


def _modules(text: str) -> list[str]:
    modules = re.split(r"^# === .* ===\n", text, flags=re.MULTILINE)
    return [module.strip() + "\n" for module in modules if module.strip()]


def _records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _trivia(text: str) -> list[str]:
    return [f"Question: {r['question'].strip()}\nAnswer: {r['answer'].strip()}\n" for r in _records(text)]


def _word_problems(text: str) -> list[str]:
    """GSM8K without its calculator marks `<<48/2=24>>`; the final `#### 72` as a sentence."""
    documents = []
    for record in _records(text):
        steps, _, result = re.sub(r"<<.*?>>", "", record["answer"]).partition("####")
        question = record["question"].strip()
        documents.append(f"Question: {question}\nAnswer: {steps.strip()}\nThe answer is {result.strip()}.\n")
    return documents


DOMAINS = (
    Domain("stories", "stories_tinystories.txt", 40, _stories),
    Domain("tales", "stories_gutenberg.txt", 11, _books, book=True),
    Domain("novels", "novels_gutenberg.txt", 5, _books, book=True),
    Domain("drama", "drama_shakespeare.txt", 3, _play, book=True),
    Domain("trivia", "trivia_triviaqa.jsonl", 9, _trivia),
    Domain("word problems", "math_gsm8k_train3000.jsonl", 10, _word_problems),
    Domain("Python", "code_python_stdlib.txt", 11, _modules, book=True),
    Domain("Italian", "italian_promessi_sposi.txt", 11, _books, book=True),
)


def read_domains(data: Path, held_out_share: float = 0.03) -> dict[str, tuple[list[str], list[str]]]:
    """Training and held-out documents by domain name.

    A domain of many documents holds out every n-th; a domain of a few books holds out the end of each.

    Raises:
        FlashMoEError: a file of the corpus is missing.
    """
    if missing := [d.file for d in DOMAINS if not (data / d.file).is_file()]:
        raise FlashMoEError(f"{data} lacks {', '.join(missing)}; give the corpus folder with --data DIR")
    domains = {}
    for domain in DOMAINS:
        documents = domain.documents((data / domain.file).read_text(encoding="utf-8"))
        every = round(1 / held_out_share)
        if len(documents) >= every:
            held_out = documents[every // 2 :: every]
            train = [d for i, d in enumerate(documents) if i % every != every // 2]
        else:
            # Cut at a paragraph, so that no sentence is split between training and held-out text.
            cuts = [d.rfind("\n\n", 0, round(len(d) * (1 - held_out_share))) for d in documents]
            train = [d[:cut] for d, cut in zip(documents, cuts, strict=True) if cut > 0]
            held_out = [d[cut:].strip() for d, cut in zip(documents, cuts, strict=True) if cut > 0]
        domains[domain.name] = (train, held_out)
    return domains


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE without a prefix space; each digit is a token of its own, which arithmetic needs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(domains: dict[str, tuple[list[str], list[str]]], tokenizer: Tokenizer) -> list[TokenDomain]:
    """Packs each domain's documents into one stream, an end-of-text token after each document."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, "the tokenizer was trained with this token"
    packed = []
    for domain in DOMAINS:
        train, held_out = domains[domain.name]
        stream: list[int] = []
        starts: list[int] = []
        for document in train:
            # A paragraph keeps the blank line that follows it, so that the pieces add up to the document.
            pieces = re.findall(r".+?(?:\n\n+|\Z)", document, flags=re.DOTALL) if domain.book else [document]
            for piece in tokenizer.encode_batch(pieces):
                starts.append(len(stream))
                stream += piece.ids
            stream.append(end)
        tail = [i for d in tokenizer.encode_batch(held_out) for i in (*d.ids, end)]
        packed.append(
            TokenDomain(
                name=domain.name,
                share=domain.share,
                train=np.asarray(stream, np.int32),
                starts=np.asarray(starts),
                held_out=np.asarray(tail, np.int32),
                held_out_bytes=sum(len(d.encode()) for d in held_out),
            )
        )
    return packed


def batch(domains: list[TokenDomain], seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Rows of `length + 1` tokens, int32 `[rows, length + 1]`: input and target overlap.

    Domains take turns by their shares: every domain's rows over many steps come as close to its share as they can.
    """
    rng = np.random.default_rng([seed, step])
    shares = np.cumsum([d.share for d in domains]) / sum(d.share for d in domains)
    # Stratified choice: one draw in each of `rows` equal parts of [0, 1).
    picks = np.searchsorted(shares, (np.arange(rows) + rng.random(rows)) / rows, side="right")
    out = np.empty((rows, length + 1), np.int32)
    for row, pick in enumerate(np.minimum(picks, len(domains) - 1)):
        domain = domains[pick]
        last = len(domain.train) - length - 1
        if rng.random() < ALIGNED_SHARE:
            start = min(int(domain.starts[rng.integers(len(domain.starts))]), last)
        else:
            start = int(rng.integers(last + 1))
        out[row] = domain.train[start : start + length + 1]
    return out


def held_out_rows(domain: TokenDomain, length: int, max_tokens: int) -> np.ndarray:
    """Held-out text in rows that do not overlap, int32 `[rows, length + 1]`, at most `max_tokens` targets."""
    rows = min(len(domain.held_out) - 1, max_tokens) // length
    return np.stack([domain.held_out[i * length : i * length + length + 1] for i in range(rows)])
