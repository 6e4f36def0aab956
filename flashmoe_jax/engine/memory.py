"""How much memory there is and how much this process uses, as the system reports it.

Reads /proc and the control group where they exist, psutil elsewhere. All numbers are bytes.
"""

import resource
import sys
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


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
    """What the system and the control group (v1 or v2) still give to new allocations of this process."""
    available = psutil.virtual_memory().available
    limit = _cgroup_limit()
    if limit is None:
        return available
    limit_bytes, used_bytes = limit
    return max(0, min(available, limit_bytes - used_bytes))


def _cgroup_limit() -> tuple[int, int] | None:
    """(limit, used without reclaimable page cache) of this process's control group; None where there is no limit."""
    for directory, limit_name, used_name, inactive in (
        (_own_cgroup(""), "memory.max", "memory.current", "inactive_file"),
        (_own_cgroup("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if directory is None or not (directory / limit_name).exists():
            continue
        text = (directory / limit_name).read_text().strip()
        # Version 1 says "no limit" by a number near 2**63.
        if text == "max" or int(text) >= 1 << 60:
            continue
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        used = int((directory / used_name).read_text()) - int(statistics.get(inactive, 0))
        return int(text), used
    return None


def _own_cgroup(controller: str) -> Path | None:
    """Directory of this process's group: of version 2 for "", of a version 1 controller otherwise."""
    membership = Path("/proc/self/cgroup")
    if not membership.exists():
        return None
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controller else _CGROUP
        own = root / path.lstrip("/")
        # Inside a container the path is the host's, and the group is mounted at the root.
        return own if own.exists() else root
    return None
