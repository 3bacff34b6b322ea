"""This module decides whether a line of the kernel log is about a part of the machine that this agent's jobs use.

A machine has one kernel log for all of its containers and users. A GPU that the agent may not use, a disk without files
of its jobs, and a network card that none of its jobs uses belong to others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from agent.monitor.gpu import pci
from agent.monitor.gpu.reading import part_of
from agent.monitor.host.own_mounts import devices_of, needed_points
from agent.monitor.inspection import Site
from agent.monitor.network import interfaces
from agent.monitor.network.used import uses_interface, uses_port
from everstep.errors import CannotInspect
from everstep.model.finding import Finding
from everstep.system import procfs

PID = re.compile(r"\): \d+, pid=(\d+)")
"""The process that an Xid names."""


class PartsOfJobs:
    """The parts of a machine that the jobs of its agent use.

    Args:
        site: The machine.
    """

    dev: ClassVar[Path] = Path("/dev")

    def __init__(self, site: Site) -> None:
        self._site = site
        self._gpus: set[str] = set()
        """The GPUs that the agent could use at some time; one of them may be gone now."""
        self._are_shared()

    def is_ours(self, finding: Finding, text: str) -> bool:
        """Return whether a line is about a part that jobs use, or may be about such a part; ``text`` is the line."""
        kind, _, name = finding.item.partition(" ")
        if kind == "GPU":
            return self._is_our_gpu(part_of(name), text)
        if kind == "NVSwitch" or finding.reason.startswith("xid-"):
            return not self._are_shared()
        if kind == "disk":
            return self._is_our_disk(name)
        if kind == "PCI" and finding.sure:
            return self._is_our_network_card(name)
        return True

    def _are_shared(self) -> bool:
        """Return whether some GPUs of the machine are for others."""
        usable, others = pci.usable_and_others(self._site.sys, self._site.proc, self.dev)
        self._gpus |= {part_of(address) for address in usable}
        return bool(others)

    def _is_our_gpu(self, part: str, text: str) -> bool:
        are_shared = self._are_shared()
        if part in self._gpus:
            return True
        if pci.on_bus(self._site.sys):
            return not are_shared  # where GPUs are shared, a GPU that is gone or has no driver may be for others
        return self._is_our_process(text)

    def _is_our_process(self, text: str) -> bool:
        """Return whether the process that an Xid names may be of a job; used where no GPU can be seen."""
        pids = {rank.pid for rank in self._site.ranks()}
        if not pids or not (match := PID.search(text)):
            return True
        pid: int = int(match[1])
        while pid > 1 and pid not in pids:
            process = procfs.process_of(pid, self._site.proc)
            pid = process.parent if process else 0
        return pid in pids

    def _is_our_disk(self, name: str) -> bool:
        try:
            table = procfs.mounts(self._site.proc)
        except OSError:
            return True
        own = devices_of(self._site, needed_points(self._site, table), table)
        return any(re.match(rf"{re.escape(name)}(?:[np]?\d|$)", device) for device in own)

    def _is_our_network_card(self, address: str) -> bool:
        device, jobs = self._site.sys / "bus/pci/devices" / address, self._site.variables()
        names = [path.name for path in (device / "net").glob("*")]
        hcas = [path.name for path in (device / "infiniband").glob("*")]
        if not names and not hcas:
            return True  # its driver has given it up
        if any(uses_interface(name, jobs) for name in names) or any(
            uses_port(hca, "", jobs) is not False for hca in hcas
        ):
            return True
        try:
            return interfaces.own_name(self._site.host) in names
        except CannotInspect:
            return True
