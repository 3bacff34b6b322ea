"""How much memory is available on the machine and in its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.system import memory

MEMINFO = "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\nHugePages_Total: 0\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces /proc and /sys/fs/cgroup, with 4000 KiB available and no limits."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "CGROUPS")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "self").mkdir()
    return tmp_path


def limit(folder: Path, maximum: str, used: int, cache: int, *, old: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{maximum}\n")
    (folder / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_inactive_file' if old else 'inactive_file'} {cache}\n")


def test_without_cgroups_it_is_the_machine_s(system: Path) -> None:
    assert memory.memory_available() == 4000 * 1024


def test_the_tightest_cgroup_above_counts_and_cache_is_no_use(system: Path) -> None:
    (system / "self/cgroup").write_text("0::/pods/mine\n")
    limit(system / "CGROUPS" / "pods", "1000000", 300_000, 50_000)
    limit(system / "CGROUPS" / "pods" / "mine", "max", 200_000, 0)
    assert memory.memory_available() == 750_000


def test_the_older_kind_of_cgroup(system: Path) -> None:
    (system / "self/cgroup").write_text("3:cpu,memory:/job\n2:pids:/other\n")
    limit(system / "CGROUPS" / "memory" / "job", "1000", 1500, 100, old=True)
    assert memory.memory_available() == 0


def test_this_machine_has_some() -> None:
    assert memory.memory_available() > 0
    assert memory.free(Path("/dev/shm")) > 0
    assert memory.free(Path("/nowhere/at/all")) == 0
