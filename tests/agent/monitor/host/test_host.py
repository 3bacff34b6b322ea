"""The inspections of the host, on files of a simulated machine and on this computer."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.monitor.all import INSPECTIONS
from agent.monitor.host import clock, cpu, disk_space, memory, mounts, ranks
from agent.monitor.inspection import RankSeen
from agent.reporting.observations import finding_message, finding_of
from agent.v1 import agent_pb2 as pb
from everstep.model.finding import Health, Owner
from everstep.system import procfs
from tests.agent.monitor.sites import SimulatedMachine, reasons

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with the files that the inspections read."""
    folder = tmp_path / "proc"
    (folder / "pressure").mkdir(parents=True)
    (folder / "self").mkdir()
    return folder


def write_memory(proc: Path, total: int, available: int) -> None:
    (proc / "meminfo").write_text(f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n")


@pytest.mark.parametrize("kind", [kind for kind in INSPECTIONS if ".host." in kind.__module__])
def test_each_finds_nothing_wrong_with_this_computer_that_names_it(kind: type, machine: SimulatedMachine) -> None:
    """This computer may be busy, and tests may run in a container. What is not known there is no fault."""
    seen = machine.inspect(machine.begin(kind))
    assert [found for found in seen.findings if found.verdict is Health.FAULTY] == []
    assert seen.measures or seen.facts or seen.note == "the agent uses no TLS" or kind is ranks.RanksInspection


def test_memory_that_is_nearly_used_up(machine: SimulatedMachine, proc: Path) -> None:
    write_memory(proc, 100 * GIB, 1 * GIB)
    [found] = machine.inspect(machine.begin(memory.MemoryInspection, proc=proc)).findings
    assert (found.reason, found.verdict) == ("memory-low", Health.UNKNOWN)


def test_memory_that_is_gone_after_a_start(machine: SimulatedMachine, proc: Path) -> None:
    write_memory(proc, 512 * GIB, 500 * GIB)
    machine.inspect(machine.begin(memory.MemoryInspection, proc=proc))
    machine.boot = "boot-2"
    write_memory(proc, 511 * GIB, 500 * GIB)
    assert reasons(machine.inspect(machine.begin(memory.MemoryInspection, proc=proc))) == []
    machine.boot = "boot-3"
    write_memory(proc, 448 * GIB, 440 * GIB)
    inspection = machine.begin(memory.MemoryInspection, proc=proc)
    assert reasons(machine.inspect(inspection)) == [("memory-lost", "")]
    inspection.forget("memory-low")
    assert reasons(machine.inspect(inspection)) == [("memory-lost", "")]
    inspection.forget("memory-lost")  # an operator removed a memory module on purpose
    assert reasons(machine.inspect(inspection)) == []
    write_memory(proc, 384 * GIB, 380 * GIB)
    assert reasons(machine.inspect(inspection)) == [("memory-lost", "")]


@pytest.mark.parametrize(("percent", "expected"), [("10.00", []), ("75.00", [("cpu-overload", "")])])
def test_processors_that_are_waited_for(machine: SimulatedMachine, proc: Path, percent: str, expected: object) -> None:
    (proc / "pressure/cpu").write_text(f"some avg10=0.00 avg60=0.00 avg300={percent} total=1\n")
    assert reasons(machine.inspect(machine.begin(cpu.CpuInspection, proc=proc))) == expected


def test_a_kernel_that_does_not_say_how_long_is_waited(machine: SimulatedMachine, proc: Path) -> None:
    assert reasons(machine.inspect(machine.begin(cpu.CpuInspection, proc=proc))) == []


def test_processors_that_are_gone(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch, proc: Path) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 64)
    machine.inspect(machine.begin(cpu.CpuInspection, proc=proc))
    monkeypatch.setattr(os, "sysconf", lambda name: 60)
    [found] = machine.inspect(machine.begin(cpu.CpuInspection, proc=proc)).findings
    assert (found.reason, found.text) == ("cpu-lost", "60 of 64 processors are online")
    inspection = machine.begin(cpu.CpuInspection, proc=proc)
    inspection.forget("cpu-lost")
    assert reasons(machine.inspect(inspection)) == []


