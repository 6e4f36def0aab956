"""Trains the bundled demonstration model from scratch and exports it in Hugging Face form.

Owns the command line; the parts are in `scripts/demo_model`. Invariant: the exported folder is written only when the
budget is spent, so an interrupted run leaves the old one alone.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from demo_model import corpus, evaluation, export, training
from demo_model.model import FlatModel, demo_config
from tokenizers import Tokenizer

from flashmoe_jax.errors import FlashMoEError

REPOSITORY = Path(__file__).resolve().parents[1]
# Continued for the model card.
SAMPLE_PROMPTS = (
    "Once upon a time",
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
    "def main(",
    "Renzo rispose",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="wall-clock budget in minutes (default: 75)")
    budget.add_argument("--steps", type=int, help="budget in training steps, for runs that repeat exactly")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared/data/text", help="corpus folder")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "checkpoints/demo", help="(default: %(default)s)")
    parser.add_argument("--run", type=Path, default=REPOSITORY / "runs/demo", help="run folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the run folder's newest checkpoint")
    parser.add_argument("--export-only", action="store_true", help="export the newest checkpoint, train no further")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokenizer entries (default: 4096)")
    parser.add_argument("--tokens-per-step", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak (default: 3e-3)")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps, the schedule unchanged")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        _run(args)
    except FlashMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    minutes = 75.0 if args.minutes is None and args.steps is None else args.minutes
    options = training.TrainOptions(
        minutes=minutes,
        steps=args.steps,
        seed=args.seed,
        tokens_per_step=args.tokens_per_step,
        peak_rate=args.learning_rate,
        final_rate=args.learning_rate / 100,
    )
    documents = corpus.read_domains(args.data)
    args.run.mkdir(parents=True, exist_ok=True)
    saved = args.run / "tokenizer.json"
    if (args.resume or args.export_only) and saved.is_file():
        tokenizer = Tokenizer.from_file(str(saved))
    else:
        tokenizer = corpus.train_tokenizer([d for train, _ in documents.values() for d in train], args.vocab_size)
        tokenizer.save(str(saved))
    domains = corpus.tokenize(documents, tokenizer)
    flat = FlatModel(demo_config(tokenizer.get_vocab_size()))
    num_tokens = sum(len(d.train) for d in domains)
    print(f"{flat.num_params():,} weights; {num_tokens:,} tokens of text", file=sys.stderr)
    run = training.Run(args.run)
    if args.export_only:
        state, steps, seconds = run.load(training.init_state(flat, options))
        trained = training.Trained(state.params, steps, steps * options.tokens_per_step, seconds)
    else:
        trained = training.train(flat, domains, options, run, resume=args.resume, stop_after=args.stop_after)
    if args.stop_after is not None and not args.export_only:
        return
    # What is judged is what is exported: the weights rounded to bfloat16.
    params = {name: jnp.asarray(p, jnp.bfloat16).astype(jnp.float32) for name, p in trained.params.items()}
    evaluations = evaluation.evaluate(flat, params, domains, length=512, max_tokens=4096)
    samples = [
        evaluation.continue_text(flat, params, tokenizer, prompt, max_tokens=160, temperature=0.7, seed=args.seed)
        for prompt in SAMPLE_PROMPTS
    ]
    card = export.model_card(flat, trained, domains, evaluations, samples, options)
    export.export(args.out, flat, trained.params, tokenizer, card)
    for e in evaluations:
        print(f"{e.name}: perplexity {np.exp(e.nats_per_token):.2f}, {e.bits_per_byte:.3f} bits per byte")


if __name__ == "__main__":
    sys.exit(main())
