"""The kernel log, read from a pipe in place of the device, and from the real device."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.inspection import Inspection, RankSeen
from agent.monitor.kernel import shared
from agent.monitor.kernel.log import KernelLog, KernelLogInspection, KernelLogLimits
from agent.monitor.kernel.parts_of_jobs import PartsOfJobs
from everstep.errors import CannotInspect
from everstep.model.finding import Health, Owner
from tests.agent.monitor.sites import SimulatedMachine, reasons

FELL_OFF = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
EXCEPTION = "NVRM: Xid (PCI:0000:05:00): 13, pid=4711, name=python3, Graphics SM Warp Exception on (GPC 9, TPC 5, SM 0)"
REMOVED = "NVRM: Xid (PCI:0000:05:00): 45, pid=4711, name=python3, Ch 00000010"
NO_WAIT = KernelLogLimits(interval_s=0.001)


class Device:
    """A pipe in place of the device. Each read returns one record if the records are written one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.last = 99

    def write(self, text: str, *, priority: int = 3, ago_s: float = 0.0, sequence: int = 0) -> None:
        self.last = sequence or self.last + 1
        since_boot_us = time.monotonic_ns() // 1000 - round(ago_s * 1e6)
        os.write(self._file, f"{priority},{self.last},{since_boot_us},-;{text}\n KEY=value\n".encode())

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path / "kmsg")
    yield made
    made.close()


def begin(machine: SimulatedMachine, device: Device, **site: Any) -> Inspection:
    return machine.begin(KernelLogInspection, NO_WAIT, kernel_log=device.path, **site)


def told(machine: SimulatedMachine, device: Device, *lines: str, **site: Any) -> list[tuple[str, str]]:
    inspection = begin(machine, device, **site)
    for line in lines:
        device.write(line)
        seen = machine.inspect(inspection)
    return reasons(seen)


def test_a_gpu_that_fell_off_the_bus_names_the_machine_until_a_reboot(
    machine: SimulatedMachine, device: Device
) -> None:
    assert told(machine, device, FELL_OFF) == [("xid-79", "GPU 0000:05:00")]
    machine.clock.pass_s(30 * 24 * 3600)
    inspection = begin(machine, device)
    [found] = machine.inspect(inspection).findings
    assert (found.verdict, found.owner, found.sure) == (Health.FAULTY, Owner.MACHINE, True)
    machine.boot = "boot-2"
    assert machine.inspect(begin(machine, device)).findings == []


OWN, OTHERS = "0000:03:00.0", "0000:07:00.0"
DOUBLE_BIT = "NVRM: Xid (PCI:{}): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC error"
LINK_FATAL = "NVRM: Xid (PCI:0000:03:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 6"
CHANGED = "NVRM: Xid (PCI:0000:03:00): 154, GPU recovery action changed from {} to {}"


def with_gpus(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch, *usable: str) -> dict[str, Path]:
    """Make the folders of a machine with two GPUs. The agent may use only the given ones."""
    folders = {"sys": machine.folder / "sys", "proc": machine.folder / "proc"}
    driver, dev = folders["sys"] / "bus/pci/drivers/nvidia", machine.folder / "dev"
    driver.mkdir(parents=True)
    dev.mkdir()
    for minor, address in enumerate((OWN, OTHERS)):
        device = folders["sys"] / "bus/pci/devices" / address
        gpu = folders["proc"] / "driver/nvidia/gpus" / address
        for folder in (device, gpu):
            folder.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        (device / "driver").symlink_to(driver)
        (gpu / "information").write_text(f"Model: H100\nDevice Minor: {minor}\n")
        if address in usable:
            (dev / f"nvidia{minor}").touch()
    monkeypatch.setattr(PartsOfJobs, "dev", dev)
    return folders


