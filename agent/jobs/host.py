"""This module holds the parts of the agent that all jobs of a machine share."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from agent.checkpoints.options import Place
from agent.checkpoints.peers.exchange import Exchange
from agent.checkpoints.saved_state import SavedStates
from agent.code.cache import CodeCache
from agent.launcher.fork_servers import ForkServers
from agent.launcher.processes import Reaper
from agent.reporting.observations import ObservationLog
from agent.state.disk import StateDisk
from agent.state.live import LiveRecords
from agent.state.reads import Reads

logger = structlog.get_logger()


@dataclass
class Host:
    """The parts of the agent that all jobs of a machine share."""

    machine: str
    address: str
    """Host that rendezvous stores listen on, without brackets."""
    sockets: dict[str, str]
    """Variables that name the interface for gloo and NCCL, unless a job sets them."""
    state_dir: Path
    shm_dir: Path
    disk: StateDisk
    """Writes to the state folder."""
    reads: Reads
    """Reads files on disks that may hang."""
    records: LiveRecords
    log: ObservationLog
    reaper: Reaper
    fork_servers: ForkServers
    exchange: Exchange
    code: CodeCache
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def place(self, job: str, run: str = "", version_of: Callable[[int], int] = lambda _: 0) -> Place:
        """Return the locations of a job's copies of training state."""
        return Place(job, self.machine, self.shm_dir / job, self.state_dir, SavedStates(), run, version_of)

    def spawn(self, work: Awaitable[Any]) -> None:
        """Run an awaitable in the background; a failure is logged."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("background work failed", error=str(error), exc_info=error)


GLOO_SOCKETS, NCCL_SOCKETS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables that name the network interface for gloo and NCCL. Without them, gloo uses the address of the host's
own name, and NCCL uses the first interface. Other machines often cannot reach these."""


def interface_of(host: str) -> str:
    """Return the name of the interface that has an address; empty: no interface has it, or the host is unknown."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    wanted = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in resolved}
    if any(address.is_loopback for address in wanted):
        return "lo"  # lo has all of 127.0.0.0/8
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        of_internet = [address for address in addresses if address.family in {socket.AF_INET, socket.AF_INET6}]
        own = [address.address.partition("%")[0] for address in of_internet]
        if not wanted.isdisjoint(map(ipaddress.ip_address, own)):
            return name
    return ""


def socket_environment(host: str) -> dict[str, str]:
    """Return variables that make ranks use their agent's network interface; empty if the interface is not known."""
    name = interface_of(host)
    # NCCL takes a name for the beginning of names, unless "=" is before it. Gloo knows full names only.
    return {GLOO_SOCKETS: name, NCCL_SOCKETS: f"={name}"} if name else {}
