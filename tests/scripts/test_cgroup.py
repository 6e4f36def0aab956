"""Control groups: what is written where, in made-up systems of both versions, and a real one where there is one."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
LIMIT = 200 << 20


@pytest.fixture(scope="module")
def cgroup() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("cgroup")


@pytest.fixture
def system(cgroup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys/fs/cgroup and a drive; a directory there vanishes with its files."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cgroup, "disk_of", lambda path: "8:16")
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    (tmp_path / "root").mkdir()
    return tmp_path


def test_version_1_has_a_group_for_each_controller(cgroup: ModuleType, system: Path) -> None:
    (system / "membership").write_text("4:memory:/own\n7:blkio:/gone\n0::/\n")
    (system / "root/memory/own").mkdir(parents=True)
    (system / "root/blkio").mkdir()
    throttle = cgroup.Throttle(system, 10**9)
    with cgroup.create("g", memory_bytes=LIMIT, throttle=throttle) as group:
        memory, reads = group.directories
        assert memory.parent == system / "root/memory/own"
        assert reads.parent == system / "root/blkio"
        assert {f.name: f.read_text() for f in memory.iterdir()} == {"memory.limit_in_bytes": str(LIMIT)}
        assert (reads / "blkio.throttle.read_bps_device").read_text() == "8:16 1000000000"
        (memory / "memory.max_usage_in_bytes").write_text("123\n")
        (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
        assert (group.peak_bytes, group.oom_kills) == (123, 2)
    assert not memory.exists() and not reads.exists()


@pytest.mark.parametrize(("processes", "parent"), [("17\n", "slice"), ("", "slice/own")])
def test_version_2_makes_no_child_of_a_group_with_processes(
    cgroup: ModuleType, system: Path, processes: str, parent: str
) -> None:
    (system / "membership").write_text("0::/slice/own\n")
    (system / "root/slice/own").mkdir(parents=True)
    (system / "root/cgroup.controllers").write_text("io memory\n")
    (system / "root/slice/own/cgroup.procs").write_text(processes)
    subtree = system / "root" / parent / "cgroup.subtree_control"
    subtree.write_text("memory\n")
    with cgroup.create("g", memory_bytes=LIMIT, throttle=cgroup.Throttle(system, 5)) as group:
        (directory,) = group.directories
        assert directory.parent == system / "root" / parent
        assert (directory / "memory.max").read_text() == str(LIMIT)
        assert (directory / "io.max").read_text() == "8:16 rbps=5"
        assert subtree.read_text() == "+io"
        (directory / "memory.peak").write_text("77\n")
        (directory / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
        assert (group.peak_bytes, group.oom_kills) == (77, 1)
    assert not directory.exists()


def test_a_system_without_control_groups_is_one_line(cgroup: ModuleType, system: Path) -> None:
    (system / "membership").write_text("0::/\n")
    with pytest.raises(cgroup.CgroupError, match="no control groups for memory"), cgroup.create("g", memory_bytes=1):
        pass
    (system / "membership").write_text("4:memory:/\n")
    with pytest.raises(cgroup.CgroupError, match="cannot be made here"), cgroup.create("g", memory_bytes=1):
        pass


def test_a_command_runs_inside(cgroup: ModuleType) -> None:
    try:
        with cgroup.create("flashmoe-test", memory_bytes=LIMIT) as group:
            small = group.run([sys.executable, "-c", "print(len(b'x' * (50 << 20)))"], capture_output=True, text=True)
            assert (small.returncode, small.stdout) == (0, f"{50 << 20}\n")
            assert group.oom_kills == 0
            assert group.peak_bytes is None or 50 << 20 <= group.peak_bytes <= LIMIT
            large = group.run([sys.executable, "-c", "print(len(b'x' * (400 << 20)))"], capture_output=True, text=True)
            assert (large.returncode, large.stdout) == (-9, "")
            assert group.oom_kills == 1
    except cgroup.CgroupError as error:
        pytest.skip(str(error))
    assert not any(directory.exists() for directory in group.directories)
