"""The monitor: it runs each inspection in a thread of its own, detects an inspection that hangs, and reports changes.

A finding is reported when it begins, when its verdict becomes another one, and when it is over. A finding that comes
and goes is over only after it stayed away for ``OVER_S``. Where it is back before that, it is reported again,
for a job may have begun meanwhile; but each time less soon, so that a part that flickers cannot fill the log of
observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import structlog

from agent.monitor.inspection import Inspection, Look
from agent.monitor.kept import KeptStates
from everstep.base.log_once import LoggedErrors
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy, verdict_of, worst_first

UNABLE = Reason(
    "cannot-inspect",
    "it cannot be inspected",
    owner=Owner.UNKNOWN,
    remedy=Remedy.CHECK_SETUP,
    verdict=Health.UNKNOWN,
)
"""Every inspection can find this: it was not able to look."""
HANGS = Reason(
    "inspection-hangs",
    "an inspection does not come back",
    owner=Owner.UNKNOWN,
    remedy=Remedy.WATCH,
    verdict=Health.UNKNOWN,
)
"""Every inspection can find this: its look takes longer than it has."""
OVER_S = 30.0
"""A finding that was not seen again for this long is over."""
AGAIN_S = 3600.0
"""A finding that comes and goes is reported again after ``OVER_S`` at first, then after twice as long each time, and in
the end this often."""
LOOK_S = 1.0
"""Between two looks at which inspections hang, seconds."""
CLEARED_S = 0.02
"""Between two looks at whether what was cleared was looked at again, seconds."""
MOST_REPORTED = 64
"""Most findings of one inspection that are reported; further ones are shown only."""

KEPT_AS = "monitor"
"""The monitor keeps what was reported under this name, beside what inspections keep."""

Report = Callable[[Finding, bool], None]
"""Accepts a finding that began, or, where the second argument is True, a finding that is over."""

logger = structlog.get_logger()


class Inspector:
    """Runs an inspection in its thread.

    Args:
        inspection: The inspection.
        kept: Stores the inspection's state.
        changed: Called in the thread when the findings have changed.
        silence: Reason codes that are left out of the findings.
        reported: Active findings that an earlier agent reported; a finding that is still active began then.
    """

    def __init__(
        self,
        inspection: Inspection,
        kept: KeptStates,
        changed: Callable[[], None],
        silence: Collection[str] = (),
        reported: Iterable[Finding] = (),
    ) -> None:
        self.inspection = inspection
        self._kept = kept
        self._changed = changed
        self._silence = frozenset(silence)
        self._look = Look()
        self._since = {_same(found): found.since_ns for found in reported}
        """When each finding began that lasts. It stays, whatever the clock of the machine is set to meanwhile."""
        self._unable_since = 0
        self._failures = LoggedErrors()
        self._began = math.inf
        """When the look began that is under way, by the monotonic clock; infinite: none is."""
        self._clear: list[str] = []
        """Reason codes to forget before the next look."""
        self._cleared: list[str] = []
        """Those that were forgotten before the newest look."""
        self._asked = self._done = 0
        """How often that was wished, and how often a look has followed; each written by one thread only."""
        self._ended = False
        self._woken = threading.Event()
        self.looked_ns = 0
        """When the last look came back; 0: none did."""
        self.looks = 0
        self.busy_s = 0.0
        """CPU time of all looks."""
        self._thread = threading.Thread(target=self._run, name=f"inspect {inspection.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look that hangs is left to itself."""
        self._ended = True
        self._woken.set()
        self.inspection.close()

    @property
    def hangs_s(self) -> float:
        """How much longer than it has the look that is under way takes, seconds; 0: it does not."""
        limits = self.inspection.limits
        allowed = limits.deadline_s + (limits.interval_s if self.inspection.waits else 0.0)
        return max(time.monotonic() - self._began - float(allowed), 0.0)

    @property
    def knows(self) -> bool:
        """Whether the last look was able to see: what it did not find is not there."""
        return self.looks > 0 and not self._unable_since and not self.hangs_s

    @property
    def look(self) -> Look:
        """What the last look saw; that it hangs, while it does."""
        seen = self._look
        if over_s := self.hangs_s:
            text = f"{self.inspection.name} does not come back for {over_s + self.inspection.limits.deadline_s:.0f} s"
            now_ns = self.inspection.site.now_ns()
            hanging = self.inspection.finding(HANGS, "", text=text, since_ns=now_ns - round(over_s * 1e9))
            findings = [found for found in (*seen.findings, hanging) if found.reason not in self._silence]
            return Look(findings, seen.measures, seen.facts, seen.note)
        return seen

    def clear(self, reason: str) -> int:
        """Forget what findings with a reason code rest on, and look at once; returns how many there are now.

        What is a state, and neither an event nor compared with what was, is found again then.
        """
        found = sum(seen.reason == reason for seen in self._look.findings)
        if found:
            self._asked += 1
            self._clear.append(reason)
            self._woken.set()
            self.inspection.hurry()
        return found

    @property
    def clearing(self) -> bool:
        """Whether no look has followed yet to what was cleared."""
        return self._done < self._asked

    def look_once(self) -> Look:
        """Look now, in this thread; what goes wrong is a finding."""
        self._began = time.monotonic()
        cpu = time.thread_time()
        self._cleared = []
        try:
            while self._clear:
                self._cleared.append(self._clear.pop(0))
                self.inspection.forget(self._cleared[-1])
            if self._cleared:
                self.inspection.hurry()  # what woke the look before is used up: this one is not to wait either
            seen = self.inspection.look()
            if not isinstance(seen, Look):
                raise TypeError(f"look() gave {type(seen).__name__} and no Look")
            if other := [found for found in seen.findings if not isinstance(found, Finding)]:
                raise TypeError(f"look() found {type(other[0]).__name__} and no Finding")
            self._unable_since = 0
        except (CannotInspect, OSError) as error:
            seen = self._unable(str(error))
        except Exception as error:
            if self._failures.is_new(self.inspection.name, error):  # not at every look: it is a finding anyway
                logger.exception("an inspection failed", inspection=self.inspection.name)
            seen = self._unable(f"{type(error).__name__}: {error}")
        self._began = math.inf
        self.busy_s += time.thread_time() - cpu
        self.looks += 1
        self.looked_ns = self.inspection.site.now_ns()
        return seen

    def _unable(self, why: str) -> Look:
        self._unable_since = self._unable_since or self.inspection.site.now_ns()
        return Look([self._cannot(why)], note="")

    def _cannot(self, why: str) -> Finding:
        return self.inspection.finding(UNABLE, text=f"{self.inspection.name}: {why}", since_ns=self._unable_since)

    def _run(self) -> None:
        while not self._ended:
            seen = self.look_once()
            if self._ended:
                return
            before = self._look
            seen.findings = [self._lasting(found) for found in seen.findings if found.reason not in self._silence]
            since = {_same(found): found.since_ns for found in seen.findings}
            self._since = self._since | since if self._unable_since else since
            self._look = seen
            self._done += len(self._cleared)
            self._kept.keep(self.inspection.name, self.inspection.kept)
            is_other = {found.key for found in before.findings} != {found.key for found in seen.findings}
            if self.looks == 1 or self._cleared or is_other:
                self._changed()
            if not self.inspection.waits or self._unable_since:
                self._woken.wait(self.inspection.limits.interval_s)
                self._woken.clear()

    def _lasting(self, found: Finding) -> Finding:
        """With when it began, where it was found before and was not cleared since."""
        began_ns = None if found.reason in self._cleared else self._since.get(_same(found))
        return found.model_copy(update={"since_ns": began_ns or found.since_ns})


