"""This module inspects links of network interfaces: whether they are down, flapping, missing or slower than before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits, Site, of_no_job
from agent.monitor.network import interfaces
from agent.monitor.network.interfaces import NetworkLimits
from agent.monitor.network.netlink import Link, LinkChanges
from agent.monitor.network.outages import LinkSeen, ended, is_uncounted, number_of, second_ns, with_flaps
from agent.monitor.network.used import uses_interface
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy

DOWN = Reason(
    "nic-down",
    "the link is down",
    Owner.NETWORK,
    Remedy.WATCH,
    source="ByteRobust, table 3, has it as an item",
)
FLAP = Reason(
    "nic-flap",
    "the link went down and came back",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust tolerates short flaps",
)
REPEATED = Reason(
    "nic-flap-repeated",
    "the link went down at least twice within a short time",
    Owner.NETWORK,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust acts on the second alert in 5 minutes",
)
MISSING = Reason("nic-missing", "a network interface has disappeared", remedy=Remedy.REPLACE)
SLOW = Reason("nic-slow", "the link is slower than before", Owner.NETWORK, Remedy.WATCH)
NOT_FOUND = Reason(
    "nic-not-found",
    "a network interface that the settings name does not exist",
    Owner.UNKNOWN,
    Remedy.CHECK_SETUP,
    Health.UNKNOWN,
)
PAUSE_S = 0.1
"""Wait after a change, seconds, so that several quick changes are seen together."""
MEGABITS = 1_000_000 // 8
"""Bytes per second of 1 Mbit/s."""


class LinkLimits(NetworkLimits):
    """Thresholds for links."""

    down_s: float = Field(default=10.0, ge=0)
    """A link that is down for this long is faulty, seconds; a shorter outage is a flap."""
    lasts_s: float = Field(default=300.0, gt=0)
    """How long a flap stays active, seconds (ByteRobust acts on the second alert in 5 minutes)."""


class LinkInspection(Inspection):
    """Inspects at every change that netlink reports. Counters of the kernel show flaps that no inspection saw."""

    name: ClassVar[str] = "link"
    inspects: ClassVar[str] = "network interfaces: link down, flapping, missing, slower than before"
    reasons: ClassVar[tuple[Reason, ...]] = (DOWN, FLAP, REPEATED, MISSING, SLOW, NOT_FOUND)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("node_network_up", "device", "1 if the interface has a carrier"),
        ("node_network_carrier_down_changes_total", "device", "how often it lost the carrier"),
        ("node_network_speed_bytes", "device", "bytes a second; absent where the driver does not report it"),
    )
    limits_type: ClassVar[type[Limits]] = LinkLimits
    waits: ClassVar[bool] = True
    clock_ns: Callable[[], int] = staticmethod(time.monotonic_ns)
    speeds: Callable[[], dict[str, int]] = staticmethod(interfaces.speeds)

    def __init__(self, site: Site, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._changes = LinkChanges()
        self._indexes: set[int] | None = None
        """Kernel's indexes of the inspected interfaces; None: there was no inspection yet, or it failed."""

    def inspect(self) -> InspectionResult:
        """Wait for a change, and inspect all links."""
        self._changes.open()
        indexes, self._indexes = self._indexes, None
        if indexes is not None and self._changes.wait(indexes, self._wait_s()):
            time.sleep(PAUSE_S)
        if self.kept.get("namespace") != interfaces.namespace():
            self.kept = {"namespace": interfaces.namespace(), "links": {}}
        known = {name: dict(entry) for name, entry in self.kept["links"].items()}
        there, names = interfaces.looked_at(self.site.host, known, self.limits)
        self._indexes = {link.index for link in there.values()}
        gone = [name for name in known if name not in names and interfaces.may_be_looked_at(name, self.limits)]
        now_ns, speeds = self.clock_ns(), self.speeds()
        entries = {name: self._entry(known.get(name), there.get(name), now_ns) for name in (*there, *gone)}
        for name, entry in entries.items():
            entry["speed"] = max(entry.get("speed", 0), speeds.get(name, 0))
        self.kept = self.kept | {"links": entries}
        findings: list[Finding] = []
        for name, entry in entries.items():
            found = self._judged(name, entry, now_ns)
            if name in there and there[name].carrier and 0 < speeds.get(name, 0) < entry["speed"]:
                found.append(self.finding(SLOW, name, f"{speeds[name]} Mbit/s, {entry['speed']} before"))
            findings += found if self._is_used(name, entry) else map(of_no_job, found)
        findings += [self.finding(NOT_FOUND, name) for name in interfaces.never_seen(entries, self.limits)]
        return InspectionResult(
            findings, _measures(there, speeds), note="" if entries else "no network interface to inspect"
        )

    def forget(self, reason: str) -> None:
        """Also forget the kept state of each interface. An interface that is down is inspected again once it is up."""
        super().forget(reason)
        entries = self.kept.get("links", {})
        if reason in {DOWN.code, MISSING.code}:
            self.kept["links"] = {name: entry for name, entry in entries.items() if entry["down_ns"] is None}
        for entry in entries.values():
            if reason in {FLAP.code, REPEATED.code}:
                entry["flaps"] = []
            if reason == SLOW.code:
                entry["speed"] = 0

    def hurry(self) -> None:
        """End the wait for a change."""
        self._changes.hurry()

    def close(self) -> None:
        """End the current wait and all later ones."""
        self._changes.close()

    def _wait_s(self) -> float:
        """Return the seconds until the next inspection, at the latest when an outage becomes a fault."""
        now_ns = self.clock_ns()
        began_ns = [entry["down_ns"] for entry in self.kept["links"].values() if entry["down_ns"] is not None]
        ends_ns = [down_ns + self.limits.down_s * 1e9 for down_ns in began_ns]
        left_s = min(((end_ns - now_ns) / 1e9 for end_ns in ends_ns if end_ns > now_ns), default=math.inf)
        return float(min(self.limits.interval_s, left_s))

    def _entry(self, before: dict[str, Any] | None, link: Link | None, now_ns: int) -> dict[str, Any]:
        """Return the kept state of an interface; ``down_ns`` is when the current outage began, None: the link is up."""
        if before is None:
            assert link is not None, "an interface that does not exist was inspected before"
            before = {"index": link.index, "downs": link.downs, "down_ns": None}
        was = LinkSeen(before["index"], before["downs"], before["down_ns"] is not None, before.get("uncounted", False))
        now = LinkSeen(link.index, link.downs, not link.carrier) if link else LinkSeen(was.index, was.downs, True)
        flaps = ended(was, now)
        went_down = now.is_down and (flaps or not was.is_down)
        return before | {
            "index": now.index,
            "downs": now.downs,
            "uncounted": is_uncounted(was, now),
            "down_ns": now_ns if went_down else before["down_ns"] if now.is_down else None,
            "flaps": with_flaps(before.get("flaps", []), now_ns, flaps, self.limits.lasts_s),
            "own": link.own if link else before.get("own", False),
            "there": link is not None,
            "on": bool(link and link.switched_on),
        }

    def _is_used(self, name: str, entry: dict[str, Any]) -> bool:
        """Return whether a job uses an interface: the settings list it, its variables name it, or it is the agent's."""
        return bool(self.limits.interfaces) or entry["own"] or uses_interface(name, self.site.variables())

    def _judged(self, name: str, entry: dict[str, Any], now_ns: int) -> list[Finding]:
        """Return the findings about one interface. A short outage that is not over is reported as a flap."""
        found, flaps, ago_ns = [], entry["flaps"], now_ns - self.site.now_ns()
        down_s = 0.0 if entry["down_ns"] is None else (now_ns - entry["down_ns"]) / 1e9
        is_open = entry["down_ns"] is not None and down_s < self.limits.down_s
        if entry["down_ns"] is not None and not is_open:
            reason = DOWN if entry["there"] else MISSING
            off = "" if entry["on"] or not entry["there"] else "the link is down: the interface is switched off"
            since_ns = entry["down_ns"] - ago_ns
            found.append(self.finding(reason, name, f"for {down_s:.0f} s", text=off, since_ns=since_ns))
        if is_open:
            flaps = [*flaps, [entry["down_ns"], 1]]
        if flaps:
            number = number_of(flaps)
            times = "once" if number == 1 else f"{number} times"
            text = f"the link went down {times} within {self.limits.lasts_s:.0f} s"
            seen = f"the kernel has counted {entry['downs']} outages since the interface was created"
            still = ", and is still down" if is_open else ""
            found.append(self.finding(FLAP, name, seen, text=text + still, since_ns=flaps[0][0] - ago_ns))
            if again_ns := second_ns(flaps):
                found.append(self.finding(REPEATED, name, seen, text=text + still, since_ns=again_ns - ago_ns))
        return found


def _measures(links: Mapping[str, Link], speeds: Mapping[str, int]) -> dict[str, float]:
    measures = {}
    for name, link in links.items():
        label = f'{{device="{name}"}}'
        measures[f"node_network_up{label}"] = float(link.carrier)
        measures[f"node_network_carrier_down_changes_total{label}"] = float(link.downs)
        if name in speeds:
            measures[f"node_network_speed_bytes{label}"] = float(speeds[name] * MEGABITS)
    return measures
