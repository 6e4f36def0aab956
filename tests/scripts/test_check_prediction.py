"""The script that compares a prediction with the engine: it runs, and its rows say what it compared."""

import csv
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import tiny_hf_config, write_hf_checkpoint

from checkpoints.convert import convert
from flashmoe_jax.probe import block

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("check_prediction")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prediction")
    return convert(write_hf_checkpoint(folder / "hf", tiny_hf_config("olmoe")), folder / "model")


def test_the_engine_is_compared_with_two_predictions(
    script: ModuleType, model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "BLOCK_BYTES", 1 << 20)
    status = script.main([str(model), "--drive", "20MB/s", "--budget", "4slots", "--tokens", "4"])
    shown = capsys.readouterr()
    if status == 2 and any(reason in shown.err for reason in ("control groups", "single disk", "throttle it to less")):
        pytest.skip(shown.err.splitlines()[-1])
    assert status == 0, shown.err
    assumed, traced = csv.DictReader(io.StringIO(shown.out))
    assert (assumed["hit_rates"], traced["hit_rates"]) == ("assumed", "of this run")
    assert (assumed["slots"], assumed["drive_bytes_per_s"], assumed["hit_rate"]) == ("4", "20000000", "0.800")
    for row in (assumed, traced):
        ratio = float(row["predicted_tokens_per_s"]) / float(row["measured_tokens_per_s"])
        assert float(row["predicted_over_measured"]) == pytest.approx(ratio, rel=0.01)


def test_one_rate_is_asked_for(script: ModuleType, model: Path, capsys: pytest.CaptureFixture) -> None:
    assert script.main([str(model), "--drive", "1GB/s,2GB/s"]) == 2
    assert capsys.readouterr().err == "error: --drive 1GB/s,2GB/s names several rates; give one\n"
