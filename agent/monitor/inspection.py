"""What every inspection looks like.

An inspection looks at one part of the machine again and again, in a thread of its own: it may wait for a sick
device, and nothing waits for it. It concludes only what it can know. What it cannot look at is unknown
(``CannotInspect``), what the machine does not have is nothing to inspect.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agent.exposition import Described
from everstep.model.finding import EVIDENCE_LINES, Finding, Health, Reason
from everstep.system.procfs import PROC

EVENTS = 64
"""Different events that an inspection notes at the same time, at most; the oldest go first."""


class Limits(BaseModel):
    """How often an inspection looks, and its thresholds; the base of each inspection's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    off: bool = False
    """Do not look at all."""
    interval_s: float = Field(default=2.0, gt=0)
    """From one look to the next, seconds. 2 for the host, 10 for GPUs, 30 for the network (ByteRobust, table 3)."""
    deadline_s: float = Field(default=10.0, gt=0)
    """A look that takes longer is said to hang."""


@dataclass(slots=True)
class Look:
    """What one look saw."""

    findings: list[Finding] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)
    """Name with unit, as Prometheus has them (``memory_available_bytes``), with labels as in ``x{device="eth0"}``."""
    facts: dict[str, str] = field(default_factory=dict)
    """What should be the same on all machines of a job, e.g. the version of the driver."""
    note: str = ""
    """Why there is nothing to inspect, e.g. ``no GPU``; empty: there is."""


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank that runs on the machine, or ran."""

    job: str
    rank: int
    pid: int
    alive: bool


@dataclass(frozen=True)
class Site:
    """The machine that is inspected, and where on it everything is."""

    machine: str = "m0"
    host: str = "127.0.0.1"
    """On which the agent listens."""
    state_dir: Path = Path("/var/lib/everstep")
    shm_dir: Path = Path("/dev/shm")
    proc: Path = PROC
    sys: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    kernel_log_tag: str = ""
    """Lines that a process wrote into the kernel log count where they begin with this; empty: none does, for any
    process could forge them. Drills use it."""
    fake_gpus: Path | None = None
    """File that describes GPUs which are not there (``agent.monitor.gpu.fake``); for drills and tests."""
    disk_problem: Callable[[], str] = lambda: ""
    """Why the state folder is not written."""
    ranks: Callable[[], list[RankSeen]] = list
    """Those that the agent started. Called in an inspection's thread."""
    beside: tuple[Path, ...] = ()
    """Folders of which only what belongs to this agent concerns it: where one computer stands for several machines."""
    now_ns: Callable[[], int] = time.time_ns

    def is_beside(self, path: Path) -> bool:
        """Whether a path belongs to another agent on this computer."""
        ours = path.is_relative_to(self.state_dir) or path.is_relative_to(self.shm_dir)
        return not ours and any(path.is_relative_to(folder) for folder in self.beside)


class Inspection(ABC):
    """Looks at one part of the machine.

    Args:
        site: Where it looks.
        limits: Its thresholds, of the type ``Limits`` of the class.
        kept: What it kept, of an earlier process: see ``kept``.
        same_boot: The machine was not started anew since that was kept: counters go on, and what is known holds.
    """

    name: ClassVar[str]
    """In settings, findings and metrics; it does not change."""
    looks_at: ClassVar[str]
    """One line."""
    reasons: ClassVar[tuple[Reason, ...]]
    """All that it can find."""
    metrics: ClassVar[Mapping[str, Described]] = {}
    """All that it can measure."""
    limits_type: ClassVar[type[Limits]] = Limits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Reason code → names in ``kept`` of what findings with it are compared with."""
    waits: ClassVar[bool] = False
    """A look waits by itself until something happens, or for ``interval_s``; the next one follows at once."""

    def __init__(self, site: Site, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        self.site = site
        self.limits: Any = limits
        self.kept: dict[str, Any] = dict(kept) if same_boot else self.after_reboot(kept)
        """What a later process needs to know: JSON, small, replaced or changed in a look."""

    def after_reboot(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """What still holds after the machine was started anew; by default nothing."""
        return {}

    @abstractmethod
    def look(self) -> Look:
        """Look once; may wait, in a thread of its own.

        Raises:
            CannotInspect: it cannot, with the reason.
            OSError: likewise.
        """

    def forget(self, reason: str) -> None:
        """What findings with a reason code are about was repaired: events count no more, and what is compared is
        compared with what the next inspection sees. Called between two looks, in their thread."""
        if "events" in self.kept:
            kept = self.kept["events"]
            self.kept["events"] = [event for event in kept if event["finding"]["reason"] != reason]
        for name in self.baselines.get(reason, ()):
            self.kept.pop(name, None)

    def note(self, found: Finding, *, at_ns: int, lasts_s: float | None) -> None:
        """Note what happened once and counts for some time, as a line of the kernel log does.

        Where it happened before and still counts, its evidence is added, and it counts from now on.

        Args:
            found: What happened.
            at_ns: When it did.
            lasts_s: For how long it counts; None: until the machine is started anew.
        """
        until_ns = 0 if lasts_s is None else at_ns + round(lasts_s * 1e9)
        events = self.kept["events"] = _current(self.kept.get("events", []), at_ns)
        for event in events:
            known = Finding.model_validate(event["finding"])
            if known.key == found.key:
                evidence = [*known.evidence, *(line for line in found.evidence if line not in known.evidence)]
                last_ns = max(at_ns, known.last_ns, known.since_ns)
                # The first lines of evidence say how it began.
                merged = known.model_copy(update={"evidence": evidence[:EVIDENCE_LINES], "last_ns": last_ns})
                event.update(finding=merged.model_dump(mode="json"), until_ns=until_ns, count=event["count"] + 1)
                return
        events.append({"finding": found.model_dump(mode="json"), "until_ns": until_ns, "count": 1})
        del events[: max(len(events) - EVENTS, 0)]

    def noted(self) -> list[Finding]:
        """What was noted and still counts; an event that came several times says how often."""
        found = []
        self.kept["events"] = _current(self.kept.get("events", []), self.site.now_ns())
        for event in self.kept["events"]:
            finding = Finding.model_validate(event["finding"])
            times = f" ({event['count']} times)" if event["count"] > 1 else ""
            found.append(finding.model_copy(update={"text": finding.text + times}))
        return found

    def hurry(self) -> None:  # noqa: B027 - most do not wait in a look
        """End the wait of a look that waits by itself, where that may be long. Called in another thread."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Give back what it holds; may be called while a look hangs."""

    def finding(
        self,
        reason: Reason,
        item: str = "",
        *evidence: str,
        text: str = "",
        since_ns: int = 0,
        verdict: Health | None = None,
    ) -> Finding:
        """A finding of this inspection.

        Args:
            reason: One of ``reasons``.
            item: Which part of the machine; of few, not of as many as there are events. Here and in what follows, bytes
                that are no UTF-8 are written as ``\\xff``.
            evidence: What was seen.
            text: One line; by default what the reason means.
            since_ns: When it was seen first; by default now.
            verdict: Another one than the reason's.
        """
        return reason.finding(
            self.name, item, *evidence, text=text, since_ns=since_ns or self.site.now_ns(), verdict=verdict
        )


def _current(events: list[dict[str, Any]], now_ns: int) -> list[dict[str, Any]]:
    """The events that still count."""
    return [event for event in events if not event["until_ns"] or event["until_ns"] > now_ns]
