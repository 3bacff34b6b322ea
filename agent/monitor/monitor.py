"""The monitor runs all inspections of a machine, detects inspections that hang, and reports changes of findings.

A finding is reported when it begins, when its verdict changes, and when it is over. It is over when no inspection has
seen it for ``OVER_S``. A finding that returns before that is reported again, because a job may have begun meanwhile.
The wait before each repeated report is twice as long as the wait before, so that a part that often changes does not
fill the log of observations. A network alert that begins again is reported without this wait, because the second alert
of a machine counts (``everstep/decisions/blame/alerts.py``).
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

from agent.monitor.inspection import Inspection, InspectionResult
from agent.monitor.kept import KeptStates
from agent.reporting.observations import finding_message
from agent.v1 import agent_pb2 as pb
from everstep.base.log_once import LoggedErrors
from everstep.decisions.blame.alerts import ONE_ALERT_S, is_alert
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy, verdict_of, worst_first

UNABLE = Reason("cannot-inspect", "it cannot be inspected", Owner.UNKNOWN, Remedy.CHECK_SETUP, Health.UNKNOWN)
"""Every inspection can report this: it was not able to inspect its part."""
HANGS = Reason("inspection-hangs", "an inspection does not end", Owner.UNKNOWN, Remedy.WATCH, Health.UNKNOWN)
"""Every inspection can report this: it takes longer than its deadline."""
OVER_S = 30.0
"""A finding that was not seen for this long is over, seconds."""
AGAIN_S = 3600.0
"""Longest wait between two reports of a finding that returns again and again, seconds; the first is ``OVER_S``."""
POLL_S = 1.0
"""Period of the check for inspections that hang, seconds."""
CLEARED_S = 0.02
"""Period of the check whether an inspection has followed a clearing, seconds."""
MOST_REPORTED = 64
"""Largest number of findings of one inspection that are reported, and of findings in one message."""

KEPT_AS = "monitor"
"""Name under which the monitor keeps its reported findings, like the state of an inspection."""

Report = Callable[[Finding, bool], None]
"""Accepts a finding that began (False) or that is over (True)."""

logger = structlog.get_logger()


class Inspector:
    """Runs an inspection in its thread.

    Args:
        inspection: The inspection.
        kept: Stores the inspection's state.
        changed: Called in the thread when the findings have changed.
        silence: Reason codes that are left out of the findings.
        reported: Active findings that an earlier agent reported. Those that are still seen keep the time at which they
            began.
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
        self._result = InspectionResult()
        self._since = {_identity(finding): finding.since_ns for finding in reported}
        """When each active finding began. It is remembered, since the machine's clock may be set meanwhile."""
        self._unable_since = 0
        self._failures = LoggedErrors()
        self._began = math.inf
        """When the running ``inspect`` began, by the monotonic clock; infinite: none is running."""
        self._to_clear: list[str] = []
        """Reason codes to forget before the next inspection."""
        self._cleared: list[str] = []
        """Reason codes that were forgotten before the newest inspection."""
        self._asked = self._done = 0
        """How many clearings were requested, and how many of them an inspection has followed. The event loop writes the
        first number, and the inspection's thread the second."""
        self._ended = False
        self._woken = threading.Event()
        self.inspected_ns = 0
        """When the last inspection ended; 0: none has ended."""
        self.inspections = 0
        self.busy_s = 0.0
        """CPU time of all inspections, seconds."""
        self._thread = threading.Thread(target=self._run, name=f"inspect {inspection.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Inspect no more. The thread of an inspection that hangs is abandoned."""
        self._ended = True
        self._woken.set()
        self.inspection.close()

    @property
    def hangs_s(self) -> float:
        """By how much the running inspection exceeds its deadline, seconds; 0: it does not."""
        limits = self.inspection.limits
        allowed = limits.deadline_s + (limits.interval_s if self.inspection.waits else 0.0)
        return max(time.monotonic() - self._began - float(allowed), 0.0)

    @property
    def is_certain(self) -> bool:
        """Whether the last inspection succeeded, so that a fault that is not among its findings does not exist."""
        return self.inspections > 0 and not self._unable_since and not self.hangs_s

    @property
    def result(self) -> InspectionResult:
        """The newest result; while an inspection hangs, a finding about that is added."""
        newest = self._result
        if over_s := self.hangs_s:
            text = f"{self.inspection.name} has not ended for {over_s + self.inspection.limits.deadline_s:.0f} s"
            now_ns = self.inspection.site.now_ns()
            hanging = self.inspection.finding(HANGS, text=text, since_ns=now_ns - round(over_s * 1e9))
            findings = [finding for finding in (*newest.findings, hanging) if finding.reason not in self._silence]
            return InspectionResult(findings, newest.measures, newest.facts, newest.note)
        return newest

    def clear(self, reason: str) -> int:
        """Forget what findings with a reason code are based on, and inspect at once.

        A lasting state, such as a full disk, is reported again.

        Returns:
            The number of active findings with this code.
        """
        active = sum(finding.reason == reason for finding in self._result.findings)
        if active:
            self._asked += 1
            self._to_clear.append(reason)
            self._woken.set()
            self.inspection.hurry()
        return active

    @property
    def clearing(self) -> bool:
        """Whether the inspection that follows a clearing has not ended yet."""
        return self._done < self._asked

    def inspect_once(self) -> InspectionResult:
        """Inspect now, in this thread. An error becomes a finding."""
        self._began = time.monotonic()
        cpu = time.thread_time()
        self._cleared = []
        try:
            while self._to_clear:
                self._cleared.append(self._to_clear.pop(0))
                self.inspection.forget(self._cleared[-1])
            if self._cleared:
                self.inspection.hurry()  # the first call only ended the previous wait; this inspection must not wait
            result = self.inspection.inspect()
            if not isinstance(result, InspectionResult):
                raise TypeError(f"inspect() returned {type(result).__name__} and not InspectionResult")
            if other := [finding for finding in result.findings if not isinstance(finding, Finding)]:
                raise TypeError(f"inspect() returned a finding of type {type(other[0]).__name__} and not Finding")
            self._unable_since = 0
        except (CannotInspect, OSError) as error:
            result = self._unable(str(error))
        except Exception as error:
            if self._failures.is_new(self.inspection.name, error):  # logged once: the finding shows it anyway
                logger.exception("an inspection failed", inspection=self.inspection.name)
            result = self._unable(f"{type(error).__name__}: {error}")
        self._began = math.inf
        self.busy_s += time.thread_time() - cpu
        self.inspections += 1
        self.inspected_ns = self.inspection.site.now_ns()
        return result

    def _unable(self, why: str) -> InspectionResult:
        self._unable_since = self._unable_since or self.inspection.site.now_ns()
        text = f"{self.inspection.name}: {why}"
        return InspectionResult([self.inspection.finding(UNABLE, text=text, since_ns=self._unable_since)])

    def _run(self) -> None:
        while not self._ended:
            result = self.inspect_once()
            if self._ended:
                return
            before = self._result
            result.findings = [
                self._lasting(finding) for finding in result.findings if finding.reason not in self._silence
            ]
            since = {_identity(finding): finding.since_ns for finding in result.findings}
            self._since = self._since | since if self._unable_since else since
            self._result = result
            self._done += len(self._cleared)
            self._kept.keep(self.inspection.name, self.inspection.kept)
            is_other = {finding.key for finding in before.findings} != {finding.key for finding in result.findings}
            if self.inspections == 1 or self._cleared or is_other:
                self._changed()
            if not self.inspection.waits or self._unable_since:
                self._woken.wait(self.inspection.limits.interval_s)
                self._woken.clear()

    def _lasting(self, finding: Finding) -> Finding:
        """Give a finding the time at which it began, if it was active before and was not cleared since."""
        began_ns = None if finding.reason in self._cleared else self._since.get(_identity(finding))
        return finding.model_copy(update={"since_ns": began_ns or finding.since_ns})


def _identity(finding: Finding) -> tuple[object, ...]:
    """Return a key that is equal for two findings if one continues the other. A finding with another verdict counts as
    a new one."""
    return *finding.key, finding.verdict


@dataclass(slots=True)
class ReportedFinding:
    """A finding whose beginning was reported; times are seconds of the monotonic clock."""

    finding: Finding
    seen_s: float
    """When the finding was seen last."""
    again_s: float
    """From this time on it is reported again if it returns."""
    wait_s: float = OVER_S
    """Time from its newest report to ``again_s``, seconds."""
    away: bool = False
    """Whether the finding was absent at some inspection since its newest report."""
    ended: bool = False
    """Whether the part was repaired or the machine rebooted: a finding that begins later is a new one."""


@dataclass(frozen=True, slots=True)
class InspectionState:
    """An inspection and its newest result."""

    inspection: Inspection
    result: InspectionResult
    inspected_ns: int
    """When the part was inspected last; 0: not yet."""
    inspections: int
    """How many times the part was inspected."""
    busy_s: float
    """CPU time of all inspections, seconds."""

    @property
    def verdict(self) -> Health:
        """The verdict about the part; unknown until it was inspected."""
        return verdict_of(self.result.findings) if self.inspected_ns or self.result.findings else Health.UNKNOWN

    def message(self) -> pb.InspectionState:
        """Convert to a message, with the first ``MOST_REPORTED`` findings."""
        return pb.InspectionState(
            name=self.inspection.name,
            looks_at=self.inspection.inspects,
            verdict=self.verdict,
            findings=map(finding_message, self.result.findings[:MOST_REPORTED]),
            measures=self.result.measures,
            facts=self.result.facts,
            note=self.result.note,
            interval_s=self.inspection.limits.interval_s,
            looked_ns=self.inspected_ns,
            looks=self.inspections,
            busy_s=self.busy_s,
        )


class Monitor:
    """The monitor of one agent.

    Args:
        inspections: All inspections of the machine.
        kept: Stores their states.
        report: Called in the event loop when a finding begins or is over.
        silence: Codes of reasons that are neither reported nor shown.
    """

    def __init__(
        self, inspections: Sequence[Inspection], kept: KeptStates, report: Report, silence: Collection[str] = ()
    ) -> None:
        self._report = report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._kept = kept
        self._reported: dict[tuple[str, str, str], ReportedFinding] = {}
        """Findings that this agent or an earlier one has reported and that are not over."""
        now_s = time.monotonic()
        for reported in kept.of(KEPT_AS).get("findings", []):
            finding = Finding.model_validate(reported)
            self._reported[finding.key] = ReportedFinding(finding, now_s, now_s + OVER_S, ended=not kept.same_boot)
        lasting = [reported.finding for reported in self._reported.values() if not reported.ended]
        self.inspectors = [
            Inspector(
                inspection,
                kept,
                self._wake,
                silence,
                [finding for finding in lasting if finding.inspection == inspection.name],
            )
            for inspection in inspections
        ]

    async def run(self) -> None:
        """Run all inspections until cancelled."""
        self._loop = asyncio.get_running_loop()
        for inspector in self.inspectors:
            inspector.start()
        try:
            while True:
                self.report_changes(time.monotonic())
                self._woken.clear()
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            for inspector in self.inspectors:
                inspector.stop()

    def states(self) -> list[InspectionState]:
        """Return the state of every inspection."""
        return [
            InspectionState(each.inspection, each.result, each.inspected_ns, each.inspections, each.busy_s)
            for each in self.inspectors
        ]

    def findings(self) -> list[Finding]:
        """Return all active findings, the worst first."""
        return worst_first(finding for inspector in self.inspectors for finding in inspector.result.findings)

    def clear(self, reason: str) -> int:
        """Forget what findings with a reason code are based on; returns the number of such active findings."""
        for reported in self._reported.values():
            reported.ended = reported.ended or reported.finding.reason == reason
        return sum(inspector.clear(reason) for inspector in self.inspectors)

    async def cleared(self, wait_s: float) -> bool:
        """Wait at most ``wait_s`` until all cleared parts have been inspected again; returns whether they have."""
        until = time.monotonic() + wait_s
        while waits := any(inspector.clearing for inspector in self.inspectors):
            if time.monotonic() >= until:
                break
            await asyncio.sleep(CLEARED_S)
        return not waits

    def report_changes(self, now_s: float) -> None:
        """Report findings that begin, that return, and that are over.

        Args:
            now_s: Seconds of the monotonic clock.
        """
        before = self._reported_states()
        active = [finding for inspector in self.inspectors for finding in inspector.result.findings[:MOST_REPORTED]]
        uncertain = {inspector.inspection.name for inspector in self.inspectors if not inspector.is_certain}
        for finding in active:
            self._report_active(finding, now_s)
        active_keys = {finding.key for finding in active}
        for key, reported in list(self._reported.items()):
            if key in active_keys or reported.finding.inspection in uncertain:
                continue
            reported.away = True
            if reported.ended or now_s - reported.seen_s >= OVER_S:
                del self._reported[key]
                self._report(reported.finding, True)
        if before != self._reported_states():
            findings = [reported.finding.model_dump(mode="json") for reported in self._reported.values()]
            self._kept.keep(KEPT_AS, {"findings": findings})

    def _reported_states(self) -> dict[tuple[str, str, str], tuple[Health, bool]]:
        return {key: (reported.finding.verdict, reported.ended) for key, reported in self._reported.items()}

    def _report_active(self, finding: Finding, now_s: float) -> None:
        """Report an active finding if it is new, if its verdict changed, or if it returned and its wait is over."""
        reported = self._reported.get(finding.key)
        if reported and reported.ended and finding.since_ns > reported.finding.since_ns:
            self._report(reported.finding, True)
            reported = None
        if reported is None or (reported.finding.verdict, reported.finding.sure) != (finding.verdict, finding.sure):
            self._report(finding, False)
            self._reported[finding.key] = ReportedFinding(finding, now_s, now_s + OVER_S)
            return
        began_again = is_alert(finding) and finding.since_ns >= reported.finding.since_ns + ONE_ALERT_S * 1e9
        reported.finding, reported.seen_s = finding, now_s
        if reported.away and (now_s >= reported.again_s or began_again):
            self._report(finding, False)
            reported.wait_s = min(2 * reported.wait_s, AGAIN_S)
            reported.again_s, reported.away = now_s + reported.wait_s, False

    def _wake(self) -> None:
        if self._loop:
            with contextlib.suppress(RuntimeError):  # the agent has ended, and its loop is closed
                self._loop.call_soon_threadsafe(self._woken.set)
