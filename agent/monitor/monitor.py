"""The monitor: all inspections of a machine at work. It reports what changes as observations.

A finding is reported when it begins, when its verdict becomes another one, and when it is over. A finding that comes
and goes is over only after it stayed away for ``OVER_S``. Where it is back before that, it is reported again,
for a job may have begun meanwhile; but each time less soon, so that a part that flickers cannot fill the log of
observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

from agent.monitor.inspection import Inspection
from agent.monitor.inspector import Inspector
from agent.monitor.kept import KeptStates
from everstep.model.finding import Finding, Health, verdict_of, worst_first

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
