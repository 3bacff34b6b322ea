"""What is said of a failure in the end: one class with its evidence, or unknown with the candidates."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.text import listed
from everstep.decisions.blame.classify.candidates import EvidenceLine
from everstep.decisions.blame.classify.exit_codes import ExitReading
from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.owner import Owner


@dataclass(frozen=True, slots=True)
class OtherCandidate:
    """What was found beside the cause, by reason."""

    fault: FaultClass
    owner: Owner
    reason: str
    consequence: bool
    count: int
    """Lines."""
    ranks: tuple[int, ...]
    line: EvidenceLine
    """The first of them."""


@dataclass(frozen=True, slots=True)
class LogVerdict:
    """The first cause of a failure, as far as logs and exit code say it."""

    fault: FaultClass
    owner: Owner
    reason: str
    """Name of the rule, or ``user-exception``, ``no-known-line``, ``several-causes`` or of an exit code."""
    consequence: bool = False
    """What was found are consequences only: the cause is not in what was read."""
    decided_by: str = ""
    """How the cause was told from the others."""
    ranks: tuple[int, ...] = ()
    """That show it, where lines or names of logs tell ranks."""
    place: str = ""
    """``file:line in function`` of the user's code, of an exception."""
    evidence: tuple[EvidenceLine, ...] = ()
    count: int = 0
    """Lines and exceptions of this reason."""
    others: tuple[OtherCandidate, ...] = ()
    exit: ExitReading | None = None
    lines: int = 0
    """That were read."""

    @property
    def headline(self) -> str:
        """One line for a person."""
        where = f" on rank{'s' if len(self.ranks) > 1 else ''} {listed(self.ranks)}" if self.ranks else ""
        said = self.evidence[0].text if self.evidence else (self.exit.text if self.exit else "no line is known")
        if self.fault is FaultClass.UNKNOWN and self.others:
            said = f"{self.decided_by}: " + listed(
                [f"{one.fault} ({one.reason})" for one in self.others if not one.consequence]
            )
        only = ", a consequence; the cause is not in these logs" if self.consequence else ""
        return f"{self.fault}, owner {self.owner}{where}{only}: {said}"
