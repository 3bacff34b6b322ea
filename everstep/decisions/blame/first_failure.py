"""Finds the rank that failed first, the finding that explains its end, and the owner of the fault.

When a rank dies, its peers follow within milliseconds, since their connections break. These peers are *victims*. The
first failure is the earliest end of a rank that is no victim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from everstep.base.text import listed, signal_name
from everstep.model.evidence import Classification, RankExit
from everstep.model.finding import Finding, Health, MachineFinding, Owner
from everstep.model.incident import Failure, Symptom

_SOURCE = re.compile(r"\[(?:/[^\]\s]*/)([\w.-]+:\d+)\] ")
"""A position in the source of gloo or c10d within an exception. A headline shows only its file and line."""
MACHINE_LOST = "machine lost"
"""The cause of a failure in which a machine lost its memory and its ranks."""


def is_victim(end: RankExit) -> bool:
    """Return whether a rank ended only because another rank ended or did not arrive."""
    return end.classification is not None and end.classification.consequence


def is_own(end: RankExit) -> bool:
    """Return whether a rank ended by itself, and something is known about its end."""
    return not end.stopped_by_us and (end.code is not None or bool(end.signal) or bool(end.time_ns))


def by_first_failure(end: RankExit) -> tuple[bool, bool, int, int]:
    """Return the key that sorts ends of ranks by how well they explain the other ends.

    An end with code 0 explains victims, but not a rank that failed by itself.
    """
    victim = is_victim(end)
    return victim, not victim and end.code == 0, end.time_ns, end.rank


def first_failure(ends: Iterable[RankExit]) -> RankExit | None:
    """Return the end that explains the other ends; None if no rank ended by itself."""
    return min(filter(is_own, ends), key=by_first_failure, default=None)


def cause_of(end: RankExit) -> str:
    """Return a short text that is equal for equal causes: ``SIGKILL``, ``ValueError`` or ``exit code 3``."""
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
    """Return an exception for a headline: one line of at most 120 characters, without folders of source files."""
    return _SOURCE.sub(r"[\1] ", " ".join(exception.split()))[:120]


def symptom_of(end: RankExit) -> Symptom:
    """Return the symptom of a rank's end."""
    if end.signal:
        return Symptom.CRASH
    if end.exception:
        return Symptom.CONNECTION_LOST if is_victim(end) else Symptom.EXCEPTION
    if end.code == 0:
        return Symptom.EARLY_EXIT
    return Symptom.CRASH


def headline_of(end: RankExit) -> str:
    """Describe an end in one line: ``rank 5 on m2 ended by SIGKILL``, with its class if its output shows the class."""
    where = f"rank {end.rank} on {end.machine}"
    shown = end.classification
    why = f" ({shown.fault})" if shown and shown.evidence and not end.exception else ""
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
        end: The first end of a rank on another machine. It is described, too, unless the rank is a victim.
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
    """Return the failure in the form that later decisions need; ``now_ns`` is the time by the clock of the caller."""
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
"""The largest age, seconds, of a sure fault that explains an end. An older fault did not end the job, since the job ran
with it."""
NEAR_S = 60.0
"""The largest age, seconds, of an unsure fault that explains an end."""
KILLED_FOR_MEMORY = ("oom-kill", "oom-kill-limit")
"""The reason codes of a process that the kernel killed because memory was used up."""
SIGKILL = 9


def explanation(
    findings: Iterable[MachineFinding], end: RankExit | None, *, job: str, seen_ns: int
) -> MachineFinding | None:
    """Return the finding that explains an end; None if no finding does.

    The best explanation is that the kernel killed this process for memory. The next best is a fault of its machine. A
    sure fault of another machine explains the end of a victim. If no rank ended by itself, a sure fault of any machine
    explains the failure. If the program itself caused its end, no finding but the kernel's kill explains it.

    Args:
        findings: The findings of inspections, the worst first.
        end: The first end; None if no rank ended by itself.
        job: The job's name.
        seen_ns: The time at which the failure was seen, for an end without a time.
    """
    at_ns = (end.time_ns if end else 0) or seen_ns
    recent = [seen for seen in findings if _recent(seen, at_ns)]
    faulty = [seen for seen in recent if seen.finding.verdict is Health.FAULTY]
    sure = [seen for seen in faulty if seen.finding.sure]
    if end is None:
        return next(iter(sure), None)
    if killed := next((seen for seen in recent if _killed(seen, end, job)), None):
        return killed
    if end.classification and end.classification.owner == Owner.CODE:
        return None
    here = [seen for seen in faulty if seen.machine == end.machine]
    return next(iter([*here, *(sure if is_victim(end) else [])]), None)


def _recent(seen: MachineFinding, at_ns: int) -> bool:
    """Return whether a finding is not too old to explain an end. A repeated event has the age of its last
    occurrence."""
    of_program = seen.finding.verdict is not Health.FAULTY
    within_s = WITHIN_S if seen.finding.sure or of_program else NEAR_S
    newest_ns = max(seen.finding.since_ns, seen.finding.last_ns)
    return not at_ns or newest_ns >= at_ns - round(within_s * 1e9)


def _killed(seen: MachineFinding, end: RankExit, job: str) -> bool:
    """Return whether a finding shows that the kernel killed this process for memory."""
    finding = seen.finding
    same_rank = seen.machine == end.machine and finding.item == f"rank {end.rank} of {job}"
    same_process = not end.pid or any(f"process {end.pid} " in line for line in finding.evidence)
    return end.signal == SIGKILL and finding.reason in KILLED_FOR_MEMORY and same_rank and same_process


def is_hint(finding: Finding) -> bool:
    """Return whether a finding only hints at its machine, so that a test has to show whether the machine is at
    fault."""
    return finding.verdict is Health.FAULTY and finding.owner is Owner.MACHINE and not finding.sure


def fault_owner(classification: Classification | None, findings: Sequence[MachineFinding]) -> Owner:
    """Return the owner of the fault: from the class of the failure or, if this has no owner, from the worst finding.

    Args:
        classification: The class of the failure; None if no rank failed by itself.
        findings: The findings of the inspections, the worst first.
    """
    if classification is not None and not classification.consequence and classification.owner != Owner.UNKNOWN:
        return Owner(classification.owner)
    faults = (seen.finding.owner for seen in findings if seen.finding.verdict is Health.FAULTY)
    return next((owner for owner in faults if owner is not Owner.UNKNOWN), Owner.UNKNOWN)
