"""The committed fixtures are what transformers gives today."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from reference_fixtures import FIXTURE_NAMES, FIXTURES, load_fixture

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_parity_fixtures.py"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("make_parity_fixtures", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path_factory.mktemp("fixtures")
    assert script.main(["--out", str(out)]) == 0
    return out


def test_no_other_file_is_committed(fresh: Path):
    assert {path.name for path in FIXTURES.iterdir()} == {path.name for path in fresh.iterdir()}


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_committed_fixture_is_up_to_date(name: str, fresh: Path):
    committed, made = load_fixture(FIXTURES / f"{name}.npz"), load_fixture(fresh / f"{name}.npz")
    assert committed.hf_config == made.hf_config
    assert committed.seed == made.seed
    np.testing.assert_array_equal(committed.token_T, made.token_T)
    np.testing.assert_array_equal(committed.expert_id_LTX, made.expert_id_LTX)
    # Another build of torch may add in another order.
    np.testing.assert_allclose(committed.logits_TV, made.logits_TV, atol=2e-5, rtol=0)