def test_a_processor_that_is_too_hot_for_some_time(machine: SimulatedMachine, tmp_path: Path, proc: Path) -> None:
    folder = tmp_path / "sys/devices/system/cpu/cpu0"
    for name in ("thermal_throttle", "topology"):
        (folder / name).mkdir(parents=True)
    counter = folder / "thermal_throttle/package_throttle_count"
    (folder / "topology/physical_package_id").write_text("1\n")

    def inspect(count: int) -> list[tuple[str, str]]:
        counter.write_text(f"{count}\n")
        return reasons(machine.inspect(machine.begin(cpu.CpuInspection, sys=tmp_path / "sys", proc=proc)))

    assert inspect(500) == []  # these events happened at unknown times since the machine was started
    assert inspect(503) == [("cpu-hot", "processor 1")]
    machine.clock.pass_s(3600)
    assert inspect(503) == []
    assert inspect(2) == []  # the counter was reset


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB and 64 files."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=64", "everstep-test", str(folder)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"file systems cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_full_and_has_room_again(machine: SimulatedMachine, small_disk: Path) -> None:
    limits = disk_space.DiskSpaceLimits(paths=[str(small_disk), str(small_disk / "none")])
    inspection = machine.begin(disk_space.DiskSpaceInspection, limits)
    assert reasons(machine.inspect(inspection)) == []
    (small_disk / "fill").write_bytes(bytes(4 << 20))
    [found] = machine.inspect(inspection).findings
    assert (found.reason, found.item, found.verdict) == ("disk-full", str(small_disk), Health.FAULTY)
    (small_disk / "fill").unlink()
    for number in range(63):
        (small_disk / str(number)).touch()
    assert reasons(machine.inspect(inspection)) == [("disk-full-of-files", str(small_disk))]


def test_a_file_system_that_turns_read_only(machine: SimulatedMachine, small_disk: Path) -> None:
    needed = mounts.MountsLimits(required=[str(small_disk)])
    inspection = machine.begin(mounts.MountsInspection, needed)
    nobodys = machine.begin(mounts.MountsInspection)
    assert reasons(inspection.inspect()) == reasons(nobodys.inspect()) == []
    machine.inspect(inspection)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert reasons(nobodys.inspect()) == []  # the file system is on no disk, and no job needs it
    [found] = machine.inspect(machine.begin(mounts.MountsInspection, needed)).findings  # the next agent finds it too
    assert (found.reason, found.item, found.sure) == ("fs-readonly", str(small_disk), True)
    within = {"state_dir": small_disk.parent}  # the file system is mounted in the agent's own folder
    [found] = machine.inspect(machine.begin(mounts.MountsInspection, needed, **within)).findings
    assert (found.reason, found.owner, found.sure) == ("fs-readonly", Owner.MACHINE, True)
    elsewhere = machine.begin(mounts.MountsInspection, mounts.MountsLimits(), shared_folders=(small_disk.parent,))
    assert reasons(elsewhere.inspect()) == []
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert reasons(machine.inspect(inspection)) == []


MOUNTS = """\
24 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
25 24 0:5 / /proc rw - proc proc rw
26 24 0:40 / /data/with\\040space rw,relatime shared:1 - nfs4 10.0.0.5:/data rw,vers=4.2
27 24 8:2 / /was/read/only ro,relatime - ext4 /dev/sdb1 ro
"""


@pytest.mark.parametrize("point", ["/", "/scratch", "/opt/site", "/boot", "/mnt/others"])
def test_a_file_system_that_no_job_needs_may_be_read_only(machine: SimulatedMachine, proc: Path, point: str) -> None:
    """Ranks work on /scratch, and the settings require /opt/site."""
    row = "{} 1 8:{} / {} {},relatime - ext4 /dev/sd{} {}\n"
    points = ("/", "/scratch", "/opt/site", "/boot", "/mnt/others")

    def table(read_only: str) -> str:
        modes = ["ro" if each == read_only else "rw" for each in points]
        return "".join(row.format(20 + at, at, each, modes[at], at, modes[at]) for at, each in enumerate(points))

    (proc / "4711").mkdir()
    (proc / "4711/cwd").symlink_to("/scratch/gpt")
    ranks = [RankSeen("gpt", 0, 4711, alive=True)]
    limits = mounts.MountsLimits(required=["/opt/site"])
    inspection = machine.begin(mounts.MountsInspection, limits, proc=proc, ranks=lambda: ranks)
    (proc / "self/mountinfo").write_text(table(""))
    machine.inspect(inspection)
    (proc / "self/mountinfo").write_text(table(point))
    [found] = machine.inspect(inspection).findings
    is_needed = point in {"/", "/scratch", "/opt/site"}
    assert (found.reason, found.item) == ("fs-readonly", point)
    assert (found.verdict, found.sure) == ((Health.FAULTY, True) if is_needed else (Health.UNKNOWN, False))


def test_a_file_system_that_has_to_be_there_and_is_not(machine: SimulatedMachine, proc: Path) -> None:
    table = proc / "self/mountinfo"
    limits = mounts.MountsLimits(required=["/data/with space"])
    table.write_text(MOUNTS)
    assert reasons(machine.inspect(machine.begin(mounts.MountsInspection, limits, proc=proc))) == []
    table.write_text("".join(line for line in MOUNTS.splitlines(keepends=True) if "nfs4" not in line))
    assert reasons(machine.inspect(machine.begin(mounts.MountsInspection, proc=proc))) == []  # it is not required here
    machine.boot = "boot-2"
    expected = [("mount-missing", "/data/with space")]
    assert reasons(machine.inspect(machine.begin(mounts.MountsInspection, limits, proc=proc))) == expected


