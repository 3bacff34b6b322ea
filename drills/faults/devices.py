"""Faults that break a device of a machine: inspections must detect this, and the job continues.

The findings ``gpu-power`` and ``gpu-driver-hangs`` have no drill, since they need hardware that does not answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from agent.main import FAKE_GPUS as FAKE_GPUS_FILE
from agent.monitor.kernel import rules
from agent.monitor.kernel.shared import tag_of
from controlplane.local import mounts, power
from drills.clusters.network import network_of
from drills.faults.fault import Fault
from drills.inject import process_group
from drills.inject.context import DrillContext
from drills.inject.detection import LINK_REASONS, await_finding, await_report, struck_machines
from drills.observe.observed import Absence
from drills.spec import settings
from drills.spec.fault import STRIKE, THEN_AFTER, ExpectedFinding, FaultOptions, OnMachine
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from everstep.decisions.blame.shared_fault import SHARED_MACHINES
from everstep.errors import CannotInject, ConfigError
from everstep.model import xid
from everstep.model.finding import Health, Owner, Reason
from everstep.model.job import JobSpec
from everstep.system import private_files as private

GPUS = 8
"""Number of a machine's fake GPUs; a machine with more ranks has one fake GPU for each rank."""
FLAP_S = 0.5
"""Time for which a flapping link is down, seconds."""
KERNEL_LOG = Path("/dev/kmsg")
"""The kernel log, to which root can write lines."""
HOT: dict[str, object] = {"temperature_c": 95}
"""Readings of a fake GPU that is too hot; an H100 slows down at 87 degrees C."""
GPU = "{gpu}"
"""Placeholder in a line for the PCI address of a GPU."""
FREEZER = Path("/sys/fs/cgroup/freezer")
FREEZE = "freeze-"
FALLEN_OFF = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
"""The driver's text after the number of Xid 79."""
XIDS = (79, 48, 94, 13, 31, 45)
"""Xids that a soak draws: some prove that the machine is broken, and programs can cause the others."""


def xid_line(code: int, suffix: str = "") -> str:
    """Return the line that the driver writes into the kernel log for an Xid."""
    row = next(row for row in xid.TABLE if code in row.codes and row.suffix == suffix)
    return f"NVRM: Xid (PCI:{GPU}): {code}, {FALLEN_OFF if code == 79 else row.example or 'injected'}"


LINES: dict[str, str] = {
    # A broken disk evicts a machine only if the agent uses it, and a drill does not know the disks of this computer.
    **{rule.reason.code: rule.examples[0] for rule in rules.RULES if rule.reason.sure and rule.kind != "disk"},
    **{
        f"xid-{code}{row.suffix}": xid_line(code, row.suffix)
        for row in xid.TABLE
        if row.kind.sure
        for code in row.codes
    },
    xid.SXID_FATAL.code: f"nvidia-nvswitch3: SXid (PCI:{GPU}): 20034, Fatal, Link 30 LTSSM Fault Up",
}
"""Reason code of a finding that names its machine for sure → a line of the kernel log that causes it."""
FAKE_GPUS: dict[str, dict[str, object]] = {
    "gpu-lost": {"lost": True},
    "gpu-reset-required": {"reset_required": True},
    "gpu-count": {"missing": True},
    "gpu-recovery-action": {"recovery_action": 2},
    "gpu-row-remap-failed": {"remap_failed": True},
}
"""Reason code of a finding that names its machine for sure → the readings of a fake GPU that cause it
(``agent.monitor.gpu.fake``)."""
SURE: tuple[str, ...] = (*LINES, *FAKE_GPUS)
"""Reason codes of the findings that name their machine for sure and that a drill can cause."""


