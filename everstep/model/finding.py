"""Defines findings about machines: what is wrong, whether it makes a machine faulty, who has to act, and how.

A ``Reason`` is a kind of fault that an inspection or a test can report; its code never changes. A ``Finding`` reports
that one machine has such a fault. Findings are stored in histories and in the ledger, so fields are only added, with
defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from everstep.base.text import printable
from everstep.model.message import Model, Words

EVIDENCE_LINES = 5
"""The most lines of evidence of a finding."""
EVIDENCE_CHARACTERS = 300
"""The most characters of a line of evidence."""
ITEM_CHARACTERS = 100
"""The most characters of the part that a finding is about."""


class Owner(Words):
    """Where a fault comes from, and so who has to repair it."""

    MACHINE = "machine"
    NETWORK = "network"
    """The connections between machines; a link that flaps may be the fault of a switch."""
    CODE = "code"
    """The job's own program, or its settings."""
    DATA = "data"
    """The input of the job."""
    STORAGE = "storage"
    """File systems and object storage that machines share."""
    EXTERNAL = "external"
    """A service outside the cluster that the job uses."""
    SCHEDULER = "scheduler"
    """The scheduler took the machines away, or ended the processes on them."""
    UNKNOWN = "unknown"


class Health(Words):
    """The state of a machine, or of a part of it. A part that cannot be inspected is unknown, not faulty."""

    HEALTHY = "healthy"
    FAULTY = "faulty"
    UNKNOWN = "unknown"
    """The part could not be inspected, or the owner of the fault is not clear."""


class Remedy(Words):
    """What to do about a finding, as vendors and operators recommend."""

    NOTHING = "nothing"
    WATCH = "watch"
    """The finding alone means little: count how often it occurs."""
    RESTART_JOB = "restart the job"
    CHECK_CODE = "check the code"
    FREE_SPACE = "free space"
    CHECK_SETUP = "check the setup"
    """The inspection lacks a tool or a permission."""
    RESET_GPU = "reset the GPU"
    REBOOT = "reboot"
    REPLACE = "replace the machine"
    """The machine is useless until it is repaired."""


class FindingSource(Words):
    """The source of a finding: everything that can ask for an eviction."""

    INSPECTION = "inspection"
    """An inspection of the machine (``agent.monitor``), while ranks run or after they ended."""
    TEST = "test"
    """A diagnostic test of the machine, whose ranks are stopped (``agent.diagnoser``)."""
    REPLAY = "replay"
    """The job's script, run on groups of its stopped machines."""
    HANG = "hang"
    """Samples of all ranks of a job that hangs."""
    VOTE = "vote"
    """A vote over samples of all ranks of a job that became slow."""
    ERRORS = "errors"
    """The errors with which ranks of the machine ended."""
    SILENCE = "silence"
    """The machine is silent: neither its agent nor its ranks answer."""
    OPERATOR = "operator"
    """An operator asks for the eviction."""


class Finding(Model):
    """A fault of a machine, or a doubt about it, from an inspection or another source."""

    inspection: str
    """Name of the inspection (``agent.monitor.all``), of the test, or of the other source."""
    source: FindingSource = FindingSource.INSPECTION
    reason: str
    """Reason code, e.g. ``gpu-lost``; it does not change from release to release."""
    verdict: Health = Health.FAULTY
    item: str = ""
    """The part of the machine, e.g. ``GPU 3`` or ``eth0``; empty: the whole machine."""
    text: str = ""
    """One line for a person."""
    owner: Owner = Owner.MACHINE
    remedy: Remedy = Remedy.WATCH
    sure: bool = False
    """The finding names this machine with high confidence, so no further test is needed to act (ByteRobust, figure 5,
    step 1)."""
    evidence: list[str] = Field(default_factory=list)
    """The evidence, e.g. lines of the kernel log."""
    since_ns: int = 0
    """When the fault was seen first, nanoseconds of the machine's clock."""
    last_ns: int = 0
    """When the fault happened last, nanoseconds of the machine's clock; 0: it happened once, or is a lasting state."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Inspection, reason and part: the same fault of the same part is one finding, however often it is seen."""
        return self.inspection, self.reason, self.item

    @property
    def headline(self) -> str:
        """The part and its fault."""
        return f"{self.item}: {self.text or self.reason}" if self.item else self.text or self.reason


class MachineFinding(Model):
    """A finding and its machine."""

    machine: str
    finding: Finding

    @property
    def about(self) -> str:
        """Machine, inspection, reason and part: equal for the same fault of the same part."""
        return " ".join([self.machine, *self.finding.key])

    @property
    def headline(self) -> str:
        """The machine, the part and its fault, with the reason code."""
        return f"{self.machine}: {self.finding.headline} ({self.finding.reason})"


@dataclass(frozen=True, slots=True)
class Reason:
    """A fault or a doubt that an inspection or a diagnostic test can report."""

    code: str
    """Words with dashes, e.g. ``gpu-lost``; a code does not change from release to release."""
    means: str
    """One line for a person."""
    owner: Owner = Owner.MACHINE
    remedy: Remedy = Remedy.WATCH
    verdict: Health = Health.FAULTY
    sure: bool = False
    """A finding with this reason names its machine with high confidence."""
    source: str = ""
    """The section of a paper, or the document, from which the rule comes; empty: it is from no document."""

    def finding(
        self,
        by: str,
        item: str = "",
        *evidence: str,
        text: str = "",
        since_ns: int = 0,
        verdict: Health | None = None,
    ) -> Finding:
        """A finding with this reason.

        Args:
            by: Name of the inspection or the test.
            item: The part of the machine. In all texts, bytes that are not UTF-8 are written as ``\\xff``.
            evidence: Lines that show the fault.
            text: One line for a person; empty: the meaning of the reason.
            since_ns: When the fault was seen first, nanoseconds of the machine's clock.
            verdict: Replaces the verdict of the reason.
        """
        return Finding(
            inspection=by,
            reason=self.code,
            verdict=verdict or self.verdict,
            item=printable(item)[:ITEM_CHARACTERS],
            text=printable(text or self.means)[:EVIDENCE_CHARACTERS],
            owner=self.owner,
            remedy=self.remedy,
            sure=self.sure,
            evidence=[printable(line)[:EVIDENCE_CHARACTERS] for line in evidence[:EVIDENCE_LINES]],
            since_ns=since_ns,
        )


def verdict_of(findings: Iterable[Finding]) -> Health:
    """The verdict about a machine with these findings: faulty with any fault, else unknown with any doubt."""
    return together(finding.verdict for finding in findings)


def together(verdicts: Iterable[Health]) -> Health:
    """One verdict from several: faulty if any is faulty, else unknown if any is unknown."""
    distinct = set(verdicts)
    if Health.FAULTY in distinct:
        return Health.FAULTY
    return Health.UNKNOWN if distinct - {Health.HEALTHY} else Health.HEALTHY


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in order: faults come before doubts, then sure findings come first, then older findings."""
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    return sorted(findings, key=lambda each: (order.get(each.verdict, 2), not each.sure, each.since_ns, each.key))
