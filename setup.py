"""Builds the CPU kernels as an optional extension; all else about the package is in pyproject.toml.

The headers are those of the jaxlib that pyproject.toml pins for the build, the oldest one supported: a newer jaxlib
runs what was built for an older interface, not the other way round.
"""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No fast-math: NaN and infinity propagate, and sums keep their order.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
SOURCES = (
    "ffi",
    "kernels",
    "attention",
    "parallel",
    "streams",
    "isa_portable",
    "isa_avx2",
    "isa_avx512",
    "isa_avx512_bf16",
)
NATIVE = Path("flashmoe_jax") / "native"


def jaxlib_include() -> str | None:
    """Header directory of the installed jaxlib, found without importing it."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "include")


class BuildKernels(build_ext):
    """Compiles for every processor of the family: what a newer one can do is chosen at run time, per file."""

    def build_extension(self, ext: Extension) -> None:
        include = jaxlib_include()
        if include is None:
            self.announce("flashmoe-jax: no jaxlib headers, the CPU kernels are not built", level=3)
            return
        ext.extra_compile_args = [*ext.extra_compile_args, "-isystem", include]
        super().build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols  # it is loaded by ctypes and has no PyInit function


setup(
    ext_modules=[
        Extension(
            "flashmoe_jax.native._kernels",
            sources=[str(NATIVE / f"{name}.cc") for name in SOURCES],
            depends=[
                str(NATIVE / f"{name}.h")
                for name in ("isa", "kernels", "mix", "packed_rows", "parallel", "rounding", "tile")
            ],
            language="c++",
            extra_compile_args=FLAGS,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
