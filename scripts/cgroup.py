"""Control groups for measurements: a command under a memory limit, or with its reads throttled. Versions 1 and 2.

A group is made below the caller's own, so that it stays under the limits above; in version 2, where a group with
processes can have no children, beside it. Invariant: a group that was created is deleted with its context, and a
command runs in it from its first instruction on.

    with cgroup.create("bench", memory_bytes=4 << 30) as group:
        group.run(["program", "argument"])
        print(group.peak_bytes, group.oom_kills)
"""

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Joins the groups named before `--`, then becomes the command.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1"/cgroup.procs || exit 125; shift; done; shift; exec "$@"'
_SECONDS_TO_DELETE = 5.0
_SWAP_FILES = ("memory.swap.max", "memory.memsw.limit_in_bytes")  # absent where the kernel does not count swap


class CgroupError(Exception):
    """Control groups cannot be made here; one line that says why."""


@dataclasses.dataclass(frozen=True)
class Throttle:
    """Reads of the drive under `path` take at most so many bytes per second."""

    path: Path
    bytes_per_s: int


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """A group that exists: one directory in version 2, one for each controller in version 1."""

    directories: tuple[Path, ...]
    is_v2: bool

    def run(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.CompletedProcess[Any]:
        """As `subprocess.run`, inside the group."""
        return subprocess.run(["/bin/sh", "-c", _JOIN, "sh", *self.directories, "--", *command], **options)

    @property
    def peak_bytes(self) -> int | None:
        """Most memory that was charged to the group, page cache and kernel included; None where it is not told."""
        text = self._read("memory.peak" if self.is_v2 else "memory.max_usage_in_bytes")
        return None if text is None else int(text)

    @property
    def oom_kills(self) -> int | None:
        """Processes that were killed for want of memory; None without a memory limit."""
        text = self._read("memory.events" if self.is_v2 else "memory.oom_control")
        return None if text is None else int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))

    def delete(self) -> None:
        """Removes the group; its processes must have ended. May be called twice."""
        deadline = time.monotonic() + _SECONDS_TO_DELETE
        for directory in self.directories:
            while directory.exists():
                try:
                    directory.rmdir()
                except OSError as error:  # the last process may still be on its way out
                    if time.monotonic() > deadline:
                        raise CgroupError(f"{directory} cannot be removed: {error.strerror}") from error
                    time.sleep(0.05)

    def _read(self, name: str) -> str | None:
        files = [directory / name for directory in self.directories if (directory / name).exists()]
        return files[0].read_text() if files else None


@contextlib.contextmanager
def create(name: str, *, memory_bytes: int | None = None, throttle: Throttle | None = None) -> Iterator[Cgroup]:
    """A new group, deleted when the context is left.

    Args:
        name: of the group; the process id is added.
        memory_bytes: limit without swap, or None.
        throttle: of reads, or None.

    Raises:
        CgroupError: no right to, no such controller, or a drive that cannot be throttled.
    """
    is_v2 = (ROOT / "cgroup.controllers").exists()
    wanted: dict[str, dict[str, str]] = {}  # what to write into which file, by controller
    if memory_bytes is not None:
        wanted["memory"] = _memory_files(memory_bytes, is_v2)
    if throttle is not None:
        wanted["io" if is_v2 else "blkio"] = _throttle_files(throttle, is_v2)
    name = f"{name}-{os.getpid()}"
    made: list[Path] = []
    try:
        try:
            if is_v2:
                made.append(_make_v2(name, list(wanted)))
                for files in wanted.values():
                    _write(made[0], files)
            else:
                for controller, files in wanted.items():
                    made.append(_make_v1(name, controller))
                    _write(made[-1], files)
        except OSError as error:
            raise CgroupError(
                f"control groups cannot be made here ({error.filename or name}: {error.strerror}); run as root, and in "
                "a container in a privileged one"
            ) from error
        yield Cgroup(tuple(made), is_v2)
    finally:
        Cgroup(tuple(made), is_v2).delete()


def _memory_files(memory_bytes: int, is_v2: bool) -> dict[str, str]:
    """What is written to which file, in this order."""
    if is_v2:
        return {"memory.max": str(memory_bytes), _SWAP_FILES[0]: "0"}
    return {"memory.limit_in_bytes": str(memory_bytes), _SWAP_FILES[1]: str(memory_bytes)}


def _throttle_files(throttle: Throttle, is_v2: bool) -> dict[str, str]:
    device = disk_of(throttle.path)
    if is_v2:
        return {"io.max": f"{device} rbps={throttle.bytes_per_s}"}
    return {"blkio.throttle.read_bps_device": f"{device} {throttle.bytes_per_s}"}


def _write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        if name not in _SWAP_FILES or (directory / name).exists():
            (directory / name).write_text(text)


def _own_path(controller: str) -> str:
    """Path of the caller's group below the mount: of a version 1 controller, or of version 2 for ""."""
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    raise CgroupError(f"this system has no control groups for {controller or 'version 2'}")


def _make_v1(name: str, controller: str) -> Path:
    mount = ROOT / controller
    own = mount / _own_path(controller)
    # Inside a container the path is the host's, and the group is mounted at the root.
    directory = (own if own.exists() else mount) / name
    directory.mkdir()
    return directory


def _make_v2(name: str, controllers: list[str]) -> Path:
    own = ROOT / _own_path("")
    own = own if own.exists() else ROOT
    parent = own if own == ROOT or not (own / "cgroup.procs").read_text() else own.parent
    enabled = (parent / "cgroup.subtree_control").read_text().split()
    for controller in controllers:
        if controller not in enabled:
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    directory = parent / name
    directory.mkdir()
    return directory


def disk_of(path: Path) -> str:
    """`major:minor` of the whole disk under a path, which is what can be throttled.

    Raises:
        CgroupError: the file system is not on one disk, as with btrfs, overlays and network drives.
    """
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise CgroupError(f"{path} is not on a single disk that could be throttled; put it on one")
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()
