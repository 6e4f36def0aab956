"""Writes the committed outputs of transformers that `make test` compares with, so that it needs no torch.

    python scripts/make_parity_fixtures.py [--out tests/fixtures/transformers]

Needs the extra `parity`. Each model is written as a checkpoint with our key names, loaded by transformers with no key
left over on either side, and run on one sequence in float32. A seed is passed over when two of its router
probabilities come so close that rounding could swap them.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from awkward_models import AWKWARD
from parity.hf_models import load_model, run_cached
from reference_fixtures import FIXTURE_NAMES, FIXTURES, NUM_STEPS, PROMPT_LENGTH, ReferenceFixture
from tiny_models import write_hf_checkpoint

# A hundred times what rounding moves a probability by.
LEAST_GAP = 1e-4


def make_fixture(name: str) -> ReferenceFixture:
    """What transformers computes for one of the awkward models."""
    hf_config = AWKWARD[name]
    for seed in itertools.count():
        token_T = np.random.RandomState(seed).randint(hf_config["vocab_size"], size=PROMPT_LENGTH + NUM_STEPS)
        with tempfile.TemporaryDirectory() as directory:
            model = load_model(write_hf_checkpoint(Path(directory), hf_config, seed=seed))
        trace = run_cached(model, token_T, PROMPT_LENGTH)
        if trace.smallest_gap > LEAST_GAP:
            break
    expert_id_LTX = trace.expert_id_LTX.astype(np.uint8)
    return ReferenceFixture(hf_config, seed, token_T.astype(np.int32), trace.logits_TV, expert_id_LTX)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write the outputs of transformers that tests compare with.")
    parser.add_argument("--out", type=Path, default=FIXTURES, help="folder to write to (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in FIXTURE_NAMES:
        fixture = make_fixture(name)
        path = args.out / f"{name}.npz"
        fixture.save(path)
        print(f"{path}: seed {fixture.seed}, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
