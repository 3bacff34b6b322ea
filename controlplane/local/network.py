"""Machines with their own network: network namespaces that a bridge connects, and faults of their links.

The control host, which runs Temporal, workers and commands, is one of these namespaces. No namespace is connected to
this computer's own network.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from controlplane.local import cluster_processes
from everstep.errors import ClusterError
from everstep.system.procfs import PROC, network_namespace

CONTROL = "control"
"""Name of the control host."""
FIRST_CARD, SECOND_CARD = "eth0", "nic1"
"""Names of a machine's network interfaces; the first has its address."""
NAMED = Path("/run/netns")
"""Folder in which iproute2 keeps the names of namespaces."""
ALL_BITS, BURST = "10gbit", "16k"
"""Rate of a link that is not slow, and amount of data that passes a slow link without delay."""
SETTLE_S = 5.0
"""Time limit for the end of a killed process, seconds."""
_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"(everstep-(\d+)-(\d+)-\d+)-.+")
_made = itertools.count()


class Network:
    """One bridge, and the namespaces that it connects.

    Args:
        machines: Machine → its address; all are in one network of 254 addresses.
        control: Address of the control host in this network.
    """

    def __init__(self, machines: Mapping[str, str], control: str) -> None:
        self.machines = dict(machines)
        self.control = control
        owner = cluster_processes.identify(os.getpid())
        assert owner is not None
        self._tag = f"everstep-{owner.pid}-{owner.start}-{next(_made)}"

    def name(self, host: str) -> str:
        """Name of a host's namespace."""
        return f"{self._tag}-{host}"

    def inside(self, host: str) -> list[str]:
        """The prefix of a command that runs on a host."""
        # 'ip netns exec' would hide the control groups, and with them a container's memory limit.
        return [_program("nsenter"), f"--net={NAMED / self.name(host)}"]

    def run(self, host: str, *command: str) -> None:
        """Run a command on a host.

        Raises:
            ClusterError: the command failed; the message has its error output.
        """
        _run(*self.inside(host), *command)

    def make(self) -> None:
        """Make namespaces, bridge and links.

        Raises:
            ClusterError: this computer cannot do it; the message has the reason.
        """
        remove_stale()
        _run("ip", "netns", "add", self.name(CONTROL))
        self._ip(CONTROL, "link", "set", "lo", "up")
        self._ip(CONTROL, "link", "add", "br0", "type", "bridge")
        self._ip(CONTROL, "addr", "add", f"{self.control}/24", "dev", "br0")
        self._ip(CONTROL, "link", "set", "br0", "up")
        for number, (machine, address) in enumerate(self.machines.items()):
            _run("ip", "netns", "add", self.name(machine))
            self._ip(machine, "link", "set", "lo", "up")
            self._ip(CONTROL, "link", "add", f"p{number}", "type", "veth", "peer", "name", f"q{number}")
            self._ip(CONTROL, "link", "set", f"p{number}", "master", "br0", "up")
            self._ip(CONTROL, "link", "set", f"q{number}", "netns", self.name(machine), "name", "eth0")
            self._ip(machine, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip(machine, "link", "set", "eth0", "up")
            # The second card represents a card for the traffic of ranks. It is connected to the control host, and
            # carries no traffic.
            far = self._far_end(machine)
            self._ip(CONTROL, "link", "add", far, "type", "veth", "peer", "name", f"s{number}")
            self._ip(CONTROL, "link", "set", f"s{number}", "netns", self.name(machine), "name", SECOND_CARD)
            self._ip(machine, "link", "set", SECOND_CARD, "up")
            self._ip(CONTROL, "link", "set", far, "up")

    def second_card(self, machine: str, *, up: bool) -> None:
        """Take the link of a machine's second card down (at the other end of the link), or up again.

        Raises:
            ClusterError: it cannot be done; the message says why.
        """
        self._ip(CONTROL, "link", "set", self._far_end(machine), "up" if up else "down")

    def _far_end(self, machine: str) -> str:
        return f"r{list(self.machines).index(machine)}"

    def let_ports_be_chosen(self) -> None:
        """Let the control host bind addresses of the machines, so that it can find free ports on them.

        Raises:
            ClusterError: the setting cannot be changed.
        """
        self.run(CONTROL, "sh", "-c", f"echo 1 > {PROC}/sys/net/ipv4/ip_nonlocal_bind")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While the block runs, move this thread, and all that it starts, to the control host."""
        with network_namespace().open("rb") as before:
            with (NAMED / self.name(CONTROL)).open("rb") as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    @contextmanager
    def link_down(self, machine: str) -> Iterator[None]:
        """While the block runs, take a machine's link down: no traffic to or from it passes."""
        self._ip(machine, "link", "set", "eth0", "down")
        try:
            yield
        finally:
            self._ip(machine, "link", "set", "eth0", "up")

    @contextmanager
    def slow_link(self, one: str, other: str, bytes_s: float) -> Iterator[None]:
        """While the block runs, limit the link between two machines to a rate in bytes/s, in each direction.

        Their links to other machines keep full speed.

        Raises:
            ClusterError: it cannot be done; the message says why.
        """
        rate = f"{8 * bytes_s:.0f}bit"
        ends = ((one, self.machines[other]), (other, self.machines[one]))
        try:
            for host, address in ends:
                self._tc(host, "qdisc", "root", "handle", "1:", "htb", "default", "1", "r2q", "100")
                self._tc(host, "class", "parent", "1:", "classid", "1:1", "htb", "rate", ALL_BITS)
                self._tc(host, "class", "parent", "1:", "classid", "1:2", "htb", "rate", rate, "burst", BURST)
                match = ("protocol", "ip", "u32", "match", "ip", "dst", address)
                self._tc(host, "filter", "parent", "1:", *match, "flowid", "1:2")
            yield
        finally:
            for host, _ in ends:
                _run(*self.inside(host), "sh", "-c", f"tc qdisc del dev {FIRST_CARD} root || true")

    def _tc(self, host: str, what: str, *words: str) -> None:
        self.run(host, "tc", what, "add", "dev", FIRST_CARD, *words)

    @contextmanager
    def cut_off(self, machine: str) -> Iterator[None]:
        """While the block runs, cut the link between the control host and a machine; machines still reach each
        other."""
        with self._blocked((CONTROL, self.machines[machine]), (machine, self.control)):
            yield

    @contextmanager
    def cut_link(self, one: str, other: str) -> Iterator[None]:
        """While the block runs, cut the link between two machines; all other machines still reach both."""
        with self._blocked((one, self.machines[other]), (other, self.machines[one])):
            yield

    @contextmanager
    def _blocked(self, *routes: tuple[str, str]) -> Iterator[None]:
        for host, address in routes:
            self._ip(host, "route", "add", "blackhole", f"{address}/32")
        try:
            yield
        finally:
            for host, address in routes:
                self._ip(host, "route", "del", "blackhole", f"{address}/32")

    def remove(self) -> list[int]:
        """Remove the network, and kill the processes in it; returns the pids of these processes."""
        return [pid for host in (CONTROL, *self.machines) for pid in _remove(self.name(host))]

    def _ip(self, host: str, *words: str) -> None:
        self.run(host, "ip", *words)


def missing() -> str:
    """Why this computer cannot have machines with their own network; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if not shutil.which(program):
            return f"there is no program {program} (package {package})"
    trial = Network({"m0": "10.99.0.11"}, "10.99.0.1")
    try:
        trial.make()
    except ClusterError as error:
        return f"no network can be made: {error}"
    finally:
        trial.remove()
    return ""


def remove_stale() -> None:
    """Remove networks of dead owners, unless a process still runs in one of their namespaces."""
    networks: dict[str, list[str]] = {}
    for path in NAMED.glob("everstep-*"):
        found = _NAME.fullmatch(path.name)
        if found and not cluster_processes.alive(cluster_processes.Process(int(found[2]), int(found[3]))):
            networks.setdefault(found[1], []).append(path.name)
    for names in networks.values():
        if not any(map(_pids, names)):
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _pids(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid()]


def _remove(name: str) -> list[int]:
    """Remove a namespace, and kill every process in it except this one; returns the pids of the killed processes."""
    found = [process for pid in _pids(name) if (process := cluster_processes.identify(pid))]
    for process in found:
        cluster_processes.send(process, signal.SIGKILL)
    cluster_processes.wait_gone(found, SETTLE_S)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return [process.pid for process in found]


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise ClusterError(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


def _program(name: str) -> str:
    return shutil.which(name) or name


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        problem = done.stderr.strip() or f"it ended with code {done.returncode}"
        raise ClusterError(f"'{' '.join(command)}' failed: {problem}")