class DeviceFault(Fault):
    """A device breaks: an incident reports the finding, or the machine is replaced while its ranks step."""

    own_job = True
    meets = "nothing"

    @property
    def absorbed(self) -> bool:
        """The job continues unless a second fault follows."""
        return not self.follows

    @property
    def only_reported(self) -> bool:
        return not self.follows

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.name, STRIKE) if self.follows else (self.name,)

    @property
    def struck_again(self) -> bool:
        return bool(self.follows)

    @property
    def strike_delay(self) -> int | None:
        return THEN_AFTER if self.follows else None

    @property
    def patience(self) -> dict[str, Any]:
        """The policy evicts no machine, so that the second fault strikes the machine at fault."""
        return super().patience | settings.NO_EVICTION

    def loss(self, spec: JobSpec) -> Loss:
        """Return the first rank of the machine, if a second fault follows."""
        ranks = spec.topology().ranks(self.machine_index(spec))
        return Loss(ranks=(ranks[0],)) if self.follows == "kill-rank" else Loss()

    def break_device(self, context: DrillContext) -> None:
        """Break the device now.

        Raises:
            CannotInject: this computer does not allow it.
        """
        raise NotImplementedError

    async def strike(self, context: DrillContext) -> None:
        """Break the device once the job has reached the step, and wait until it is detected and reported."""
        await context.reach(context.request.at_step)
        broken_ns = time.time_ns()
        await asyncio.to_thread(self.break_device, context)
        context.mark(self.name, time_ns=broken_ns)
        await await_finding(context)
        if context.request.replaces:
            context.planned.let_go()  # the ranks step while another machine is prepared
        if not self.follows:
            await await_report(context)
        context.seen.absence = Absence(broken_ns, time.time_ns())


class ThenKillRank(FaultOptions):
    """The option to kill a rank of the machine after the fault."""

    then: Literal["", "kill-rank"] = Field("", description="A rank of the machine is killed after the fault.")

    @property
    def follows(self) -> str:
        return self.then


