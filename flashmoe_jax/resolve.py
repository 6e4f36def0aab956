"""From what a user calls a model to the directory of a converted one.

Owns the cache of conversions: one directory per source, keyed by a fingerprint of its files, made under a lock. Does
not own the conversion (`checkpoints.convert`). Needs no JAX unless something must be converted. Invariant: a path that
is returned holds a manifest; a source whose files change gets a new directory.
"""

import hashlib
import importlib.resources
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
import platformdirs

from flashmoe_jax.errors import CheckpointError, ConfigError

# The directory format that conversions of this version have; model_dir.FORMAT_VERSION, which costs an import of JAX.
FORMAT_VERSION = 1
CACHE_VARIABLE = "FLASHMOE_CACHE"

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@([\w./-]+))?")
_SOURCE_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
_HUB_ALLOW = [f"*{suffix}" for suffix in _SOURCE_SUFFIXES]
# Second copies of the weights in other forms, which some repositories carry along.
_HUB_IGNORE = ["consolidated*", "original/*", "onnx/*", "openvino/*", "*adapter*"]

Convert = Callable[[Path, Path], object]
Say = Callable[[str], None]


def resolve_model(
    name: str | os.PathLike[str] | None,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    convert: Convert | None = None,
    say: Say | None = None,
) -> Path:
    """Model directory of `name`, converted on first use.

    Args:
        name: a model directory, a Hugging Face directory, a hub name such as `org/name` or `org/name@revision`, or
            None for the bundled model.
        cache_dir: where conversions are kept; None for `default_cache_dir()`.
        convert: `convert(hf_dir, out_dir)`; by default `checkpoints.convert.convert`.
        say: gets one line for each thing that takes time; by default written to stderr.

    Raises:
        CheckpointError: nothing usable under that name; conversion errors.
        ConfigError: a cache directory that cannot be written.
    """
    say = say or _say
    source = _bundled() if name is None else _local_or_hub(os.fspath(name), say)
    if (source / "manifest.json").is_file():
        return source
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} holds neither manifest.json (a model directory) nor config.json (a Hugging Face directory); "
            "give --model one of them, or a hub name such as allenai/OLMoE-1B-7B-0924"
        )
    return _converted(source, Path(cache_dir or default_cache_dir()), convert or _convert, say)


def default_cache_dir() -> Path:
    """`$FLASHMOE_CACHE`, else the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("flashmoe_jax", appauthor=False))


def fingerprint(source: Path) -> str:
    """Hex digest over the names, sizes and times of the files that a conversion reads, and all of config.json."""
    digest = hashlib.sha256(f"format {FORMAT_VERSION}\n".encode())
    for path in _source_files(source):
        state = path.stat()
        digest.update(f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    digest.update((source / "config.json").read_bytes())
    return digest.hexdigest()


def _converted(source: Path, cache_dir: Path, convert: Convert, say: Say) -> Path:
    source = source.resolve()
    # The place of a source and the state of its files are told apart, so that older conversions can be pointed out.
    place = f"{_slug(source.name)}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:8]}"
    target = cache_dir.expanduser().absolute() / "models" / f"{place}-{fingerprint(source)[:16]}"
    if (target / "manifest.json").is_file():
        return target
    lock = filelock.FileLock(target.with_name(f"{target.name}.lock"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say(f"another process is converting {source}; waiting for it")
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"the cache directory {cache_dir} cannot be written ({error.strerror}); give another with --cache-dir DIR "
            f"or the environment variable {CACHE_VARIABLE}"
        ) from error
    try:
        if not (target / "manifest.json").is_file():
            num_bytes = sum(p.stat().st_size for p in _source_files(source) if p.suffix == ".safetensors")
            say(f"first use of {source}: converting {_format_bytes(num_bytes)} into {target}")
            convert(source, target)
            for old in sorted(target.parent.glob(f"{place}-*/manifest.json")):
                if old.parent != target:
                    say(f"{old.parent} is of an earlier state of this model and may be deleted")
    finally:
        lock.release()
    return target


def _bundled() -> Path:
    path = Path(str(importlib.resources.files("checkpoints") / "demo"))
    if not (path / "config.json").is_file():
        raise CheckpointError("this installation carries no bundled model; give --model DIR or a hub name")
    return path


def _local_or_hub(name: str, say: Say) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{name} is a file; --model takes a directory or a hub name")
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"{name} does not exist; --model takes a directory, or a hub name such as allenai/OLMoE-1B-7B-0924"
        )
    return _download(match[1], match[2], say)


def _download(repository: str, revision: str | None, say: Say) -> Path:
    """Snapshot of a hub repository in the hub's own cache."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{repository} is no directory here, and hub names need the extra 'hub': pip install 'flashmoe-jax[hub]'"
        ) from error
    say(f"{repository} is no directory here; asking the Hugging Face hub for it")
    try:
        path = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_HUB_ALLOW, ignore_patterns=_HUB_IGNORE
        )
    except Exception as error:  # offline, unknown, gated, disk full: the library has a dozen unrelated types
        raise CheckpointError(
            f"{repository} is no directory here, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {_first_line(error)}); check the name and the network, or download it elsewhere "
            f"with 'hf download {repository} --local-dir DIR' and give --model DIR"
        ) from error
    return Path(path)


def _source_files(source: Path) -> list[Path]:
    policies = source.glob("policy/**/*")
    files = [p for p in source.iterdir() if p.suffix in _SOURCE_SUFFIXES]
    return sorted(p for p in (*files, *policies) if p.is_file())


def _convert(source: Path, target: Path) -> None:
    from checkpoints.convert import convert
    from checkpoints.progress import ConsoleReporter

    convert(source, target, progress=ConsoleReporter())


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)[:48] or "model"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
