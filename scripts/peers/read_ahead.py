"""The read-ahead of the device under a file: read it, change it for a while, put it back.

Owns two ways to change it: of the drive itself, where that is writable, or of a loop device over the file, which takes
its own setting and reads the file with direct I/O, so that nothing is cached twice. Invariant: what was changed is
put back, and a loop device detached, when the block ends, also on Ctrl-C.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

WAYS = ("auto", "drive", "loop")


class ReadAheadError(Exception):
    """The read-ahead cannot be changed; the text says why and what to do."""


def setting_file(path: Path) -> Path:
    """The kernel's file with the read-ahead, in KiB, of the device that holds `path`."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    own = Path("/sys/class/bdi") / number / "read_ahead_kb"
    if own.exists():
        return own
    # A partition has its disk's.
    return Path(os.path.realpath(Path("/sys/dev/block") / number)).parent / "queue" / "read_ahead_kb"


def read_ahead_bytes(path: Path) -> int | None:
    """Read-ahead of the device that holds `path`; None where the kernel does not say."""
    try:
        return int(setting_file(path).read_text()) * 1024
    except OSError:
        return None


@contextlib.contextmanager
def file_with_read_ahead(path: Path, num_bytes: int | None, way: str = "auto") -> Iterator[Path]:
    """A path to the file's bytes on a device with this read-ahead.

    Args:
        path: of the file.
        num_bytes: of read-ahead; None for the device's own, which changes nothing.
        way: one of WAYS; "auto" sets the drive's where that is writable and makes a loop device elsewhere.

    Raises:
        ReadAheadError: neither is possible.
    """
    if num_bytes is None:
        yield path
        return
    setting = setting_file(path)
    if way == "drive" or (way == "auto" and os.access(setting, os.W_OK)):
        with _drive(setting, num_bytes):
            yield path
    else:
        with _loop(path, num_bytes) as device:
            yield device


@contextlib.contextmanager
def _drive(setting: Path, num_bytes: int) -> Iterator[None]:
    try:
        before = setting.read_text()
        setting.write_text(str(num_bytes // 1024))
    except OSError as error:
        raise ReadAheadError(
            f"{setting} cannot be set ({error.strerror}); run as root, or leave out --read-ahead"
        ) from None
    try:
        yield
    finally:
        setting.write_text(before)


@contextlib.contextmanager
def _loop(path: Path, num_bytes: int) -> Iterator[Path]:
    device = _call("losetup", "--find", "--show", "--read-only", "--direct-io=on", str(path))
    try:
        _call("blockdev", "--setra", str(num_bytes // 512), device)
        yield Path(device)
    finally:
        _call("losetup", "--detach", device)


def _call(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        raise ReadAheadError(f"{command[0]} failed ({reason}); run as root, or leave out --read-ahead") from None
