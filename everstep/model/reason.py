"""Reasons: what can be found of a machine, each with a code that does not change."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.text import printable
from everstep.model.health import EVIDENCE_CHARACTERS, EVIDENCE_LINES, Finding, Health, Remedy
from everstep.model.owner import Owner

ITEM_CHARACTERS = 100
"""Of the part of a machine that a finding is about."""


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
