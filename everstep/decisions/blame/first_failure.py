"""The rank that failed first, the explanation of its end, and the owner of the fault.

When one rank dies, its peers follow within milliseconds with broken connections. They are victims: the cause is the
earliest end that is not such a consequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from everstep.base.text import listed
from everstep.model.evidence import Classification, RankExit
from everstep.model.finding import Finding, Health, MachineFinding, Owner
from everstep.model.incident import Failure, Symptom
from everstep.system.signals import signal_name

_SOURCE = re.compile(r"\[(?:/[^\]\s]*/)([\w.-]+:\d+)\] ")
"""A position in the source of gloo or c10d in an exception: only file and line of the path fit into a headline."""
MACHINE_LOST = "machine lost"
"""Cause of a failure in which a machine lost all that it knew and ran."""


def is_victim(end: RankExit) -> bool:
    """Return whether a rank ended because another rank went away, or did not arrive."""
    return end.classification is not None and end.classification.consequence


def first_failure(ends: Sequence[RankExit]) -> RankExit | None:
    """Return the end that explains the other ends; None if no rank ended by itself.

    A rank that left with code 0 explains those that failed because a peer went
    away, and those that were stopped; it does not explain a failure of its own kind.
    """
    own = [end for end in ends if not end.stopped_by_us and (end.code is not None or end.signal or end.time_ns)]
    by_themselves = [end for end in own if not is_victim(end)]
    candidates = [end for end in by_themselves if end.code != 0] or by_themselves or own
    return min(candidates, key=lambda end: (end.time_ns, end.rank), default=None)


def cause_of(end: RankExit) -> str:
    """Signature of an end, the same for the same cause: ``SIGKILL``, ``ValueError`` or ``exit code 3``."""
    if end.signal:
        return signal_name(end.signal)
    if end.exception:
        return end.exception.split(":", 1)[0].strip() or "exception"
    if end.code is None:
        return "exit status unknown"
    if end.code == 0:
        return "early exit"
    return f"exit code {end.code}"


def short_exception(exception: str) -> str:
    """An exception for a headline: at most 120 characters, without the folders of the source that raised it."""
    return _SOURCE.sub(r"[\1] ", exception)[:120]


def symptom_of(end: RankExit) -> Symptom:
    """Return the symptom of an end as seen from outside."""
    if end.signal:
        return Symptom.CRASH
    if end.exception:
        return Symptom.CONNECTION_LOST if is_victim(end) else Symptom.USER_ERROR
    if end.code == 0:
        return Symptom.EARLY_EXIT
    return Symptom.CRASH


def headline_of(end: RankExit) -> str:
    """Describe an end in one line: ``rank 5 on m2 ended by SIGKILL``, with its class if its output shows the class."""
    where = f"rank {end.rank} on {end.machine}"
    found = end.classification
    why = f" ({found.fault})" if found and found.evidence and not end.exception else ""
    if end.signal:
        return f"{where} ended by {signal_name(end.signal)}{why}"
    if end.exception:
        return f"{where} raised {short_exception(end.exception)}"
    if end.code is None:
        return f"{where} ended, its exit status is unknown"
    if end.code == 0:
        return f"{where} left with code 0 before the job was over"
    return f"{where} ended with exit code {end.code}{why}"


def headline_of_loss(
    lost: Mapping[str, Sequence[int]], end: RankExit | None, gone: Mapping[str, Sequence[int]] | None = None
) -> str:
    """Describe lost machines in one line: ``m2 came back empty and lost ranks 4, 5``.

    Args:
        lost: Machine that returned empty → the ranks that it ran.
        end: The first end of a rank elsewhere; it is named unless it only followed.
        gone: Machine that did not return → the ranks that it ran.
    """
    texts = []
    for machines, what in ((gone or {}, "gone, with"), (lost, "came back empty and lost")):
        if machines:
            ranks = sorted(rank for ranks in machines.values() for rank in ranks)
            noun = "rank" if len(ranks) == 1 else "ranks"
            verb = ("is " if len(machines) == 1 else "are ") if machines is not lost else ""
            texts.append(f"{listed(sorted(machines))} {verb}{what} {noun} {listed(ranks)}")
    text = "; ".join(texts)
    return text if end is None or is_victim(end) else f"{text}; {headline_of(end)}"


def failure_of(end: RankExit, *, generation: int, step: int, now_ns: int) -> Failure:
    """Return the failure as it is kept for later decisions; ``now_ns``: the time on the clock of the keeper."""
    return Failure(
        generation=generation,
        step=step,
        symptom=symptom_of(end),
        cause=cause_of(end),
        time_ns=now_ns,
        shown=end.shown_steps,
        classification=end.classification,
        machine=end.machine,
    )


WITHIN_S = 600.0
"""A fault that names its machine for sure explains an end only if it is not older than this at the time: what a
job has lived with for longer is not what ended it."""
NEAR_S = 60.0
"""The same limit for a fault that does not name its machine for sure."""
KILLED_FOR_MEMORY = ("oom-kill", "oom-kill-limit")
"""Reason codes of the kernel's line about a process that it killed because memory was used up."""
SIGKILL = 9


