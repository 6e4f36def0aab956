"""The bundled model through the engine, against transformers: greedy text in float32, logits in bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from parity.hf_models import greedy_tokens, load_model, run_cached
from transformers import PreTrainedModel

import flashmoe_jax
from checkpoints.convert import convert

pytestmark = pytest.mark.parity

DEMO = Path(__file__).parents[2] / "checkpoints" / "demo"
if not (DEMO / "config.json").exists():
    pytest.skip("no bundled model in checkpoints/demo", allow_module_level=True)

PROMPTS = [
    "Once upon a time",
    "Question: What is the capital of France?\nAnswer:",
    "def add(a, b):\n",
    "Natalia sold clips to 48 of her friends in April.",
    "Quel ramo del lago di Como",
]
NUM_TOKENS = 64
# In bfloat16, as a share of the logits' root mean square over what float32 gives with the same weights.
BFLOAT16_TOLERANCE = 0.03


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return load_model(DEMO)


@pytest.fixture(scope="module")
def engine_float32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[flashmoe_jax.Engine]:
    directory = convert(DEMO, tmp_path_factory.mktemp("demo") / "float32", dtype="float32")
    with flashmoe_jax.load(directory, device_budget="25%", max_context=256, batch_size=len(PROMPTS)) as engine:
        yield engine


def generate(engine: flashmoe_jax.Engine, prompts: list[str]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    greedy = flashmoe_jax.SamplingParams(temperature=0.0)
    for piece in engine.generate(prompts, max_new_tokens=NUM_TOKENS, sampling=greedy, ignore_eos=True):
        tokens[piece.sequence].append(piece.token_id)
    return tokens


def test_greedy_tokens_one_by_one_and_as_a_batch(reference: PreTrainedModel, engine_float32: flashmoe_jax.Engine):
    expected = [greedy_tokens(reference, engine_float32.tokenizer.encode(prompt), NUM_TOKENS) for prompt in PROMPTS]
    assert [generate(engine_float32, [prompt])[0] for prompt in PROMPTS] == expected
    assert generate(engine_float32, PROMPTS) == expected


def test_bfloat16_logits(reference: PreTrainedModel, engine_float32: flashmoe_jax.Engine, tmp_path: Path):
    directory = convert(DEMO, tmp_path / "bfloat16", dtype="bfloat16")
    with flashmoe_jax.load(directory, device_budget="25%", max_context=256) as engine:
        for prompt in PROMPTS:
            ids = engine.tokenizer.encode(prompt)
            tokens = np.array(ids + greedy_tokens(reference, ids, NUM_TOKENS))
            exact_TV = run_cached(reference, tokens, len(ids)).logits_TV[len(ids) - 1 :]
            session = engine.session()
            logits = [session.prefill([ids]), *(session.decode(tokens[[t]]) for t in range(len(ids), len(tokens)))]
            ours_TV = np.concatenate([np.asarray(step_1V) for step_1V in logits])
            error = np.sqrt(np.mean(np.square(ours_TV - exact_TV)) / np.mean(np.square(exact_TV)))
            print(f"{prompt!r}: relative error {error:.2%}")
            assert error < BFLOAT16_TOLERANCE