class Everywhere(FaultOptions):
    """The option to strike all machines of the job at once."""

    everywhere: bool = Field(False, description="On all machines of the job at once.")

    @property
    def strikes_all(self) -> bool:
        return self.everywhere

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse too few machines to show a shared fault."""
        super().refuse(drill, spec)
        if self.everywhere and self.follows:
            raise ConfigError("--everywhere cannot be combined with --then")
        if self.everywhere and spec.machines <= SHARED_MACHINES:
            least = SHARED_MACHINES + 1
            raise ConfigError(
                f"--everywhere: {spec.machines} machines are too few to share a fault: use {least} or more"
            )


class XidFault(OnMachine, Everywhere, ThenKillRank, DeviceFault):
    """The GPU driver logs an error (an Xid)."""

    name = "xid"
    summary = (
        "a line about a GPU error in the kernel log, through /dev/kmsg, of one machine or of all; the job continues "
        "unless a rank is killed too"
    )
    line = "Xid {code} in the kernel log of {machine}"
    drawn = {"code": XIDS}

    code: int = Field(79, ge=0, le=255, description="The number of the Xid.", json_schema_extra={"metavar": "N"})

    @property
    def finding(self) -> ExpectedFinding:
        """The finding that the table of Xids has for this number."""
        reason = xid.xid_of(self.code)
        return ExpectedFinding(reason.code, reason.owner, reason.verdict, reason.sure)

    def why_not(self) -> str:
        return _no_kernel_log()

    def break_device(self, context: DrillContext) -> None:
        _write_kernel_lines(context, xid_line(self.code))


class GpuFault(OnMachine, DeviceFault):
    """A fake GPU, which the machine's agent reads, has a fault."""

    gpu: ClassVar[dict[str, object]]
    """The readings that show the fault."""

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Give the machines fake GPUs that are healthy."""
        return fake_gpus(context)

    def break_device(self, context: DrillContext) -> None:
        for machine in struck_machines(context):
            write_fake_gpus(context, machine.name, self.gpu)


class GpuLost(ThenKillRank, GpuFault):
    """A GPU does not answer any more."""

    name = "gpu-lost"
    summary = "one of the fake GPUs that the machine's agent reads is lost"
    line = "a GPU of {machine} is lost"
    fixed_finding = ExpectedFinding("gpu-lost", Owner.MACHINE, sure=True)
    gpu = FAKE_GPUS["gpu-lost"]


class GpuStuck(GpuFault):
    """A GPU is lost, and its rank does not react to SIGKILL, like a process that waits in the driver (state D)."""

    name = "gpu-stuck"
    summary = (
        "a GPU is lost, and SIGKILL does not end the process of a rank there: it is in a frozen control group of the "
        "first version of cgroups"
    )
    line = "a GPU of {machine} is lost, and SIGKILL does not end its rank"
    not_soaked = "needs control groups of the first version"
    unreachable = True
    fixed_finding = ExpectedFinding("gpu-lost", Owner.MACHINE, sure=True)
    gpu = FAKE_GPUS["gpu-lost"]

    def why_not(self) -> str:
        return "" if os.access(FREEZER, os.W_OK) else f"{FREEZER}: there is no freezer of cgroups of the first version"

    @contextmanager
    def prepared(self, context: DrillContext) -> Iterator[None]:
        """Make a control group, and continue its processes at the end."""
        with fake_gpus(context), process_group.made(FREEZER, {}, "that is frozen", FREEZE) as group:
            try:
                yield
            finally:
                (group / "freezer.state").write_text("THAWED")

    async def strike(self, context: DrillContext) -> None:
        """Freeze the first rank of the machine and break its GPU; the rank ends once the machine has left the job."""
        await context.reach(context.request.at_step)
        group = FREEZER / process_group.name(FREEZE)
        (group / "cgroup.procs").write_text(str((await context.rank_pids())[0]))
        (group / "freezer.state").write_text("FROZEN")
        await super().strike(context)
        (group / "freezer.state").write_text("THAWED")


class MachineFault(OnMachine, Everywhere, DeviceFault):
    """Any fault that names its machine for sure."""

    name = "machine-fault"
    summary = "any fault that names its machine for sure: a line of the kernel, or a fake GPU"
    line = "{reason} on {machine}"
    drawn = {"reason": SURE}

    reason: str = Field(
        description="Reason code of the finding, see docs/concepts/inspections.md.",
        json_schema_extra={"metavar": "CODE"},
    )

    @field_validator("reason")
    @classmethod
    def _can_be_caused(cls, value: str) -> str:
        if value not in SURE:
            raise ValueError(f"use one of {', '.join(SURE)}")
        return value

    @property
    def finding(self) -> ExpectedFinding:
        reason = reason_of(self.reason)
        owner = Owner.MACHINE if self.reason in FAKE_GPUS or reason is None else reason.owner
        return ExpectedFinding(self.reason, owner, sure=True)

    def why_not(self) -> str:
        return _no_kernel_log() if self.reason in LINES else ""

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Give the machines fake GPUs if one of those is to break."""
        return fake_gpus(context) if self.reason in FAKE_GPUS else super().prepared(context)

    def break_device(self, context: DrillContext) -> None:
        if self.reason in LINES:
            _write_kernel_lines(context, LINES[self.reason])
            return
        for machine in struck_machines(context):
            write_fake_gpus(context, machine.name, FAKE_GPUS[self.reason])


class GpuHot(GpuFault):
    """A GPU is too hot."""

    name = "gpu-hot"
    summary = "one of the fake GPUs that the machine's agent reads is too hot"
    line = "a GPU of {machine} is too hot"
    fixed_finding = ExpectedFinding("gpu-hot", Owner.MACHINE)
    gpu = HOT


class CardFault(DeviceFault):
    """The second network card of a machine, in a network namespace, loses its link.

    Outages in two drills within five minutes count as a repeated flap, which is one more finding.
    """

    needs_network = True
    lingering_reasons: ClassVar = LINK_REASONS

    @contextmanager
    def prepared(self, context: DrillContext) -> Iterator[None]:
        """At the end, give all cards their link back."""
        try:
            yield
        finally:
            self._set(context, up=True)

    def _set(self, context: DrillContext, *, up: bool) -> None:
        for machine in struck_machines(context):
            network_of(context.cluster, self.name).second_card(machine.name, up=up)

    def break_device(self, context: DrillContext) -> None:
        self._set(context, up=False)