def test_mount_points_of_any_bytes(machine: SimulatedMachine, proc: Path) -> None:
    table = proc / "self/mountinfo"
    row = b"28 24 8:3 / /d/\xc3\xa9\\040\xff\xc2\x85 %s - ext4 /dev/sd\xfe rw\n"
    inspection = machine.begin(mounts.MountsInspection, proc=proc)
    table.write_bytes(row % b"rw")
    assert reasons(machine.inspect(inspection)) == []
    assert list(procfs.mounts(proc)) == [os.fsdecode(b"/d/\xc3\xa9 \xff\xc2\x85")]
    table.write_bytes(row % b"ro")
    [found] = machine.inspect(machine.begin(mounts.MountsInspection, proc=proc)).findings
    assert (found.reason, found.item) == ("fs-readonly", "/d/é \\xff\x85")
    inspection.forget("fs-readonly")
    assert reasons(machine.inspect(inspection)) == []
    assert finding_of(pb.Finding.FromString(finding_message(found).SerializeToString())) == found


def test_hundreds_of_network_file_systems_that_answer(machine: SimulatedMachine, proc: Path) -> None:
    rows = [f"{number} 24 0:{number} / /tmp rw - nfs4 10.0.0.5:/{number} rw\n" for number in range(300)]
    (proc / "self/mountinfo").write_text("".join(row.replace("/tmp", f"/tmp/{n}") for n, row in enumerate(rows)))
    inspection = machine.begin(mounts.MountsInspection, proc=proc)
    for _ in range(5):
        assert reasons(inspection.inspect()) == []
        time.sleep(0.02)


def test_a_network_file_system_that_hangs_holds_up_nobody(
    machine: SimulatedMachine, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proc / "self/mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(os, "statvfs", lambda path: time.sleep(1.5))
    inspection = machine.begin(mounts.MountsInspection, mounts.MountsLimits(answer_s=0.05), proc=proc)
    assert reasons(inspection.inspect()) == []
    time.sleep(0.1)
    [found] = inspection.inspect().findings
    assert (found.reason, found.item, found.verdict) == ("mount-hangs", "/data/with space", Health.UNKNOWN)


def test_a_clock_that_is_set_is_told_for_some_time(machine: SimulatedMachine) -> None:
    inspection = machine.begin(clock.ClockInspection)
    inspection.synced = lambda: True  # type: ignore[attr-defined]
    machine.clock.ns = time.time_ns()
    assert reasons(machine.inspect(inspection)) == []
    machine.clock.pass_s(30)
    [found] = machine.inspect(inspection).findings
    assert (found.reason, found.verdict) == ("clock-jumped", Health.UNKNOWN)


def test_a_clock_that_was_never_held_is_none_that_was_lost(machine: SimulatedMachine) -> None:
    inspection = machine.begin(clock.ClockInspection)
    machine.clock.ns = time.time_ns()
    found = []
    for synced in (False, True, False):
        inspection.synced = lambda synced=synced: synced  # type: ignore[attr-defined]
        found.append(reasons(machine.inspect(inspection)))
    assert found == [[], [], [("clock-unsynced", "")]]


def test_kills_for_memory_are_counted_from_the_first_look_on(
    machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([7, 9, 9])
    monkeypatch.setattr(ranks, "oom_kills", lambda: next(counts))
    assert reasons(machine.inspect(machine.begin(ranks.RanksInspection))) == []
    assert reasons(machine.inspect(machine.begin(ranks.RanksInspection))) == [("oom-kill-counted", "")]
    machine.clock.pass_s(3600)
    assert reasons(machine.inspect(machine.begin(ranks.RanksInspection))) == []


def test_a_rank_that_is_stopped_is_named_and_its_time_is_measured(machine: SimulatedMachine) -> None:
    process = subprocess.Popen([shutil.which("sleep") or "sleep", "60"])
    try:
        process.send_signal(19)
        seen = [RankSeen("gpt", 3, process.pid, alive=True), RankSeen("gpt", 4, process.pid, alive=False)]
        inspection = machine.begin(ranks.RanksInspection, ranks.RanksLimits(waits_s=0.01), ranks=lambda: seen)
        deadline = time.monotonic() + 20
        while not (result := machine.inspect(inspection)).findings:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert reasons(result) == [("rank-stopped", "rank 3 of gpt")]
        assert 'rank_cpu_seconds_total{job="gpt",rank="3"}' in result.measures
    finally:
        process.kill()
        process.wait()
