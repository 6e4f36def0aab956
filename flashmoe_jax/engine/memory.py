"""How much memory there is and how much this process uses, as the system reports it.

Reads /proc and the control group where they exist, psutil elsewhere. All numbers are bytes.
"""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """Most resident memory this process ever had."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss starts from the parent's peak after a fork; VmHWM is the process's own.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """What the system and the control groups (v1 or v2) still give to new allocations of this process."""
    free = [limit - used for limit, used in _cgroup_limits()]
    return max(0, min([psutil.virtual_memory().available, *free]))


def total_bytes() -> int:
    """Memory of the machine, or of the control group where that has less."""
    limit = cgroup_limit_bytes()
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def cgroup_limit_bytes() -> int | None:
    """The lowest limit of the control groups that this process is in; None where there is none."""
    return min((limit for limit, _ in _cgroup_limits()), default=None)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, used without page cache) of every control group with a limit that this process is in.

    A group is bound by the limits of the groups above it, too.
    """
    for directory in _own_cgroups(""):
        yield from _limit(directory, "memory.max", "memory.current", ("inactive_file", "active_file"))
    for directory in _own_cgroups("memory"):
        cache = ("total_inactive_file", "total_active_file")
        yield from _limit(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", cache)


def _limit(directory: Path, limit_name: str, used_name: str, cache: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    if not (directory / limit_name).exists():
        return
    text = (directory / limit_name).read_text().strip()
    # Version 1 says "no limit" by a number near 2**63.
    if text == "max" or int(text) >= 1 << 60:
        return
    statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    yield int(text), int((directory / used_name).read_text()) - sum(int(statistics.get(name, 0)) for name in cache)


def _own_cgroups(controller: str) -> Iterator[Path]:
    """Directories of this process's group and those above: of version 2 for "", of a version 1 controller otherwise."""
    if not _MEMBERSHIP.exists():
        return
    for line in _MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controller else _CGROUP
        own = root / path.lstrip("/")
        # Inside a container the path is the host's, and the group is mounted at the root.
        while own != root and own.exists():
            yield own
            own = own.parent
        yield root
