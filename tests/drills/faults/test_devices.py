"""The findings that drills expect, for each fault whose finding names its machine for sure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.monitor.all import known
from agent.monitor.kernel.log import KernelLogInspection
from drills.faults.all import drill_request
from drills.faults.devices import GPU, LINES, SURE, MachineFault
from tests.agent.monitor.kernel.test_log import NO_WAIT, Device
from tests.agent.monitor.sites import SimulatedMachine

DRILLS_OF_THEIR_OWN = {"fs-readonly"}
SURE_IN_SOME_FORM = {"gpu-recovery-action"}
"""Reasons whose findings are sure for some of the actions that the driver requests."""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path / "kmsg")
    yield made
    made.close()


WITHOUT_A_DRILL = {"disk-failed", "fs-made-readonly"}
"""These faults have no drill, since a drill does not know the disks of this computer.

An error of a disk without files of jobs would evict no machine.
"""


def test_every_sure_fault_has_a_drill_or_is_listed() -> None:
    sure = {reason.code for kind in known().values() for reason in kind.reasons if reason.sure}
    assert {*sure, *SURE_IN_SOME_FORM} == {*SURE, *DRILLS_OF_THEIR_OWN, *WITHOUT_A_DRILL}


def test_each_kernel_line_leads_to_the_finding_that_the_drill_expects(tmp_path: Path, device: Device) -> None:
    machine = SimulatedMachine(tmp_path)
    for reason, line in LINES.items():
        inspection = machine.begin(KernelLogInspection, NO_WAIT, kernel_log=device.path)
        device.write(line.replace(GPU, "0000:01:00"))
        seen = [found for found in machine.inspect(inspection).findings if found.reason == reason]
        expected = MachineFault(reason=reason).finding
        assert [(found.owner, found.verdict, found.sure) for found in seen] == [
            (expected.owner, expected.verdict, True)
        ], reason


def test_a_fault_that_all_machines_have_replaces_none() -> None:
    request = drill_request(fault="machine-fault", reason="xid-79")
    assert request.with_spare(1).replaces and not request.with_spare(0).replaces
    everywhere = drill_request(fault="machine-fault", reason="xid-79", everywhere=True)
    assert not everywhere.with_spare(4).replaces
