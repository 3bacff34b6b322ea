"""Findings about a machine: is it healthy, faulty or unknown, why, whose matter is that, and what has to be done?

A ``Reason`` is what an inspection or a test can find, with a code that does not change; a ``Finding`` says that it was
found. Findings are stored in histories and in the ledger: fields are only added, with defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from everstep.base.text import printable
from everstep.model.message import Model, Words

EVIDENCE_LINES = 5
"""Of one finding."""
EVIDENCE_CHARACTERS = 300
"""Of one line of evidence."""
ITEM_CHARACTERS = 100
"""Of the part of a machine that a finding is about."""


class Owner(Words):
    """Where a fault comes from, and so who has to do something about it."""

    MACHINE = "machine"
    NETWORK = "network"
    """What lies between machines; a link that goes down and comes back may be a switch's."""
    CODE = "code"
    """The job's own program, or its settings."""
    DATA = "data"
    """What the job reads."""
    STORAGE = "storage"
    """File systems and object storage that machines share."""
    SCHEDULER = "scheduler"
    """Who gave the machines took them away, or ended what ran on them."""
    UNKNOWN = "unknown"


class Health(Words):
    """What is known of a machine, or of a part of it. Not being able to look is no fault."""

    HEALTHY = "healthy"
    FAULTY = "faulty"
    UNKNOWN = "unknown"
    """It could not be looked at, or what was seen does not say whose fault it is."""


class Remedy(Words):
    """What to do about a finding, as vendors and operators of such machines say."""

    NOTHING = "nothing"
    WATCH = "watch"
    """Alone it means little; count how often it comes."""
    RESTART_JOB = "restart the job"
    CHECK_CODE = "check the code"
    FREE_SPACE = "free space"
    CHECK_SETUP = "check the setup"
    """What the inspection needs is missing, or it may not look."""
    RESET_GPU = "reset the GPU"
    REBOOT = "reboot"
    REPLACE = "replace the machine"
    """It is of no use until somebody has repaired it."""


class FindingSource(Words):
    """What a finding rests on. Whoever may ask that a machine is evicted is one of these."""

    INSPECTION = "inspection"
    """An inspection of the machine, while its ranks go on or once they ended (``agent.monitor``)."""
    TEST = "test"
    """A diagnostic test of the machine, whose ranks are stopped (``agent.diagnoser``)."""
    REPLAY = "replay"
    """The job's script, run on groups of its stopped machines."""
    HANG = "hang"
    """Samples of all ranks of a job that hangs."""
    VOTE = "vote"
    """A vote over samples of all ranks of a job that became slow."""
    SILENCE = "silence"
    """Neither the agent nor the ranks of the machine answer."""
    OPERATOR = "operator"
    """A person wants the machine out."""


class Finding(Model):
    """One fault, or one doubt, about a machine: from an inspection, or from another source."""

    inspection: str
    """Name of the inspection (``agent.monitor.all``) or of the test; of another source: its name."""
    source: FindingSource = FindingSource.INSPECTION
    reason: str
    """Reason code, e.g. ``gpu-lost``; it does not change from release to release."""
    verdict: Health = Health.FAULTY
    item: str = ""
    """Which part of the machine, e.g. ``GPU 3`` or ``eth0``; empty: the machine."""
    text: str = ""
    """One line for a person."""
    owner: Owner = Owner.MACHINE
    remedy: Remedy = Remedy.WATCH
    sure: bool = False
    """It names this machine with high confidence: no further test is needed to act (ByteRobust, figure 5, step 1)."""
    evidence: list[str] = Field(default_factory=list)
    """What was seen, e.g. lines of the kernel log."""
    since_ns: int = 0
    """When it was seen first, by the machine's clock."""
    last_ns: int = 0
    """When it happened last, where it did again, by the machine's clock; 0: it did not, or it is a state that lasts."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is about: the same fault of the same part is one finding, however often it is seen."""
        return self.inspection, self.reason, self.item

    @property
    def headline(self) -> str:
        """The part and what is wrong with it."""
        return f"{self.item}: {self.text or self.reason}" if self.item else self.text or self.reason


class MachineFinding(Model):
    """A finding, and on which machine."""

    machine: str
    finding: Finding

    @property
    def about(self) -> str:
        """Machine, inspection, reason and part: what is the same for the same fault of the same part."""
        return " ".join([self.machine, *self.finding.key])

    @property
    def headline(self) -> str:
        """The machine, the part, and what is wrong with it, with the reason code."""
        return f"{self.machine}: {self.finding.headline} ({self.finding.reason})"


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that an inspection or a diagnostic test can find."""

    code: str
    """Does not change from release to release; with dashes, e.g. ``gpu-lost``."""
    means: str
    """One line for a person."""
    owner: Owner = Owner.MACHINE
    remedy: Remedy = Remedy.WATCH
    verdict: Health = Health.FAULTY
    sure: bool = False
    """It names this machine with high confidence."""
    source: str = ""
    """The paper's section, or the document, that the rule is from; empty: no paper has it."""

    def found(
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
            item: Which part of the machine. Here and in what follows, bytes that are no UTF-8 are written as ``\\xff``.
            evidence: What was seen.
            text: One line; by default what the reason means.
            since_ns: When it was seen first.
            verdict: Another one than the reason's.
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
    """What findings say of a machine together: one fault makes it faulty, and what is not known makes it unknown."""
    return together(finding.verdict for finding in findings)


def together(verdicts: Iterable[Health]) -> Health:
    """The verdict of a whole, from those of its parts."""
    found = set(verdicts)
    if Health.FAULTY in found:
        return Health.FAULTY
    return Health.UNKNOWN if found - {Health.HEALTHY} else Health.HEALTHY


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Faults before what is unknown; those that name the machine with confidence, and the oldest, first."""
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    return sorted(findings, key=lambda found: (order.get(found.verdict, 2), not found.sure, found.since_ns, found.key))
