"""This module inspects the loss of packets: TCP retransmissions, and errors and drops that interfaces count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from agent.monitor.network import interfaces
from agent.monitor.network.counters import rises, share
from agent.monitor.network.interfaces import NetworkLimits
from agent.monitor.network.netlink import Link
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy
from everstep.system.procfs import network_counters

LOST = Reason(
    "packet-loss",
    "TCP retransmits many segments: packets are lost, here or at the other end",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust, table 3, has packet loss as an item",
)
ERRORS = Reason(
    "nic-errors",
    "a network interface receives or sends many damaged packets: a cable, a port, or the other end",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
)
DROPS = Reason(
    "nic-drops",
    "a network interface drops many packets because its buffers are full",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
)
ERROR_COUNTERS = ("rx_errors", "tx_errors")
DROP_COUNTERS = ("rx_missed_errors", "rx_fifo_errors", "tx_dropped")
"""Counters of dropped packets, without ``rx_dropped``, which also counts packets of protocols that are not used."""
MEASURED = {
    "rx_bytes": ("node_network_receive_bytes_total", "bytes received"),
    "tx_bytes": ("node_network_transmit_bytes_total", "bytes sent"),
    "rx_packets": ("node_network_receive_packets_total", "packets received"),
    "tx_packets": ("node_network_transmit_packets_total", "packets sent"),
    "rx_errors": ("node_network_receive_errs_total", "damaged packets received"),
    "tx_errors": ("node_network_transmit_errs_total", "packets that could not be sent"),
    "rx_dropped": ("node_network_receive_drop_total", "packets dropped, including those of unused protocols"),
    "tx_dropped": ("node_network_transmit_drop_total", "packets dropped before they were sent"),
}
"""Counter of an interface → its metric, named as by node_exporter, and the metric's meaning."""
TCP = {
    "OutSegs": ("node_netstat_Tcp_OutSegs", "TCP segments sent"),
    "RetransSegs": ("node_netstat_Tcp_RetransSegs", "TCP segments retransmitted"),
}
"""Counter of TCP → its metric, named as by node_exporter, and the metric's meaning."""


class LossLimits(NetworkLimits):
    """Thresholds for packet loss."""

    retransmitted_share: float = Field(default=0.01, gt=0, le=1)
    """A larger share of retransmitted TCP segments is a loss."""
    least_segments: int = Field(default=10_000, gt=0)
    """With fewer segments in an interval, loss is not judged."""
    error_share: float = Field(default=0.001, gt=0, le=1)
    """A larger share of damaged packets is reported."""
    drop_share: float = Field(default=0.01, gt=0, le=1)
    """A larger share of dropped packets is reported."""
    least_packets: int = Field(default=10_000, gt=0)
    """With fewer packets in an interval, errors and drops are not judged."""
    consecutive: int = Field(default=2, ge=1)
    """A loss is reported after this many consecutive inspections (ByteRobust, table 3: two misses)."""


class PacketLossInspection(Inspection):
    """Compares counters with those of the previous inspection. Its findings blame no machine, since either end of a
    connection may lose packets."""

    name: ClassVar[str] = "packet-loss"
    inspects: ClassVar[str] = "packets: retransmitted by TCP, damaged or dropped by interfaces"
    reasons: ClassVar[tuple[Reason, ...]] = (LOST, ERRORS, DROPS)
    metrics: ClassVar[Mapping[str, Described]] = described(
        *((name, "device", meaning) for name, meaning in MEASURED.values()),
        *((name, "", meaning) for name, meaning in TCP.values()),
    )
    limits_type: ClassVar[type[Limits]] = LossLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {reason.code: ("seen",) for reason in (LOST, ERRORS, DROPS)}

    def inspect(self) -> InspectionResult:
        """Read the counters of TCP and of all inspected interfaces."""
        namespace = interfaces.namespace()
        if self.kept.get("namespace") != namespace:
            self.kept = {"namespace": namespace}
        tcp = tcp_counters(self.site.proc)
        links, _ = interfaces.looked_at(self.site.host, self.kept.get("links", {}), self.limits)
        seen = self._of_tcp(tcp) + [found for link in links.values() for found in self._of_link(link)]
        was: Mapping[str, int] = self.kept.get("seen", {})
        times = {_key(found): was.get(_key(found), 0) + 1 for found in seen}
        self.kept = {
            "namespace": namespace,
            "tcp": tcp,
            "links": {name: {"index": link.index, "counters": _counters(link)} for name, link in links.items()},
            "seen": times,
        }
        findings = [found for found in seen if times[_key(found)] >= self.limits.consecutive]
        return InspectionResult(findings, _measures(tcp, links))

    def _of_tcp(self, now: Mapping[str, float]) -> list[Finding]:
        grown = rises(self.kept.get("tcp", {}), now) or {}
        again, sent = grown.get("RetransSegs", 0.0), grown.get("OutSegs", 0.0)
        part = share(again, sent, self.limits.least_segments)
        if part is None or part <= self.limits.retransmitted_share:
            return []
        return [self.finding(LOST, "", f"{again:.0f} of {sent:.0f} segments were retransmitted ({part:.1%})")]

    def _of_link(self, link: Link) -> list[Finding]:
        found = []
        before = self.kept.get("links", {}).get(link.name, {})
        if before.get("index") != link.index:
            return []  # the interface is new, or was created anew
        grown = rises(before["counters"], _counters(link)) or {}
        packets = grown.get("rx_packets", 0.0) + grown.get("tx_packets", 0.0)
        for reason, names, most in (
            (ERRORS, ERROR_COUNTERS, self.limits.error_share),
            (DROPS, DROP_COUNTERS, self.limits.drop_share),
        ):
            number = sum(grown.get(name, 0.0) for name in names)
            part = share(number, packets + number, self.limits.least_packets)
            if part is not None and part > most:
                each = ", ".join(f"{name} grew by {grown[name]:.0f}" for name in names if grown.get(name))
                found.append(self.finding(reason, link.name, f"{each}, of {packets:.0f} packets"))
        return found


def tcp_counters(proc: Path) -> dict[str, float]:
    """Return the kernel's counters of TCP segments.

    Raises:
        CannotInspect: the kernel does not have them.
    """
    counters = network_counters("Tcp", proc)
    if missing := TCP.keys() - counters.keys():
        raise CannotInspect(f"the kernel has no counters of TCP segments: {', '.join(sorted(missing))}")
    return {name: counters[name] for name in TCP}


def _counters(link: Link) -> dict[str, float]:
    wanted = ("rx_packets", "tx_packets", *ERROR_COUNTERS, *DROP_COUNTERS)
    return {name: float(link.statistics[name]) for name in wanted if name in link.statistics}


def _key(found: Finding) -> str:
    return f"{found.reason} {found.item}"


def _measures(tcp: Mapping[str, float], links: Mapping[str, Link]) -> dict[str, float]:
    measures = {TCP[name][0]: value for name, value in tcp.items()}
    for name, link in links.items():
        for counter, (measure, _) in MEASURED.items():
            if counter in link.statistics:
                measures[f'{measure}{{device="{name}"}}'] = float(link.statistics[counter])
    return measures
