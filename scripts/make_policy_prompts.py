"""Makes the prompts on which the bundled model's eviction policies are trained and tested.

Writes one `<domain>.jsonl` per domain, a line per prompt with the field `prompt`: beginnings of documents or
paragraphs of the text that `scripts/train_demo_model.py` reads, evenly spread over it. The result is in
`checkpoints/demo/prompts`, so that the policies can be trained again from a clone.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.demo_model.corpus import read_domains

# Domain, the name of its file, and how many times as many prompts: questions and their answers are short.
CHOSEN = (
    ("stories", "stories", 1),
    ("trivia", "trivia", 4),
    ("word problems", "problems", 1),
    ("Python", "python", 1),
    ("Italian", "italian", 1),
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of the corpus")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/demo/prompts"), metavar="DIR")
    parser.add_argument(
        "--prompts",
        type=int,
        default=128,
        metavar="N",
        help="per domain; of trivia four times as many (default %(default)s)",
    )
    parser.add_argument("--longest", type=int, default=240, metavar="CHARS", help="(default %(default)s)")
    return parser


def beginnings(documents: Sequence[str], count: int, longest: int) -> list[str]:
    """The beginnings of `count` pieces of text, evenly spread, cut at a space or line break."""
    pieces = list(documents)
    if len(pieces) < count:
        pieces = [p for d in documents for p in re.split(r"\n\n+", d) if len(p) > 120]
    chosen = [pieces[i * len(pieces) // count] for i in range(count)]
    if all("\nAnswer:" in piece for piece in chosen):
        chosen = [piece[: piece.index("\nAnswer:") + len("\nAnswer:")] for piece in chosen]
    return [piece if len(piece) <= longest else re.sub(r"\s+\S*$", "", piece[:longest]) for piece in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    domains = read_domains(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, file, times in CHOSEN:
        train, held_out = domains[name]
        lines = [
            json.dumps({"prompt": p}, ensure_ascii=False)
            for p in beginnings(train + held_out, times * args.prompts, args.longest)
        ]
        (args.out / f"{file}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
