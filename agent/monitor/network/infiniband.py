"""This module inspects InfiniBand and RoCE ports: outages, flaps, lower rates, errors, RDMA traffic that has ceased."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits, Site, of_no_job
from agent.monitor.network.counters import Limit, judged, rise
from agent.monitor.network.infiniband_ports import ACTIVE, COUNTERS, DATA, Port, ports
from agent.monitor.network.interfaces import NetworkLimits, may_be_looked_at, never_seen
from agent.monitor.network.outages import LinkSeen, ended, is_uncounted, number_of, second_ns, with_flaps
from agent.monitor.network.used import uses_port
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy

DOWN = Reason(
    "ib-port-down",
    "an InfiniBand or RoCE port is no longer active",
    Owner.NETWORK,
    Remedy.WATCH,
    source="ByteRobust, table 3, has it as an item",
)
MISSING = Reason(
    "ib-port-missing",
    "an InfiniBand or RoCE port has disappeared",
    remedy=Remedy.REPLACE,
    source="NVSentinel: a device that is missing",
)
FLAP = Reason(
    "ib-port-flap",
    "an InfiniBand or RoCE port went down and came back",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust tolerates short flaps",
)
REPEATED = Reason(
    "ib-port-flap-repeated",
    "an InfiniBand or RoCE port went down at least twice within a short time",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust acts on the second alert in 5 minutes",
)
SLOW = Reason("ib-rate", "an InfiniBand or RoCE port is slower than before", Owner.NETWORK, Remedy.WATCH)
LINK_ERRORS = Reason(
    "ib-link-errors",
    "the link of an InfiniBand or RoCE port damages packets",
    Owner.NETWORK,
    Remedy.REPLACE,
    source="NVSentinel: fatal counters",
)
ERRORS = Reason(
    "ib-errors",
    "an InfiniBand or RoCE port counts many errors, which either end may cause",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="NVSentinel: counters that are not fatal",
)
IDLE = Reason(
    "rdma-idle",
    "RDMA traffic has ceased while ranks run",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust, section 3: zero RDMA traffic for 10 minutes",
)
UNREADABLE = Reason(
    "ib-unreadable",
    "the driver does not report the state of an InfiniBand or RoCE port",
    Owner.UNKNOWN,
    Remedy.CHECK_SETUP,
    Health.UNKNOWN,
)
OF_LINK = (
    Limit("local_link_integrity_errors", 0, 1),
    Limit("excessive_buffer_overrun_errors", 0, 1),
    Limit("symbol_error", 120, 3600),
)
"""Limits of counters that grow only if the link itself is damaged (NVSentinel)."""
OF_BOTH_ENDS = (
    # NVSentinel treats this counter as fatal. It grows if the other end has no free buffer, so it does not blame this
    # machine.
    Limit("rnr_nak_retry_err", 0, 1),
    Limit("symbol_error", 10, 1),
    Limit("link_error_recovery", 5, 60),
    Limit("port_rcv_errors", 10, 1),
    Limit("local_ack_timeout_err", 1, 1),
    Limit("port_xmit_discards", 100, 1),
    Limit("roce_slow_restart", 10, 1),
)
"""Limits of counters that congestion and faults of the other end increase too (NVSentinel)."""


class InfinibandLimits(NetworkLimits):
    """Thresholds for InfiniBand. ``interfaces`` and ``ignore`` are names or patterns of devices, e.g. ``mlx5_*``."""

    down_s: float = Field(default=10.0, ge=0)
    """A port that is inactive for this long is faulty, seconds; a shorter outage is a flap."""
    lasts_s: float = Field(default=300.0, gt=0)
    """How long flaps and errors stay active, seconds (ByteRobust acts on the second alert in 5 minutes)."""
    ignore_counters: list[str] = Field(default_factory=list)
    """Counters whose growth is not reported, e.g. ``port_xmit_discards``."""
    idle_s: float = Field(default=600.0, gt=0)
    """RDMA traffic that pauses for this long has ceased, seconds (ByteRobust, section 3)."""
    idle_bytes_per_s: float = Field(default=10_000.0, ge=0)
    """If all ports together carry less than this, bytes per second, the traffic is for management and counts as
    none."""


class InfinibandInspection(Inspection):
    """Compares state, rate and counters of every port with those of earlier inspections."""

    name: ClassVar[str] = "infiniband"
    inspects: ClassVar[str] = "InfiniBand and RoCE ports: state, rate, error counters, RDMA traffic"
    reasons: ClassVar[tuple[Reason, ...]] = (DOWN, MISSING, FLAP, REPEATED, SLOW, LINK_ERRORS, ERRORS, IDLE, UNREADABLE)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("node_infiniband_state_id", "device port", "1 down, 2 init, 3 armed, 4 active"),
        ("node_infiniband_physical_state_id", "device port", "2 polling, 3 disabled, 5 link up"),
        ("node_infiniband_rate_bytes_per_second", "device port", "rate of the port"),
        *((f"node_infiniband_{name}", "device port", meaning) for name, meaning in COUNTERS.values()),
    )
    limits_type: ClassVar[type[Limits]] = InfinibandLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {IDLE.code: ("traffic",)}
    waits: ClassVar[bool] = True
    clock_ns: Callable[[], int] = staticmethod(time.monotonic_ns)

    def __init__(self, site: Site, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._hurried = threading.Event()
        self._must_wait = False

    def inspect(self) -> InspectionResult:
        """Wait for the time of the next inspection, which is soon if a port is down, and read all ports."""
        if self._must_wait:
            self._hurried.wait(self._wait_s())
            self._hurried.clear()
        self._must_wait = False
        now_ns = self.clock_ns()
        known: Mapping[str, dict[str, Any]] = self.kept.get("ports", {})
        there = {
            name: port for name, port in ports(self.site.sys).items() if may_be_looked_at(port.device, self.limits)
        }
        # A port that was never active has no cable. It is measured, but it has no findings.
        names = [name for name in {**known, **there} if name in known or there[name].state == ACTIVE]
        names = [name for name in names if may_be_looked_at(name.partition(" ")[0], self.limits)]
        mute = [name for name in names if name in there and not there[name].state]
        entries = {
            name: known[name] if name in mute else self._entry(known.get(name), there.get(name), now_ns)
            for name in names
        }
        traffic = self._traffic(known, there, now_ns)
        self.kept = {"ports": entries, "traffic": traffic, "carried": self._carried(traffic)}
        findings = [
            found if self._is_used(name) else of_no_job(found)
            for name, entry in entries.items()
            if name not in mute
            for found in self._judged(name, entry, there.get(name), now_ns)
        ]
        findings += [self.finding(UNREADABLE, name) for name in mute]
        devices = {name.partition(" ")[0] for name in {**there, **entries}}
        findings += [
            self.finding(MISSING, name, text="a device that the settings name does not exist", verdict=Health.UNKNOWN)
            for name in never_seen(devices, self.limits)
        ]
        findings += self._idle(now_ns)
        self._must_wait = True
        measures = {name: value for port in there.values() for name, value in _measures(port).items()}
        return InspectionResult(findings, measures, note="" if there or entries else "no InfiniBand or RoCE device")

    def forget(self, reason: str) -> None:
        """Also forget the kept state of each port. An inactive port is inspected again once it is active."""
        super().forget(reason)
        entries = self.kept.get("ports", {})
        if reason in {DOWN.code, MISSING.code}:
            self.kept["ports"] = {name: entry for name, entry in entries.items() if entry["down_ns"] is None}
        for entry in entries.values():
            if reason in {FLAP.code, REPEATED.code}:
                entry["flaps"] = []
            if reason == SLOW.code:
                entry["rate"] = 0.0
            entry["errors"] = {key: error for key, error in entry["errors"].items() if error[0] != reason}
            if reason in {LINK_ERRORS.code, ERRORS.code}:
                entry["windows"] = {}

    def hurry(self) -> None:
        """Inspect now."""
        self._hurried.set()

    def close(self) -> None:
        """End the wait."""
        self._hurried.set()

    def _wait_s(self) -> float:
        in_doubt = any(
            entry["down_ns"] is not None and self.clock_ns() < entry["down_ns"] + self.limits.down_s * 1e9
            for entry in self.kept["ports"].values()
        )
        return float(min(self.limits.interval_s, self.limits.down_s) if in_doubt else self.limits.interval_s)

    def _entry(self, before: Mapping[str, Any] | None, port: Port | None, now_ns: int) -> dict[str, Any]:
        """Return the kept state of a port; ``down_ns`` is when it became inactive, None if it is active."""
        counters = port.counters if port else {}
        downs = counters.get("link_downed")
        before = before or {"downs": downs, "down_ns": None}
        is_down = port is None or port.state != ACTIVE
        # Without the counter, only outages that an inspection sees are known. A counter that fell was reset.
        begun = int(rise(before["downs"], downs))
        was = LinkSeen(0, 0, before["down_ns"] is not None, before.get("uncounted", False))
        now = LinkSeen(0, begun, is_down)
        flaps = ended(was, now)
        went_down = is_down and (flaps or before["down_ns"] is None)
        errors = dict(before.get("errors", {}))
        windows = dict(before.get("windows", {}))
        for reason, limits in ((LINK_ERRORS, OF_LINK), (ERRORS, OF_BOTH_ENDS)):
            for limit in limits:
                key = f"{limit.counter} in {limit.within_s:g} s"
                seen, window = judged(limit, windows.get(key), counters.get(limit.counter), now_ns / 1e9)
                windows |= {key: window} if window else {}
                if seen and limit.counter not in self.limits.ignore_counters:
                    errors[key] = [reason.code, now_ns, seen]
        return {
            "downs": downs if downs is not None else before["downs"],
            "uncounted": is_uncounted(was, now),
            "down_ns": now_ns if went_down else before["down_ns"] if is_down else None,
            "flaps": with_flaps(before.get("flaps", []), now_ns, flaps, self.limits.lasts_s),
            "rate": max(before.get("rate", 0.0), port.rate if port else 0.0),
            "errors": {key: error for key, error in errors.items() if now_ns - error[1] < self.limits.lasts_s * 1e9},
            "windows": windows,
        }

    def _judged(self, name: str, entry: Mapping[str, Any], port: Port | None, now_ns: int) -> list[Finding]:
        found, flaps, ago_ns = [], entry["flaps"], now_ns - self.site.now_ns()
        if entry["down_ns"] is not None:
            down_s, since_ns = (now_ns - entry["down_ns"]) / 1e9, entry["down_ns"] - ago_ns
            if down_s >= self.limits.down_s:
                state = f"state {port.state}, physical state {port.physical_state}" if port else "missing"
                reason = DOWN if port else MISSING
                found.append(self.finding(reason, name, f"{state}, for {down_s:.0f} s", since_ns=since_ns))
            else:
                flaps = [*flaps, [entry["down_ns"], 1]]
        if flaps:
            number = number_of(flaps)
            text = f"the port went down {number} {'time' if number == 1 else 'times'}"
            text += f" within {self.limits.lasts_s:.0f} s"
            seen = f"link_downed is {entry['downs']}"
            found.append(self.finding(FLAP, name, seen, text=text, since_ns=flaps[0][0] - ago_ns))
            if again_ns := second_ns(flaps):
                found.append(self.finding(REPEATED, name, seen, text=text, since_ns=again_ns - ago_ns))
        if port and port.state == ACTIVE and 0 < port.rate < entry["rate"]:
            seen = f"{port.rate / 1e9:g} Gbit/s, {entry['rate'] / 1e9:g} before"
            found.append(self.finding(SLOW, name, seen))
        for reason in (LINK_ERRORS, ERRORS):
            errors = [error for error in entry["errors"].values() if error[0] == reason.code]
            if errors:
                since_ns = min(at_ns for _, at_ns, _ in errors) - ago_ns
                found.append(self.finding(reason, name, *(seen for *_, seen in errors), since_ns=since_ns))
        return found

    def _carried(self, now: Mapping[str, Any]) -> list[str] | None:
        """Return the ports that have carried traffic while ranks ran; None: that is not known yet."""
        before, carried = self.kept.get("traffic", {}), self.kept.get("carried")
        if before.get("pids") != now["pids"] or not now["pids"]:
            return carried
        least = self.limits.idle_bytes_per_s * (now["at_ns"] - before["at_ns"]) / 1e9
        moved = [name for name, value in now["total"].items() if rise(before["total"].get(name), value) > least]
        return sorted({*(carried or ()), *moved})

    def _is_used(self, name: str) -> bool:
        """Return whether a job uses a port.

        NCCL uses every active port unless a variable names the ports to use. A port that has carried no traffic while
        ranks ran, for example a port for storage, is not used.
        """
        device, _, number = name.partition(" port ")
        named = uses_port(device, number, self.site.variables())
        if self.limits.interfaces or named is not None:
            return bool(self.limits.interfaces or named)
        carried = self.kept["carried"]
        return carried is None or name in carried

    def _traffic(
        self, known: Mapping[str, Mapping[str, Any]], there: Mapping[str, Port], now_ns: int
    ) -> dict[str, Any]:
        """Return the kept state of RDMA traffic, which is measured while the same ranks run."""
        pids = sorted(rank.pid for rank in self.site.ranks() if rank.alive)
        total = {name: sum(port.counters.get(counter, 0.0) for counter in DATA) for name, port in there.items()}
        before = self.kept.get("traffic", {})
        now = {"pids": pids, "total": total, "at_ns": now_ns, "busy": False, "quiet_ns": now_ns}
        if before.get("pids") != pids or not pids:
            return now
        moved = sum(rise(before["total"].get(name), value) for name, value in total.items())
        elapsed_s = (now_ns - before["at_ns"]) / 1e9
        if moved > self.limits.idle_bytes_per_s * elapsed_s:
            return now | {"busy": True}
        return now | {"busy": before["busy"], "quiet_ns": before["quiet_ns"]}

    def _idle(self, now_ns: int) -> list[Finding]:
        traffic = self.kept["traffic"]
        quiet_s = (now_ns - traffic["quiet_ns"]) / 1e9
        if not traffic["busy"] or quiet_s < self.limits.idle_s:
            return []
        seen = f"less than {self.limits.idle_bytes_per_s:g} bytes a second on all ports for {quiet_s:.0f} s"
        return [self.finding(IDLE, "", seen, since_ns=self.site.now_ns() - (now_ns - traffic["quiet_ns"]))]


def _measures(port: Port) -> dict[str, float]:
    label = f'{{device="{port.device}",port="{port.number}"}}'
    measures = {
        f"node_infiniband_state_id{label}": float(port.state),
        f"node_infiniband_physical_state_id{label}": float(port.physical_state),
        f"node_infiniband_rate_bytes_per_second{label}": port.rate / 8,
    }
    for file, (measure, _) in COUNTERS.items():
        name = file.partition("/")[2]
        if name in port.counters:
            measures[f"node_infiniband_{measure}{label}"] = port.counters[name]
    return measures
