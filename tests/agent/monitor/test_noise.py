"""Signals that are no fault of a machine lead to the verdict unknown, and nothing follows from them.

They come from all machines of a job at once, since a wrong conclusion would cost most there. No incident is opened, no
machine is evicted or asked about, and no end of a rank is explained by them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.gpu.dcgm import DcgmInspection, DcgmLimits
from agent.monitor.gpu.inspection import GpuInspection
from agent.monitor.gpu.rules.rule import GpuLimits
from agent.monitor.host import mounts
from agent.monitor.host.mounts import MountsInspection, MountsLimits
from agent.monitor.inspection import Inspection
from agent.monitor.kernel.log import KernelLogInspection, KernelLogLimits
from agent.monitor.monitor import Inspector
from agent.monitor.network.infiniband import InfinibandInspection, InfinibandLimits
from agent.monitor.own_checks import OwnCheck
from agent.monitor.settings import CheckLimits
from everstep.decisions.act.evict.plan_evictions import EvictFacts, plan_evictions
from everstep.decisions.blame.alerts import FLAPS
from everstep.decisions.blame.first_failure import explanation
from everstep.decisions.detect.job_facts import FindingSeen
from everstep.decisions.detect.rules import anomalies
from everstep.model.evidence import RankExit
from everstep.model.finding import Finding, Health, MachineFinding
from everstep.model.recovery_policy import RecoveryPolicy
from tests.agent.monitor.sites import SimulatedMachine
from tests.everstep.decisions.detect.job_facts import facts

MACHINES = ("m0", "m1", "m2", "m3")
XID = "NVRM: Xid (PCI:0000:05:00): {}, pid=4711, name=python3, "
PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
DCGM_SAYS_NOTHING = "Error: unable to establish a connection to the specified host: localhost"


def inspect(machine: SimulatedMachine, inspection: Inspection) -> list[Finding]:
    """Return the findings as the agent gets them. If the inspection cannot look, that is a finding too."""
    seen = Inspector(inspection, machine.kept(), lambda: None).inspect_once()
    machine.kept().keep(inspection.name, inspection.kept)
    return seen.findings


class Kernel:
    """The kernel log of a machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, path = machine, machine.folder / "kmsg"
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._inspection = machine.begin(KernelLogInspection, KernelLogLimits(interval_s=0.001), kernel_log=path)

    def says(self, *lines: str) -> list[Finding]:
        found: list[Finding] = []
        for number, line in enumerate(lines):
            os.write(self._file, f"3,{number},{time.monotonic_ns() // 1000},-;{line}\n".encode())
            found = inspect(self._machine, self._inspection)
        os.close(self._file)
        return found


