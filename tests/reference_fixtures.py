"""The committed outputs of transformers: which models they are of, and their files.

`scripts/make_parity_fixtures.py` writes them, tests without torch read them. A file holds no weights: they follow
from the config and the seed by `tiny_models.random_tensors`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tiny_models import Weights, random_weights

from flashmoe_jax.config import ModelConfig

FIXTURES = Path(__file__).parent / "fixtures" / "transformers"
# Of `awkward_models.AWKWARD`; two of each family, every option of the maths in at least one.
FIXTURE_NAMES = (
    "olmoe-1layer-1kv-clip-bias",
    "olmoe-odd-normalised",
    "qwen3_moe-bias-tied",
    "qwen3_moe-dense-first",
    "mixtral-odd-head-tied",
    "mixtral-window",
    "qwen2_moe-odd-head-tied",
    "qwen2_moe-layer-types-dense-middle",
)
PROMPT_LENGTH = 12
NUM_STEPS = 20


class ReferenceFixture(NamedTuple):
    """One sequence through one model of transformers, in float32: a prompt, then cached steps of one token."""

    hf_config: dict[str, Any]
    seed: int  # of `tiny_models.random_tensors`
    token_T: np.ndarray  # int32, PROMPT_LENGTH + NUM_STEPS of them
    logits_TV: np.ndarray  # float32
    expert_id_LTX: np.ndarray  # uint8, best first, of the MoE layers

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.hf_config)

    @property
    def weights(self) -> Weights:
        return random_weights(self.config, self.seed)

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path,
            hf_config=np.array(json.dumps(self.hf_config)),
            seed=np.array(self.seed),
            token=self.token_T,
            logits=self.logits_TV,
            expert_id=self.expert_id_LTX,
        )


def load_fixture(path: Path) -> ReferenceFixture:
    with np.load(path) as file:
        return ReferenceFixture(
            json.loads(str(file["hf_config"])), int(file["seed"]), file["token"], file["logits"], file["expert_id"]
        )