def _same(found: Finding) -> tuple[object, ...]:
    """What makes it the finding that it was at the look before; with another verdict it begins anew."""
    return *found.key, found.verdict


@dataclass(slots=True)
class ReportedFinding:
    """A finding that was reported to have begun; times by the monotonic clock, seconds."""

    found: Finding
    seen_s: float
    """When it was seen last."""
    again_s: float
    """Should it come back, it is reported again from then on."""
    wait_s: float = OVER_S
    """How long ``again_s`` was after it was reported."""
    away: bool = False
    """It was not seen at some look since it was reported."""
    ended: bool = False
    """It was repaired, or the machine was started anew: a finding with a later beginning is another one."""


@dataclass(frozen=True, slots=True)
class InspectionState:
    """The state of one inspection."""

    name: str
    looks_at: str
    verdict: Health
    findings: list[Finding]
    measures: dict[str, float]
    facts: dict[str, str]
    note: str
    interval_s: float
    looked_ns: int
    """When it looked last; 0: not yet."""
    looks: int
    busy_s: float
    """CPU time of all looks, seconds."""


class Monitor:
    """The monitor of one agent.

    Args:
        inspections: All inspections of the machine.
        kept: Where their states go.
        report: Accepts what changed, in the event loop.
        silence: Reason codes that are neither reported nor shown.
    """

    def __init__(
        self, inspections: Sequence[Inspection], kept: KeptStates, report: Report, silence: Collection[str] = ()
    ) -> None:
        self._report = report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._kept = kept
        self._reported: dict[tuple[str, str, str], ReportedFinding] = {}
        """Findings that were reported and are not over, by an earlier agent too."""
        now_s = time.monotonic()
        for reported in kept.of(KEPT_AS).get("findings", []):
            found = Finding.model_validate(reported)
            self._reported[found.key] = ReportedFinding(found, now_s, now_s + OVER_S, ended=not kept.same_boot)
        lasting = [reported.found for reported in self._reported.values() if not reported.ended]
        self.inspectors = [
            Inspector(
                inspection,
                kept,
                self._wake,
                silence,
                [found for found in lasting if found.inspection == inspection.name],
            )
            for inspection in inspections
        ]

    async def run(self) -> None:
        """Look until cancelled."""
        self._loop = asyncio.get_running_loop()
        for inspector in self.inspectors:
            inspector.start()
        try:
            while True:
                self.report_changes(time.monotonic())
                self._woken.clear()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            for inspector in self.inspectors:
                inspector.stop()

    def states(self) -> list[InspectionState]:
        """Return the state of every inspection."""
        return [_state(inspector) for inspector in self.inspectors]

    def findings(self) -> list[Finding]:
        """Return all findings that are not healthy now, the worst first."""
        return worst_first(found for inspector in self.inspectors for found in inspector.look.findings)

    def clear(self, reason: str) -> int:
        """Let events with a reason code count no more; returns how many findings that are."""
        for reported in self._reported.values():
            reported.ended = reported.ended or reported.found.reason == reason
        return sum(inspector.clear(reason) for inspector in self.inspectors)

    async def cleared(self, wait_s: float) -> bool:
        """Wait until what was cleared is looked at again, for ``wait_s`` at most; returns whether it was."""
        until = time.monotonic() + wait_s
        while waits := any(inspector.clearing for inspector in self.inspectors):
            if time.monotonic() >= until:
                break
            await asyncio.sleep(CLEARED_S)
        return not waits

    def report_changes(self, now_s: float) -> None:
        """Report what began or is back, and what has been over for long enough; ``now_s``: by the monotonic clock."""
        before = {key: (reported.found.verdict, reported.ended) for key, reported in self._reported.items()}
        seen = [found for inspector in self.inspectors for found in inspector.look.findings[:MOST_REPORTED]]
        blind = {inspector.inspection.name for inspector in self.inspectors if not inspector.knows}
        for found in seen:
            self._see(found, now_s)
        present = {found.key for found in seen}
        for key, reported in list(self._reported.items()):
            if key in present or reported.found.inspection in blind:
                continue
            reported.away = True
            if reported.ended or now_s - reported.seen_s >= OVER_S:
                del self._reported[key]
                self._report(reported.found, True)
        if before != {key: (reported.found.verdict, reported.ended) for key, reported in self._reported.items()}:
            reported_now = [reported.found.model_dump(mode="json") for reported in self._reported.values()]
            self._kept.keep(KEPT_AS, {"findings": reported_now})

    def _see(self, found: Finding, now_s: float) -> None:
        known = self._reported.get(found.key)
        if known and known.ended and found.since_ns > known.found.since_ns:
            self._report(known.found, True)
            known = None
        if known is None or (known.found.verdict, known.found.sure) != (found.verdict, found.sure):
            self._report(found, False)
            self._reported[found.key] = ReportedFinding(found, now_s, now_s + OVER_S)
            return
        known.found, known.seen_s = found, now_s
        if known.away and now_s >= known.again_s:
            self._report(found, False)
            known.wait_s = min(2 * known.wait_s, AGAIN_S)
            known.again_s, known.away = now_s + known.wait_s, False

    def _wake(self) -> None:
        if self._loop:
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile, and its loop is closed
                self._loop.call_soon_threadsafe(self._woken.set)


def _state(inspector: Inspector) -> InspectionState:
    inspection, look = inspector.inspection, inspector.look
    return InspectionState(
        name=inspection.name,
        looks_at=inspection.looks_at,
        verdict=verdict_of(look.findings) if inspector.looked_ns or look.findings else Health.UNKNOWN,
        findings=look.findings,
        measures=look.measures,
        facts=look.facts,
        note=look.note,
        interval_s=inspection.limits.interval_s,
        looked_ns=inspector.looked_ns,
        looks=inspector.looks,
        busy_s=inspector.busy_s,
    )