class Ports:
    """An InfiniBand port of a machine, and a clock."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, self._now_s = machine, 1000.0
        self.write(**PORT, **{"counters/link_downed": "0", "counters/symbol_error": "0"})
        settings = InfinibandLimits(interval_s=0.001, down_s=10)
        self._inspection = machine.begin(InfinibandInspection, settings, sys=machine.folder / "sys")
        self._inspection.clock_ns = lambda: round(self._now_s * 1e9)  # type: ignore[attr-defined]

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self._machine.folder / "sys/class/infiniband/mlx5_0/ports/1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    def inspect(self, after_s: float = 0.0) -> list[Finding]:
        self._now_s += after_s
        return inspect(self._machine, self._inspection)


def gpus(machine: SimulatedMachine, limits: GpuLimits, *looks: dict[str, Any]) -> list[Finding]:
    """Return the findings at the last of several looks at fake GPUs."""
    path = machine.folder / "gpus.json"
    inspection = machine.begin(GpuInspection, limits, fake_gpus=path, sys=machine.folder, proc=machine.folder)
    found: list[Finding] = []
    for described in looks:
        path.write_text(json.dumps({"gpus": [{}]} | described))
        machine.clock.pass_s(10)
        found = inspect(machine, inspection)
        inspection.limits = GpuLimits(answer_s=0.05, start_s=0.1)
    assert inspection._process.end()  # type: ignore[attr-defined]
    return found


def a_flap_that_heals(machine: SimulatedMachine) -> list[Finding]:
    ports = Ports(machine)
    ports.inspect()
    ports.write(state="1: DOWN")
    ports.inspect(2)
    ports.write(**PORT, **{"counters/link_downed": "1"})
    return ports.inspect(2)


def an_error_counter_that_wraps(machine: SimulatedMachine) -> list[Finding]:
    ports = Ports(machine)
    ports.write(**{"counters/symbol_error": str(2**32 - 1)})
    ports.inspect()
    ports.write(**{"counters/symbol_error": "0", "counters/link_downed": "0"})
    return ports.inspect(30)


def a_counter_of_a_gpu_that_wraps(machine: SimulatedMachine) -> list[Finding]:
    most = {"pcie_replays": 2**32 - 1, "ecc_uncorrected": 2**32 - 1}
    return gpus(machine, GpuLimits(), {"gpus": [most]}, {"gpus": [{"pcie_replays": 3, "ecc_uncorrected": 0}]})


def an_xid_of_the_users_kernel(machine: SimulatedMachine) -> list[Finding]:
    return Kernel(machine).says(XID.format(13) + "Graphics SM Warp Exception on (GPC 9, TPC 5, SM 0)")


def work_removed_after_a_crash(machine: SimulatedMachine) -> list[Finding]:
    return Kernel(machine).says(*[XID.format(45) + "Ch 00000010"] * 8)


def a_tool_that_is_missing(machine: SimulatedMachine) -> list[Finding]:
    return inspect(machine, machine.begin(DcgmInspection, DcgmLimits(command="no-such-dcgmi")))


def a_service_that_is_gone(machine: SimulatedMachine) -> list[Finding]:
    tool = program(machine, f"echo '{DCGM_SAYS_NOTHING}'; exit 1")
    inspection = machine.begin(DcgmInspection, DcgmLimits(command=str(tool)))
    inspection.kept["ran"] = True
    return inspect(machine, inspection)


def a_log_that_is_denied(machine: SimulatedMachine) -> list[Finding]:
    denied = machine.folder / "denied"
    denied.mkdir()  # even root cannot read a folder as a file
    return inspect(machine, machine.begin(KernelLogInspection, kernel_log=denied))


def a_gpu_that_may_not_be_read(machine: SimulatedMachine) -> list[Finding]:
    return gpus(machine, GpuLimits(), {"trouble": "denied"})


def a_driver_that_is_silent_once(machine: SimulatedMachine) -> list[Finding]:
    return gpus(machine, GpuLimits(), {}, {"hang_s": 1000})


def a_check_that_hangs(machine: SimulatedMachine) -> list[Finding]:
    limits = CheckLimits(name="site-health", command=[str(program(machine, "sleep 600"))], deadline_s=0.2, sure=True)
    return inspect(machine, OwnCheck(machine.site(), limits, {}, same_boot=True))


def a_check_that_fails_itself(machine: SimulatedMachine) -> list[Finding]:
    limits = CheckLimits(name="site-health", command=[str(program(machine, "exit 5"))], sure=True)
    return inspect(machine, OwnCheck(machine.site(), limits, {}, same_boot=True))


def a_file_server_that_hangs(machine: SimulatedMachine) -> list[Finding]:
    table = machine.folder / "self/mountinfo"
    table.parent.mkdir()
    table.write_text("36 35 0:40 / /data rw - nfs4 server:/data rw\n")
    inspection = machine.begin(MountsInspection, MountsLimits(answer_s=0.01), proc=machine.folder)
    inspect(machine, inspection)
    time.sleep(0.05)
    return inspect(machine, inspection)


def program(machine: SimulatedMachine, text: str) -> Path:
    path = machine.folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


NOISE: dict[Callable[[SimulatedMachine], list[Finding]], str] = {
    a_flap_that_heals: "ib-port-flap",
    an_error_counter_that_wraps: "",
    a_counter_of_a_gpu_that_wraps: "",
    an_xid_of_the_users_kernel: "xid-13",
    work_removed_after_a_crash: "xid-45",
    a_tool_that_is_missing: "",
    a_service_that_is_gone: "cannot-inspect",
    a_log_that_is_denied: "cannot-inspect",
    a_gpu_that_may_not_be_read: "gpu-denied",
    a_driver_that_is_silent_once: "gpu-driver-hangs",
    a_check_that_hangs: "cannot-inspect",
    a_check_that_fails_itself: "cannot-inspect",
    a_file_server_that_hangs: "mount-hangs",
}
"""Noise → the reason of its finding; empty: there is no finding."""


@pytest.fixture(autouse=True)
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make all file systems hang."""

    def send(request: Any) -> None:
        time.sleep(0.2)

    monkeypatch.setattr(mounts._Request, "_send", send)
    yield


@pytest.mark.parametrize("noise", NOISE, ids=lambda noise: noise.__name__)
def test_it_is_unknown_and_nothing_is_concluded(
    machine: SimulatedMachine, noise: Callable[[SimulatedMachine], list[Finding]]
) -> None:
    found = noise(machine)
    assert [one.reason for one in found] == ([NOISE[noise]] if NOISE[noise] else [])
    assert all(one.verdict is Health.UNKNOWN and not one.sure for one in found)

    everywhere = tuple(MachineFinding(machine=machine, finding=one) for machine in MACHINES for one in found)
    now_ns = machine.clock() + 60 * 10**9
    seen = [FindingSeen(f"{one.machine}-1", one.machine, one.finding, heard_ns=0) for one in everywhere]
    reported = [one for anomaly in anomalies(facts(findings=seen, now_s=1000)) for one in anomaly.findings]
    assert {one.finding.reason for one in reported} <= FLAPS, (
        "the job only remembers flaps, and opens no incident for them"
    )
    plan = plan_evictions(EvictFacts(now_ns=now_ns, machines=MACHINES, findings=everywhere), RecoveryPolicy())
    assert (plan.evict, plan.ask, plan.shadow, plan.tripped) == ([], [], [], "")
    for end in ({"signal": 11}, {"signal": 9}, {"code": 1, "exception": "RuntimeError: Connection reset by peer"}):
        ended = RankExit.model_validate({"rank": 0, "machine": "m1", "time_ns": machine.clock(), **end})
        assert explanation(everywhere, ended, job="gpt", seen_ns=now_ns) is None, "noise explains no end of a rank"
