"""Small tokenizers, one for each kind of decoder, trained on a few lines."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
LINES = [
    "Once upon a time there was a little girl who lived near a big forest.",
    "def add(a, b):\n    return a + b\n",
    "Perché l'anno è già finito? Città, virtù, più giù.",
    "naïve façade — 12,345 + 678 = 13,023 … ☃ 🙂 漢字 かな",
]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2, Qwen and OLMoE: every character is a byte."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama and Mixtral: SentencePiece's space mark, bytes for unknown characters."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator(LINES[:2], trainer)
    state = json.loads(trained.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    state["model"]["byte_fallback"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """SentencePiece's space mark through the Metaspace decoder."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A decoder that joins tokens by context, which only the window stream can follow."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def write_dir(directory: Path, tokenizer: tokenizers.Tokenizer, **config: object) -> Path:
    """Writes tokenizer.json and tokenizer_config.json as a model would bring them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **config}), encoding="utf-8")
    return directory
