"""This module lists all inspections. A new inspection needs a file of its own and a line here."""

from __future__ import annotations

from agent.monitor.gpu.dcgm import DcgmInspection
from agent.monitor.gpu.inspection import GpuInspection
from agent.monitor.host.agent import AgentInspection
from agent.monitor.host.certificates import CertificateInspection
from agent.monitor.host.clock import ClockInspection
from agent.monitor.host.cpu import CpuInspection
from agent.monitor.host.disk_space import DiskSpaceInspection
from agent.monitor.host.memory import MemoryInspection
from agent.monitor.host.mounts import MountsInspection
from agent.monitor.host.ranks import RanksInspection
from agent.monitor.host.versions import VersionsInspection
from agent.monitor.inspection import Inspection, Site
from agent.monitor.kept import KeptStates
from agent.monitor.kernel.log import KernelLogInspection
from agent.monitor.monitor import HANGS, UNABLE
from agent.monitor.network.infiniband import InfinibandInspection
from agent.monitor.network.link import LinkInspection
from agent.monitor.network.loss import PacketLossInspection
from agent.monitor.own_checks import OwnCheck, from_entry_points
from agent.monitor.settings import MonitorSettings

INSPECTIONS: tuple[type[Inspection], ...] = (
    KernelLogInspection,
    GpuInspection,
    DcgmInspection,
    LinkInspection,
    InfinibandInspection,
    PacketLossInspection,
    MemoryInspection,
    CpuInspection,
    DiskSpaceInspection,
    MountsInspection,
    ClockInspection,
    RanksInspection,
    VersionsInspection,
    CertificateInspection,
    AgentInspection,
)
"""All inspections of everstep, in the order in which they are shown: those that detect most faults come first."""


def known() -> dict[str, type[Inspection]]:
    """Return all inspections by name, including those that a site has installed as entry points.

    Raises:
        ConfigError: an installed inspection cannot be used.
    """
    return {kind.name: kind for kind in (*INSPECTIONS, *from_entry_points())}


def reason_codes() -> set[str]:
    """Return the reason codes of all inspections. Programs of a site name further codes when they run.

    Raises:
        ConfigError: an installed inspection cannot be used.
    """
    return {UNABLE.code, HANGS.code, *(reason.code for kind in known().values() for reason in kind.reasons)}


def made(site: Site, settings: MonitorSettings, kept: KeptStates) -> list[Inspection]:
    """Make the inspections of an agent that its settings do not turn off."""
    if settings.off:
        return []
    inspections: list[Inspection] = []
    for name, kind in known().items():
        limits = kind.limits_type.model_validate(settings.limits.get(name, {}))
        if not limits.off:
            inspections.append(kind(site, limits, kept.of(name), same_boot=kept.same_boot))
    inspections += [
        OwnCheck(site, check, kept.of(check.name), same_boot=kept.same_boot)
        for check in settings.check
        if not check.off
    ]
    return inspections