class NicDown(OnMachine, CardFault):
    """A network card loses its link."""

    name = "nic-down"
    summary = "a machine's second network card has no link, in network namespaces"
    line = "a network card of {machine} is down"
    fixed_finding = ExpectedFinding("nic-down", Owner.NETWORK)


class NicFlap(OnMachine, CardFault):
    """The link of a network card goes down and comes back."""

    name = "nic-flap"
    summary = "the link of a machine's second network card goes down and comes back"
    line = "a network card of {machine} goes down and up"
    fixed_finding = ExpectedFinding("nic-flap", Owner.NETWORK, Health.UNKNOWN)

    def break_device(self, context: DrillContext) -> None:
        self._set(context, up=False)
        time.sleep(FLAP_S)
        self._set(context, up=True)


class SwitchDown(CardFault):
    """The second network cards of all machines lose their links at once."""

    name = "switch-down"
    summary = "the second network cards of all machines have no link at once, as when their switch fails"
    line = "a network card of every machine is down"
    fixed_finding = ExpectedFinding("nic-down", Owner.NETWORK)
    reported_of_all = True
    strikes_all: ClassVar = True


class ReadOnly(OnMachine, DeviceFault):
    """The file system of a machine's checkpoints turns read-only."""

    name = "fs-readonly"
    summary = "the file system of a machine's disk checkpoints turns read-only"
    line = "the file system of the disk checkpoints of {machine} turns read-only"
    fixed_finding = ExpectedFinding("fs-readonly", Owner.MACHINE, sure=True)

    def why_not(self) -> str:
        return mounts.why_not(Path(tempfile.gettempdir()))

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Mount a separate file system for the machine's checkpoints."""
        return mounts.small(context.disk, 1 << 30)

    def break_device(self, context: DrillContext) -> None:
        mounts.remount(context.disk, read_only=True)


@contextmanager
def fake_gpus(context: DrillContext) -> Iterator[None]:
    """Give the struck machines healthy fake GPUs, before and after the block: GPUs that vanish would be a fault."""
    for machine in struck_machines(context):
        write_fake_gpus(context, machine.name, {})
    try:
        yield
    finally:
        for machine in struck_machines(context):
            write_fake_gpus(context, machine.name, {})


def write_fake_gpus(context: DrillContext, machine: str, first: dict[str, object]) -> None:
    """Write the fake GPUs of a machine, always the same number of them.

    Args:
        context: The drill.
        machine: Name of the machine.
        first: Readings of the first GPU that differ from those of a healthy one.
    """
    healthy: list[dict[str, object]] = [{} for _ in range(max(context.spec.ranks_per_machine, GPUS) - 1)]
    path = power.state_folder(context.cluster.file, machine) / FAKE_GPUS_FILE
    private.replace(path, json.dumps({"gpus": [first, *healthy]}))


def reason_of(code: str) -> Reason | None:
    """Return the reason with this code, if a line of the kernel log can cause it."""
    reasons = (*(rule.reason for rule in rules.RULES), *xid.REASONS)
    return next((reason for reason in reasons if reason.code == code), None)


def _no_kernel_log() -> str:
    """Return why no line can be written into the kernel log; empty: it can."""
    return "" if os.access(KERNEL_LOG, os.W_OK) else f"{KERNEL_LOG} cannot be written: it needs root"


def _write_kernel_lines(context: DrillContext, line: str) -> None:
    """Write a line into the kernel log for each struck machine, with the tag of its agent.

    Raises:
        CannotInject: this process may not write to the kernel log.
    """
    gpu = f"0000:{zlib.crc32(context.spec.name.encode()) % 256:02x}:00"  # a different GPU in each drill
    text = line.replace(GPU, gpu)
    try:
        for machine in struck_machines(context):
            tag = tag_of(context.cluster.file.id, machine.name, power.state_folder(context.cluster.file, machine.name))
            KERNEL_LOG.write_text(f"<3>{tag} {text}\n")
    except OSError as error:
        raise CannotInject(f"{KERNEL_LOG} cannot be written ({error.strerror}): it needs root") from error
