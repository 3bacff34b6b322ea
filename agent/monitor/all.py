"""All inspections. A new inspection needs a file and a line here."""

from __future__ import annotations

from agent.monitor.gpu.dcgm import DcgmInspection
from agent.monitor.gpu.inspection import GpuInspection
from agent.monitor.host.agent import AgentInspection
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
from agent.monitor.settings import MonitorSettings, limits_of

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
    AgentInspection,
)
"""In the order in which they are shown: what names a machine soonest comes first."""


def known() -> dict[str, type[Inspection]]:
    """Every inspection by its name, those that a site has installed as entry points too.

    Raises:
        ConfigError: one that is installed cannot be used.
    """
    return {kind.name: kind for kind in (*INSPECTIONS, *from_entry_points())}


def reason_codes() -> set[str]:
    """All that inspections can find, but for programs of a site, which name their own.

    Raises:
        ConfigError: an inspection that is installed cannot be used.
    """
    return {UNABLE.code, HANGS.code, *(reason.code for kind in known().values() for reason in kind.reasons)}


def made(site: Site, settings: MonitorSettings, kept: KeptStates) -> list[Inspection]:
    """The inspections of an agent, by its settings."""
    if settings.off:
        return []
    found: list[Inspection] = []
    for name, kind in known().items():
        limits = limits_of(settings, name, kind.limits_type)
        if not limits.off:
            found.append(kind(site, limits, kept.of(name), same_boot=kept.same_boot))
    found += [
        OwnCheck(site, check, kept.of(check.name), same_boot=kept.same_boot)
        for check in settings.check
        if not check.off
    ]
    return found