def explanation(
    findings: Iterable[MachineFinding], end: RankExit | None, *, job: str, seen_ns: int
) -> MachineFinding | None:
    """Return the finding that explains an end; None: no finding does.

    First that the kernel killed this very process for memory, then a fault of the machine on which it ran. A fault of
    another machine explains the end only if the rank ended because a peer went away, or if no rank ended by itself, and
    only if the finding names that machine for sure. An end that the program itself caused needs no finding.

    Args:
        findings: The findings of inspections, the worst first.
        end: The first end; None: no rank ended by itself.
        job: The job's name.
        seen_ns: When the failure was seen, if no end has a time.
    """
    at_ns = (end.time_ns if end else 0) or seen_ns
    found = [seen for seen in findings if _recent(seen, at_ns)]
    faulty = [seen for seen in found if seen.finding.verdict is Health.FAULTY]
    sure = [seen for seen in faulty if seen.finding.sure]
    if end is None:
        return next(iter(sure), None)
    if killed := next((seen for seen in found if _killed(seen, end, job)), None):
        return killed
    if end.classification and end.classification.owner == Owner.CODE:
        return None
    here = [seen for seen in faulty if seen.machine == end.machine]
    return next(iter([*here, *(sure if is_victim(end) else [])]), None)


def _recent(seen: MachineFinding, at_ns: int) -> bool:
    """Return whether a finding is from shortly before the end, or after it; clocks of machines differ by much less.

    A repeated event counts from its last time.
    """
    of_program = seen.finding.verdict is not Health.FAULTY
    within_s = WITHIN_S if seen.finding.sure or of_program else NEAR_S
    newest_ns = max(seen.finding.since_ns, seen.finding.last_ns)
    return not at_ns or newest_ns >= at_ns - round(within_s * 1e9)


def _killed(seen: MachineFinding, end: RankExit, job: str) -> bool:
    """Return whether the kernel killed this process for memory."""
    found = seen.finding
    this = seen.machine == end.machine and found.item == f"rank {end.rank} of {job}"
    process = not end.pid or any(f"process {end.pid} " in line for line in found.evidence)
    return end.signal == SIGKILL and found.reason in KILLED_FOR_MEMORY and this and process


def is_hint(finding: Finding) -> bool:
    """Return whether a finding explains a failure, and a test has to show whether the machine is at fault."""
    return finding.verdict is Health.FAULTY and finding.owner is Owner.MACHINE and not finding.sure


def fault_owner(classification: Classification | None, findings: Sequence[MachineFinding]) -> Owner:
    """Return the owner from the end of the first rank; if that is a consequence or has no owner, from a finding.

    Args:
        classification: The class of the failure; None: no rank failed by itself.
        findings: The findings of the inspections, the worst first.
    """
    if classification is not None and not classification.consequence and classification.owner != Owner.UNKNOWN:
        return Owner(classification.owner)
    faults = (seen.finding.owner for seen in findings if seen.finding.verdict is Health.FAULTY)
    return next((owner for owner in faults if owner is not Owner.UNKNOWN), Owner.UNKNOWN)
