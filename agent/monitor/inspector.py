"""Runs an inspection in a thread of its own, and detects when it hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable

import structlog

from agent.monitor.inspection import Inspection, Look
from agent.monitor.kept import KeptStates
from everstep.base.log_once import Once
from everstep.errors import CannotLook
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy

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
        self._failures = Once()
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
        except (CannotLook, OSError) as error:
            seen = self._unable(str(error))
        except Exception as error:
            if self._failures.new(self.inspection.name, error):  # not at every look: it is a finding anyway
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
