"""Publishing a directory whole or not at all.

Owns the lock, the temporary sibling that a directory is built in, the free-space check and what happens to the
leftovers. Invariant: the final name appears by one rename after everything within was written, so a directory of
that name is whole, whenever the process was killed.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from checkpoints.progress import Reporter, format_bytes
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.experts.shard import fsync_directory, write_file

_RESUME_NAME = ".resume.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def staged_directory(out: Path, *, resume_key: str | None) -> Iterator[Path]:
    """Yields a directory to build in; it becomes `out` when the block ends without an error.

    Leftovers of a killed run with the same `resume_key` are handed over again, others (all, if it is None) are
    removed. An error or a full drive removes what was written; an interrupt keeps it for the next run, if that can
    use it.

    Raises:
        CheckpointError: `out` exists, another process builds it, or it cannot be written.
    """
    out = out.absolute()
    staging = staging_path(out)
    lock_path = out.with_name(f".{out.name}.lock")
    _refuse_existing(out)
    with _write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(lock_path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise CheckpointError(f"another process is writing {out}; wait until it is done") from None
    try:
        _refuse_existing(out)  # the holder of the lock before us may have made it
        try:
            with _write_errors(out):
                _prepare(staging, resume_key)
                yield staging
                (staging / _RESUME_NAME).unlink()
                fsync_directory(staging)
                os.rename(staging, out)
                fsync_directory(out.parent)
        except BaseException as error:
            if resume_key is not None and not isinstance(error, Exception):
                raise
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            if not staging.exists():
                lock_path.unlink(missing_ok=True)
    finally:
        lock.release()


def staging_path(out: Path) -> Path:
    """Where `out` is built: beside it, so that the rename stays on one file system."""
    out = out.absolute()
    return out.with_name(f".{out.name}.partial")


def announce_size(out: Path, num_bytes: int, reporter: Reporter) -> None:
    """Says how much will be written where and what is free there.

    Raises:
        CheckpointError: it does not fit.
    """
    out = out.absolute()
    existing = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(existing).free + _size_of_tree(staging_path(out))
    reporter.say(f"writing {format_bytes(num_bytes)} to {out} ({format_bytes(free)} free there)")
    if num_bytes > free:
        raise CheckpointError(
            f"{out} needs {format_bytes(num_bytes)} and {format_bytes(free)} are free there; "
            f"free {format_bytes(num_bytes - free)} or choose another --out"
        )


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already; choose another --out, or remove it first")


def _prepare(staging: Path, resume_key: str | None) -> None:
    marker = staging / _RESUME_NAME
    try:
        resumable = resume_key is not None and json.loads(marker.read_bytes())["key"] == resume_key
    except (OSError, ValueError, KeyError, TypeError):
        resumable = False
    if not resumable:
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
        write_file(marker, json.dumps({"key": resume_key}).encode())


@contextlib.contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    """Turns what the drive or the system refuses into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise CheckpointError(
                f"the drive became full while writing {out}; nothing was kept: free space, or choose another --out"
            ) from None
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}; choose another --out") from None
    except Exception as error:
        # tensorstore, under orbax, reports a full drive in words.
        if "No space left on device" in str(error) or "RESOURCE_EXHAUSTED" in str(error):
            raise CheckpointError(
                f"the drive became full while writing {out}; nothing was kept: free space, or choose another --out"
            ) from None
        raise


def _size_of_tree(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
