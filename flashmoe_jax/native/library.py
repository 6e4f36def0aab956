"""Finding, checking and registering the compiled library.

The library is optional: a wheel without it, an install without a compiler, or a jaxlib that it does not fit leaves the
XLA path. Invariant: `load` either registers every call or none, and never raises.
"""

import ctypes
import dataclasses
import functools
import importlib.machinery
import logging
import os
import re
from pathlib import Path

import jax

KERNELS_VARIABLE = "FLASHMOE_KERNELS"
# Names of the levels of kernels.h, in its order; `auto` is the best that the processor has.
ISA_LEVELS = ("auto", "portable", "avx2", "avx512", "avx512_bf16")
_CALLS = ("flashmoe_matmul", "flashmoe_expert_ffn", "flashmoe_expert_ffn_group", "flashmoe_attend")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Library:
    """Outcome of loading: usable or not, and why not."""

    is_loaded: bool
    reason: str = ""  # empty if loaded
    isa: str = ""  # the level that `auto` takes
    isa_levels: tuple[str, ...] = ()  # all that this processor runs, `auto` not among them


@functools.cache
def load() -> Library:
    """Loads and registers the library once per process.

    `FLASHMOE_KERNELS=xla` in the environment leaves it alone. Otherwise a library that cannot be used is reported by
    one line of the log.
    """
    if os.environ.get(KERNELS_VARIABLE, "auto") == "xla":
        return Library(False, f"{KERNELS_VARIABLE}=xla")
    if not _has_cpu_backend():
        return Library(False, "JAX runs without its CPU backend")
    path = find_library(Path(__file__).parent)
    if path is None:
        return _refuse("they were not built (no C++ compiler when the package was installed)")
    try:
        library = ctypes.CDLL(str(path))
        built = (library.flashmoe_ffi_major(), library.flashmoe_ffi_minor())
        handlers = [(name, jax.ffi.pycapsule(getattr(library, name))) for name in _CALLS]
    except (OSError, AttributeError) as error:
        return _refuse(f"{path.name} cannot be loaded ({error})")
    mismatch = version_mismatch(built, runtime_version(Path(jax.ffi.include_dir())))
    if mismatch:
        return _refuse(mismatch)
    try:
        # The backend is up, so that a call that it refuses is an error here and not one that stops it later.
        for name, handler in handlers:
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception as error:
        return _refuse(f"this jaxlib refuses them ({str(error).splitlines()[0]})")
    levels = tuple(name for i, name in enumerate(ISA_LEVELS) if i and library.flashmoe_isa_supported(i))
    return Library(True, isa=ISA_LEVELS[library.flashmoe_best_isa()], isa_levels=levels)


def find_library(directory: Path) -> Path | None:
    """The library for this interpreter in `directory`, if there is one."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = directory / f"_kernels{suffix}"
        if path.is_file():
            return path
    return None


def runtime_version(include_dir: Path) -> tuple[int, int] | None:
    """Interface version of the running jaxlib, from the headers that it ships; None if they are not there."""
    try:
        text = (include_dir / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    if numbers[0] is None or numbers[1] is None:
        return None
    return int(numbers[0][1]), int(numbers[1][1])


def version_mismatch(built: tuple[int, int], runtime: tuple[int, int] | None) -> str:
    """Why a library of interface version `built` must not be registered with `runtime`; empty if it may."""
    if runtime is None:
        return "the interface version of this jaxlib is unknown"
    if built[0] != runtime[0] or built[1] > runtime[1]:
        return (
            f"they were built for interface {built[0]}.{built[1]} of XLA and this jaxlib has "
            f"{runtime[0]}.{runtime[1]}: reinstall the package"
        )
    return ""


def _has_cpu_backend() -> bool:
    """Whether JAX has one; starts it."""
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False


def _refuse(reason: str) -> Library:
    _log.warning("CPU kernels are not used, the slower XLA code is: %s", reason)
    return Library(False, reason)
