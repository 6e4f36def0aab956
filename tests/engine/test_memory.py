"""What the system says about memory, from files like those of control groups v1 and v2."""

from pathlib import Path

import psutil
import pytest

from flashmoe_jax.engine import memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "System":
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "cgroup").mkdir()
    return System(tmp_path)


class System:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, root: Path):
        self._root = root

    def belong_to(self, *lines: str) -> None:
        (self._root / "membership").write_text("".join(f"{line}\n" for line in lines))

    def group_v2(self, path: str, limit: int | str, used: int, cache: int = 0) -> None:
        folder = self._root / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\nactive_file {cache // 4}\ninactive_file {cache - cache // 4}\n")

    def group_v1(self, path: str, limit: int, used: int, cache: int = 0) -> None:
        folder = self._root / "cgroup" / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {cache}\ntotal_active_file 0\n")


def assert_free(free: int, total: int) -> None:
    machine = psutil.virtual_memory()
    assert machine.available > 100 * (1 << 20), "these tests need a machine with some memory"
    assert memory.available_bytes() == free
    assert memory.total_bytes() == total


SMALL = 64 << 20  # below what any machine that runs these tests has free


def test_without_control_groups_it_is_the_machine(system: System):
    assert memory.total_bytes() == psutil.virtual_memory().total
    assert abs(memory.available_bytes() - psutil.virtual_memory().available) < GIB


def test_version_2(system: System):
    system.belong_to("0::/user.slice/job")
    system.group_v2("user.slice/job", SMALL, 40 << 20)
    assert_free(24 << 20, SMALL)


def test_page_cache_can_be_reclaimed(system: System):
    system.belong_to("0::/job")
    system.group_v2("job", SMALL, 40 << 20, cache=30 << 20)
    assert_free(54 << 20, SMALL)
    system.belong_to("3:cpu:/", "9:memory:/job")
    system.group_v1("job", SMALL, 40 << 20, cache=30 << 20)
    assert_free(54 << 20, SMALL)


def test_a_group_is_bound_by_those_above_it(system: System):
    system.belong_to("0::/pod/container")
    system.group_v2("pod", SMALL, 60 << 20)
    system.group_v2("pod/container", "max", 10 << 20)
    assert_free(4 << 20, SMALL)
    system.group_v2("pod/container", 12 << 20, 10 << 20)
    assert_free(2 << 20, 12 << 20)


def test_inside_a_container_the_group_is_at_the_root(system: System):
    system.belong_to("0::/docker/0123456789")
    system.group_v2("", SMALL, 16 << 20)
    assert_free(48 << 20, SMALL)


def test_version_1_and_both_at_once(system: System):
    system.belong_to("11:devices:/a", "4:cpu,memory:/a/b", "0::/a/b")
    system.group_v1("", 1 << 62, 0)
    system.group_v1("a/b", SMALL, 60 << 20)
    assert_free(4 << 20, SMALL)


def test_no_limit_in_both_spellings(system: System):
    system.belong_to("0::/job", "4:memory:/job")
    system.group_v2("job", "max", 1 << 20)
    system.group_v1("job", (1 << 63) - 4096, 1 << 20)
    assert memory.total_bytes() == psutil.virtual_memory().total


def test_more_used_than_allowed_leaves_nothing(system: System):
    system.belong_to("0::/job")
    system.group_v2("job", SMALL, SMALL + 4096)
    assert_free(0, SMALL)


def test_own_memory_is_measured():
    assert 10 << 20 < memory.rss_bytes() <= memory.peak_rss_bytes() + (1 << 20)
