"""This module has the base class of inspections, and the data that inspections exchange with the agent.

An inspection inspects one part of the machine again and again, in a thread of its own, so that a device that does not
answer does not delay other inspections. A part that cannot be inspected is unknown and not faulty (``CannotInspect``).
A part that the machine does not have is left out, with a note.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agent.exposition import Described
from everstep.model.finding import EVIDENCE_LINES, Finding, Health, Owner, Reason
from everstep.system.procfs import PROC

EVENTS = 64
"""Largest number of different events that an inspection keeps; the oldest are dropped first."""


class Limits(BaseModel):
    """The period and the deadline of an inspection; the base class of the settings of each inspection."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    off: bool = False
    """Turn this inspection off."""
    interval_s: float = Field(default=2.0, gt=0)
    """Period, seconds: 2 for the host, 10 for GPUs, 30 for the network (ByteRobust, table 3)."""
    deadline_s: float = Field(default=10.0, gt=0)
    """An inspection that takes longer is reported as hanging, seconds."""


@dataclass(slots=True)
class InspectionResult:
    """The result of inspecting once."""

    findings: list[Finding] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)
    """Name and value of each measure. The names follow the rules of Prometheus, with a unit and with labels, e.g.
    ``node_network_speed_bytes{device="eth0"}``."""
    facts: dict[str, str] = field(default_factory=dict)
    """Properties that should be equal on all machines of a job, e.g. the version of the driver."""
    note: str = ""
    """Why there is nothing to inspect, e.g. ``no GPU``; empty if the part was inspected."""


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank that the agent started on the machine."""

    job: str
    rank: int
    pid: int
    alive: bool


@dataclass(frozen=True)
class Site:
    """The machine that is inspected: the paths, addresses and functions that inspections read from."""

    machine: str = "m0"
    host: str = "127.0.0.1"
    """Address on which the agent listens."""
    state_dir: Path = Path("/var/lib/everstep")
    shm_dir: Path = Path("/dev/shm")
    proc: Path = PROC
    sys: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    kernel_log_tag: str = ""
    """Beginning of the lines of the kernel log that count although a process wrote them. Drills use it. Empty: no line
    from a process counts, because any process could forge one."""
    fake_gpus: Path | None = None
    """File that describes simulated GPUs (``agent.monitor.gpu.fake``), for drills and tests."""
    certificates: tuple[Path, ...] = ()
    """Files of the certificates that the agent presents, and of the authorities that it trusts."""
    disk_problem: Callable[[], str] = lambda: ""
    """Returns why the state folder cannot be written; an empty text if it can."""
    ranks: Callable[[], list[RankSeen]] = list
    """Returns the ranks that the agent started. It is called in the thread of an inspection."""
    variables: Callable[[], list[Mapping[str, str]]] = lambda: [os.environ]
    """Returns, for each job on the machine, the variables of its ranks that say which interfaces they use; if there is
    no job, it returns the variables of the agent."""
    healthy_gpus: dict[str, int] = field(default_factory=dict)
    """GPU, as findings name it → the last time at which an inspection found it healthy and its driver asked for no
    recovery, nanoseconds. All inspections share this table."""
    shared_folders: tuple[Path, ...] = ()
    """Folders that several agents on one computer share. Each agent inspects only its own folders in them."""
    now_ns: Callable[[], int] = time.time_ns

    def is_of_other_agent(self, path: Path) -> bool:
        """Whether a path belongs to another agent on this computer."""
        ours = path.is_relative_to(self.state_dir) or path.is_relative_to(self.shm_dir)
        return not ours and any(path.is_relative_to(folder) for folder in self.shared_folders)


class Inspection(ABC):
    """Inspects one part of the machine.

    Args:
        site: The machine.
        limits: Settings, of the class's ``limits_type``.
        kept: State that the inspection of an earlier agent kept (see the attribute ``kept``); empty: there is none.
        same_boot: Whether the machine has not been rebooted since, so that the kernel's counters were not reset.
    """

    name: ClassVar[str]
    """The name in settings, findings and metrics; it does not change from release to release."""
    inspects: ClassVar[str]
    """One line for a person: the part of the machine that is inspected."""
    reasons: ClassVar[tuple[Reason, ...]]
    """All reasons of its findings."""
    metrics: ClassVar[Mapping[str, Described]] = {}
    """All measures."""
    limits_type: ClassVar[type[Limits]] = Limits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Reason code → keys in ``kept`` of the earlier values that findings with this reason are compared with."""
    waits: ClassVar[bool] = False
    """Whether ``inspect`` itself waits for an event, ``interval_s`` at most; if so, it is called again at once."""

    def __init__(self, site: Site, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        self.site = site
        self.limits: Any = limits
        self.kept: dict[str, Any] = dict(kept) if same_boot else self.after_reboot(kept)
        """Small state, in JSON types, that the next agent gets; ``inspect`` changes or replaces it."""

    def after_reboot(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of the kept state that is still valid after a reboot of the machine; by default none."""
        return {}

    @abstractmethod
    def inspect(self) -> InspectionResult:
        """Inspect once. The call may take long: it runs in the inspection's own thread.

        Raises:
            CannotInspect: the part cannot be inspected; the message says why.
            OSError: the part cannot be inspected, because of an error of the system.
        """

    def forget(self, reason: str) -> None:
        """Forget the events and the earlier values behind findings with a reason code, because the fault was repaired.

        Called in the inspection's thread, between two inspections.
        """
        if "events" in self.kept:
            kept = self.kept["events"]
            self.kept["events"] = [event for event in kept if event["finding"]["reason"] != reason]
        for name in self.baselines.get(reason, ()):
            self.kept.pop(name, None)

    def note(self, finding: Finding, *, at_ns: int, lasts_s: float | None) -> None:
        """Keep an event as an active finding for some time, e.g. a line of the kernel log.

        If the same event is active already, its evidence is extended and its time begins again.

        Args:
            finding: The event.
            at_ns: When it happened, nanoseconds of the machine's clock.
            lasts_s: How long it stays active; None: until the machine is rebooted.
        """
        until_ns = 0 if lasts_s is None else at_ns + round(lasts_s * 1e9)
        events = self.kept["events"] = _current(self.kept.get("events", []), at_ns)
        for event in events:
            known = Finding.model_validate(event["finding"])
            if known.key == finding.key:
                evidence = [*known.evidence, *(line for line in finding.evidence if line not in known.evidence)]
                last_ns = max(at_ns, known.last_ns, known.since_ns)
                # The first lines are kept: they show how it began.
                merged = known.model_copy(update={"evidence": evidence[:EVIDENCE_LINES], "last_ns": last_ns})
                event.update(finding=merged.model_dump(mode="json"), until_ns=until_ns, count=event["count"] + 1)
                return
        events.append({"finding": finding.model_dump(mode="json"), "until_ns": until_ns, "count": 1})
        del events[: max(len(events) - EVENTS, 0)]

    def noted(self) -> list[Finding]:
        """Return the events that are still active, as findings; the text of a repeated event has its count."""
        findings = []
        self.kept["events"] = _current(self.kept.get("events", []), self.site.now_ns())
        for event in self.kept["events"]:
            finding = Finding.model_validate(event["finding"])
            times = f" ({event['count']} times)" if event["count"] > 1 else ""
            findings.append(finding.model_copy(update={"text": finding.text + times}))
        return findings

    def hurry(self) -> None:  # noqa: B027 - most inspections do not wait
        """End the wait inside ``inspect``. Called in another thread."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release resources. It may be called while ``inspect`` hangs."""

    def finding(
        self,
        reason: Reason,
        item: str = "",
        *evidence: str,
        text: str = "",
        since_ns: int = 0,
        verdict: Health | None = None,
    ) -> Finding:
        """Make a finding of this inspection; see :meth:`everstep.model.finding.Reason.found`.

        Args:
            reason: One of ``reasons``.
            item: The part of the machine. Each item is a finding of its own, so there should be few.
            evidence: The numbers or lines that show the fault.
            text: One line for a person; by default the meaning of the reason.
            since_ns: When the fault was seen first; by default now.
            verdict: Overrides the verdict of the reason.
        """
        return reason.finding(
            self.name, item, *evidence, text=text, since_ns=since_ns or self.site.now_ns(), verdict=verdict
        )


def of_no_job(finding: Finding) -> Finding:
    """Convert a finding to one about a part that no job uses. It is still shown, but it does not blame the machine."""
    text = f"{finding.text} (no job on this machine uses it)"
    return finding.model_copy(update={"verdict": Health.UNKNOWN, "owner": Owner.UNKNOWN, "sure": False, "text": text})


def _current(events: list[dict[str, Any]], now_ns: int) -> list[dict[str, Any]]:
    """Return the events whose time is not over."""
    return [event for event in events if not event["until_ns"] or event["until_ns"] > now_ns]