@pytest.mark.parametrize(
    ("usable", "address", "is_ours"),
    [
        ((OWN,), "0000:03:00", True),
        ((OWN,), "0000:07:00", False),  # this GPU belongs to another tenant
        ((OWN, OTHERS), "0000:07:00", True),
        ((OWN,), "0000:09:00", False),  # this GPU is gone, and was perhaps another tenant's
        ((OWN, OTHERS), "0000:09:00", True),
        ((OWN,), "0000:03:00 GPU-I:02", True),  # a part of a GPU
    ],
)
def test_an_xid_of_a_gpu_that_the_agent_may_not_use_is_no_sure_fault(
    machine: SimulatedMachine,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    usable: tuple[str, ...],
    address: str,
    is_ours: bool,
) -> None:
    inspection = begin(machine, device, **with_gpus(machine, monkeypatch, *usable))
    device.write(DOUBLE_BIT.format(address))
    [found] = machine.inspect(inspection).findings
    assert found.reason == "xid-48"
    assert (found.verdict, found.sure) == ((Health.FAULTY, True) if is_ours else (Health.UNKNOWN, False))


def test_a_gpu_that_lost_its_driver_still_belongs_to_the_agent(
    machine: SimulatedMachine, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = with_gpus(machine, monkeypatch, OWN)
    inspection = begin(machine, device, **folders)
    (folders["sys"] / "bus/pci/devices" / OWN / "driver").unlink()
    device.write(FELL_OFF.replace("0000:05:00", "0000:03:00"))
    [found] = machine.inspect(inspection).findings
    assert found.sure


@pytest.mark.parametrize(("pid", "is_ours"), [("4711", True), ("999999", False), ("'<unknown>'", True)])
def test_without_visible_gpus_the_process_shows_whether_an_xid_is_ours(
    machine: SimulatedMachine, device: Device, tmp_path: Path, pid: str, is_ours: bool
) -> None:
    ranks = [RankSeen("gpt", 0, 4711, alive=True)]
    inspection = begin(machine, device, ranks=lambda: ranks, sys=tmp_path, proc=tmp_path)
    device.write(f"NVRM: Xid (PCI:0000:07:00): 48, pid={pid}, name=python3, DBE (double bit error)")
    [found] = machine.inspect(inspection).findings
    assert found.sure is is_ours


def test_an_xid_is_over_only_when_the_gpu_is_healthy_again(machine: SimulatedMachine, device: Device) -> None:
    gpus: dict[str, int] = {}
    inspection = begin(machine, device, healthy_gpus=gpus)
    device.write(LINK_FATAL)

    def sure() -> bool:
        [found] = machine.inspect(inspection).findings
        return found.sure

    assert sure()
    gpus["GPU 0000:03:00"] = machine.clock.ns
    assert sure(), "the GPU looked healthy at the same moment, before the driver could notice the fault"
    gpus["GPU 0000:07:00"] = machine.clock.ns + 60 * 10**9
    assert sure(), "only another GPU is healthy"
    gpus["GPU 0000:03:00"] = machine.clock.ns + 60 * 10**9
    assert not sure()
    machine.clock.pass_s(120)
    device.write(LINK_FATAL)
    assert sure(), "the fault happened again after the repair"


def test_an_xid_is_over_when_the_driver_requests_no_recovery_any_more(
    machine: SimulatedMachine, device: Device
) -> None:
    def sure(ago_s: float, *lines: str) -> set[str]:
        for line in lines:
            device.write(line, ago_s=ago_s)
            seen = machine.inspect(inspection)
        return {found.reason for found in seen.findings if found.sure}

    inspection = begin(machine, device)
    asked = CHANGED.format("0x0 (None)", "0x1 (GPU Reset Required)")
    assert sure(50, LINK_FATAL, asked) == {"xid-74", "xid-154-action"}
    assert sure(40, CHANGED.format("0x1 (GPU Reset Required)", "0x0 (None)")) == set()
    assert sure(30, asked) == {"xid-154-action"}


@pytest.mark.parametrize(
    ("line", "ago_s", "is_sure"), [(LINK_FATAL, 3600, False), (LINK_FATAL, 60, True), (FELL_OFF, 3600, True)]
)
def test_an_old_xid_that_a_reset_heals_is_no_fault_for_the_first_agent(
    machine: SimulatedMachine, device: Device, line: str, ago_s: float, is_sure: bool
) -> None:
    inspection = begin(machine, device)
    device.write(line, ago_s=ago_s)
    [found] = machine.inspect(inspection).findings
    assert found.sure is is_sure


TABLE = """\
24 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
31 24 8:17 / /mnt/others rw,relatime - ext4 /dev/sdb1 rw
32 24 8:33 / {required} rw,relatime - ext4 /dev/nvme0n1p2 rw
"""


@pytest.mark.parametrize(
    ("line", "is_ours"),
    [
        ("EXT4-fs (sda1): Remounting filesystem read-only", True),
        ("EXT4-fs (sdb1): Remounting filesystem read-only", False),
        ("EXT4-fs (sdc1): Remounting filesystem read-only", False),
        ("nvme nvme0: Disabling device after reset failure: -19", True),
        ("nvme nvme1: Disabling device after reset failure: -19", False),
    ],
)
def test_an_error_of_a_disk_without_job_files_is_no_sure_fault(
    machine: SimulatedMachine, device: Device, line: str, is_ours: bool
) -> None:
    proc = machine.folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text(TABLE.format(required=machine.folder / "state"))
    inspection = begin(machine, device, proc=proc)
    device.write(line)
    [found] = machine.inspect(inspection).findings
    assert (found.verdict, found.sure) == ((Health.FAULTY, True) if is_ours else (Health.UNKNOWN, False))


def test_an_xid_that_a_program_caused_is_no_fault_and_soon_over(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    device.write(EXCEPTION)
    [found] = machine.inspect(inspection).findings
    assert (found.verdict, found.owner) == (Health.UNKNOWN, Owner.CODE)
    machine.clock.pass_s(3600)
    assert machine.inspect(inspection).findings == []


def test_an_xid_about_removed_work_leads_to_no_conclusion(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    for _ in range(8):
        device.write(REMOVED)
        seen = machine.inspect(inspection)
    [found] = seen.findings
    assert (found.verdict, found.owner, found.sure) == (Health.UNKNOWN, Owner.UNKNOWN, False)
    assert found.text.endswith("(8 times)")


def test_a_restarted_agent_counts_each_line_once(machine: SimulatedMachine, device: Device) -> None:
    assert told(machine, device, EXCEPTION) == [("xid-13", "GPU 0000:05:00")]
    inspection = begin(machine, device)
    device.write(EXCEPTION, sequence=device.last)  # a restarted agent reads all records of the device again
    [found] = machine.inspect(inspection).findings
    assert "times" not in found.text


def test_a_line_that_a_process_wrote_counts_only_with_the_tag(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    device.write(FELL_OFF, priority=11)
    assert machine.inspect(inspection).findings == []
    tagged = begin(machine, device, kernel_log_tag="drill c1/m1")
    for owner in ("m2", "m1"):
        device.write(f"drill c1/{owner}: {FELL_OFF}", priority=11)
        seen = machine.inspect(tagged)
    assert reasons(seen) == [("xid-79", "GPU 0000:05:00")]


@pytest.mark.parametrize(
    ("cgroup", "expected"), [("Memory cgroup out of memory", "oom-kill-limit"), ("Out of memory", "oom-kill")]
)
def test_a_rank_that_the_oom_killer_ended_is_named(
    machine: SimulatedMachine, device: Device, cgroup: str, expected: str
) -> None:
    ranks = [RankSeen("gpt", 5, 4711, alive=False)]
    line = f"{cgroup}: Killed process 4711 (python3) total-vm:1kB, anon-rss:1kB, UID:0 pgtables:1kB oom_score_adj:0"
    assert told(machine, device, line, ranks=lambda: ranks) == [(expected, "rank 5 of gpt")]


def test_the_age_of_a_line_counts_from_its_own_time(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    device.write(EXCEPTION, ago_s=7200)
    assert machine.inspect(inspection).findings == []


def test_lines_that_were_overwritten_are_counted(machine: SimulatedMachine, device: Device) -> None:
    log = KernelLog(device.path)
    device.write("one")
    assert [line.text for line in log.read(1.0)] == ["one"]
    device.write("five", sequence=device.last + 4)
    assert [line.text for line in log.read(1.0)] == ["five"]
    assert log.missed == 3
    log.close()


def test_a_hurried_look_does_not_wait(machine: SimulatedMachine, device: Device) -> None:
    inspection = machine.begin(KernelLogInspection, KernelLogLimits(interval_s=3600), kernel_log=device.path)
    for _ in range(2):
        inspection.hurry()
        assert inspection.inspect().findings == []


def test_a_fault_that_recurs_after_a_repair_is_a_new_finding(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    for ago_s in (50, 40):
        device.write(FELL_OFF, ago_s=ago_s)
        [first] = machine.inspect(inspection).findings
    assert first.last_ns > first.since_ns
    inspection.forget("xid-79")
    device.write(FELL_OFF, ago_s=10)
    [again] = machine.inspect(inspection).findings
    assert (again.last_ns, "times" in again.text) == (0, False)
    assert again.since_ns > first.last_ns


def test_lost_lines_are_a_finding_for_some_time(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    device.write("one")
    assert machine.inspect(inspection).findings == []
    device.write("five", sequence=device.last + 4)
    [found] = machine.inspect(inspection).findings
    assert (found.reason, found.verdict, found.owner) == ("kernel-log-lost", Health.UNKNOWN, Owner.UNKNOWN)
    assert re.fullmatch(r"3 records \(101 to 103\), written after 20.* UTC and before 20.* UTC", found.evidence[0])
    device.write("seven", priority=14, sequence=device.last + 2)  # record 105 was lost while the agent restarted
    [found] = machine.inspect(begin(machine, device)).findings
    assert found.evidence[1].startswith("record 105, written after 20")
    machine.clock.pass_s(3600)
    assert machine.inspect(begin(machine, device)).findings == []


def test_lines_lost_before_the_first_look_are_no_finding(machine: SimulatedMachine, device: Device) -> None:
    inspection = begin(machine, device)
    device.write("old", sequence=5000)
    assert machine.inspect(inspection).findings == []


@pytest.mark.parametrize("record", ["", "no record", "3,x,1,-;text", "3;text"])
def test_invalid_records_are_skipped(machine: SimulatedMachine, device: Device, record: str) -> None:
    log = KernelLog(device.path)
    os.write(device._file, (record or "\n").encode())
    assert list(log.read(1.0)) == []
    log.close()


def test_a_log_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(CannotInspect, match="cannot be read"):
        list(KernelLog(tmp_path / "none").read(0))


def test_the_real_device(machine: SimulatedMachine) -> None:
    """Write a line to ``/dev/kmsg`` and find it.

    If this process may not write there, the test checks only that an unreadable log is an error.
    """
    tag = f"everstep test {os.getpid()}"
    inspection = machine.begin(KernelLogInspection, KernelLogLimits(interval_s=5), kernel_log_tag=tag)
    machine.clock.ns = time.time_ns()
    try:
        Path("/dev/kmsg").write_text(f"<3>{tag}: {FELL_OFF}\n")
    except OSError:
        if not os.access("/dev/kmsg", os.R_OK):
            with pytest.raises(CannotInspect):
                inspection.inspect()
        return
    deadline = time.monotonic() + 20
    while ("xid-79", "GPU 0000:05:00") not in reasons(inspection.inspect()):  # the log may have other lines
        assert time.monotonic() < deadline


def test_a_machine_of_a_local_cluster_reads_only_its_own_lines_since_its_start(
    machine: SimulatedMachine, device: Device, tmp_path: Path
) -> None:
    own, other = tmp_path / "m1", tmp_path / "m10"
    before, others = shared.tag_of("c", "m1", own), shared.tag_of("c", "m10", other)
    shared.begin_anew(own)
    after = shared.tag_of("c", "m1", own)
    assert len({before, after, others}) == 3
    lines = [f"{before} {EXCEPTION}", f"{others} {REMOVED}", f"{after} {FELL_OFF}"]
    for tag, reason in ((after, "xid-79"), (before, "xid-13"), (others, "xid-45")):
        inspection = machine.begin(KernelLogInspection, NO_WAIT, kernel_log=device.path, kernel_log_tag=tag)
        inspection.kept["events"] = []
        for line in lines:
            device.write(line, priority=11)
            seen = machine.inspect(inspection)
        assert [code for code, _ in reasons(seen)] == [reason]
