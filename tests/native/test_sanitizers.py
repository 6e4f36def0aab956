"""The kernels' own fuzz test, compiled with warnings as errors under the address and undefined behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flashmoe_jax import native

NATIVE = Path(native.__file__).parent
NAMES = ("kernels", "attention", "parallel", "streams", "isa_portable", "isa_avx2", "isa_avx512", "isa_avx512_bf16")
SOURCES = [*(NATIVE / f"{name}.cc" for name in NAMES), Path(__file__).parent / "fuzz_kernels.cc"]
FLAGS = "-std=c++17 -O1 -g1 -fno-math-errno -ffp-contract=off -Wall -Wextra -Werror -pthread".split()
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all".split()


def test_fuzzed_shapes_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    if subprocess.run([compiler, *SANITIZERS, probe, "-o", tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip("this g++ has no sanitizers")
    program = tmp_path / "fuzz_kernels"
    build = subprocess.run(
        [compiler, *FLAGS, *SANITIZERS, f"-I{NATIVE}", *SOURCES, "-o", program], capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr[-4000:]
    for seed in ("1", "2"):
        run = subprocess.run([program, seed, "30"], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-4000:]
        assert "level 1" in run.stdout
