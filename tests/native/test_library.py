"""Loading: what is refused, and that a refusal leaves JAX alone."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from flashmoe_jax.native import library


@pytest.mark.parametrize(
    ("built", "runtime", "is_refused"),
    [
        ((0, 3), (0, 3), False),
        ((0, 3), (0, 4), False),
        ((0, 4), (0, 3), True),
        ((1, 0), (0, 3), True),
        ((0, 3), (1, 0), True),
        ((0, 3), None, True),
    ],
)
def test_only_a_runtime_that_knows_the_interface_is_accepted(
    built: tuple[int, int], runtime: tuple[int, int] | None, is_refused: bool
) -> None:
    reason = library.version_mismatch(built, runtime)
    assert bool(reason) == is_refused
    assert "\n" not in reason


def test_the_runtime_version_is_read_from_the_headers(tmp_path: Path) -> None:
    version = library.runtime_version(Path(jax.ffi.include_dir()))
    assert version is not None
    assert version >= (0, 3)
    assert library.runtime_version(tmp_path) is None


def test_a_folder_without_the_library(tmp_path: Path) -> None:
    assert library.find_library(tmp_path) is None


def run_load(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = f"from flashmoe_jax.native import library\n{code}\nimport jax\nprint(result.is_loaded, result.reason)\n"
    script += "print(jax.numpy.ones(3).sum())\n"
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)


def test_the_kernels_can_be_switched_off() -> None:
    answer = run_load("result = library.load()", FLASHMOE_KERNELS="xla")
    assert answer.stdout.splitlines() == ["False FLASHMOE_KERNELS=xla", "3.0"]
    assert answer.stderr == ""


def test_a_newer_interface_is_refused_in_one_line_and_jax_goes_on() -> None:
    if library.find_library(Path(library.__file__).parent) is None:
        pytest.skip("the kernels were not built")
    code = "library.runtime_version = lambda directory: (0, 0)\nresult = library.load(); library.load()"
    answer = run_load(code, FLASHMOE_KERNELS="auto")
    assert answer.stdout.splitlines()[0].startswith("False they were built for interface 0.3")
    assert answer.stdout.splitlines()[1] == "3.0"
    assert len(answer.stderr.splitlines()) == 1
    assert "slower XLA code" in answer.stderr
