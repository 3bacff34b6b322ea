"""Finds a machine whose ranks end again and again with an error of hardware, although no test finds it faulty.

A GPU that reports uncorrectable memory errors to the job, but to no inspection, would otherwise lead to a parked job
after all rungs of the ladder, although another machine is free. The same is true for a network port that fails only
under the job's own load. ByteRobust evicts only because of inspections, tests and replays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from everstep.decisions.blame.first_failure import headline_of
from everstep.model.evidence import Classification, RankExit
from everstep.model.finding import Finding, FindingSource, MachineFinding, Owner, Remedy
from everstep.model.incident import Failure
from everstep.model.ladder import Rung

REPEATS = 3
"""The number of such ends in a row after which the machine is faulty."""
REASON = "repeated-errors"
OF_HARDWARE = frozenset({Owner.MACHINE, Owner.NETWORK})
"""The owners whose errors count. A network error names a machine only because no other machine's rank ended first."""


def findings_of_errors(
    end: RankExit | None, earlier: Iterable[Failure], tried: Collection[Rung]
) -> list[MachineFinding]:
    """Return a finding about the machine of the first rank that ended, or none.

    Args:
        end: The end that explains the others; None: no rank ended by itself.
        earlier: The failures that are not solved, without this one.
        tried: The rungs that were tried for these failures; there is no finding until the machines were tested.
    """
    if end is None or not _is_of_hardware(end.classification) or Rung.DIAGNOSE not in tried:
        return []
    alike = [failure for failure in earlier if _is_of_hardware(failure.classification) and not failure.explained]
    if len({failure.generation for failure in alike}) < REPEATS - 1 or any(
        failure.machine != end.machine for failure in alike
    ):
        return []
    owner = Owner(end.classification.owner) if end.classification else Owner.UNKNOWN
    text = (
        f"{headline_of(end)}: its ranks ended {REPEATS} times or more by an error of a machine or of the network, and "
        "no other rank did"
    )
    finding = Finding(
        inspection=FindingSource.ERRORS,
        source=FindingSource.ERRORS,
        reason=REASON,
        text=text,
        owner=Owner.MACHINE,
        remedy=Remedy.RESET_GPU if owner is Owner.MACHINE else Remedy.REPLACE,
    )
    return [MachineFinding(machine=end.machine, finding=finding)]


def _is_of_hardware(found: Classification | None) -> bool:
    return found is not None and found.owner in OF_HARDWARE and not found.consequence
