"""Which finding of an inspection explains that ranks ended."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.decisions.detect.root_cause import classification_of, is_victim
from everstep.model.health import Health, MachineFinding
from everstep.model.incident import RankExit
from everstep.model.owner import Owner

WITHIN_S = 600.0
"""A fault that names its machine for sure explains an end only if it is not older than this at the time: what a
job has lived with for longer is not what ended it."""
NEAR_S = 60.0
"""The same of a fault that does not."""
KILLED_FOR_MEMORY = ("oom-kill", "oom-kill-limit")
"""Reason codes of the kernel's line about a process that it killed because memory was used up."""
SIGKILL = 9


def explanation(
    findings: Iterable[MachineFinding], end: RankExit | None, *, job: str, seen_ns: int
) -> MachineFinding | None:
    """The finding that explains an end; None: none does.

    First that the kernel killed this very process for memory, then a fault of the machine on which it ran. A fault of
    another machine explains it only where the rank ended because a peer went away, or no rank ended by itself, and
    where it names that machine for sure. Whose end is the program's own doing is explained by that. Nothing else is
    concluded.

    Args:
        findings: What inspections say, the worst first.
        end: The first end; None: no rank ended by itself.
        job: The job's name.
        seen_ns: When the failure was seen, where no end says when.
    """
    at_ns = (end.time_ns if end else 0) or seen_ns
    found = [seen for seen in findings if _recent(seen, at_ns)]
    faulty = [seen for seen in found if seen.finding.verdict is Health.FAULTY]
    sure = [seen for seen in faulty if seen.finding.sure]
    if end is None:
        return next(iter(sure), None)
    if killed := next((seen for seen in found if _killed(seen, end, job)), None):
        return killed
    if classification_of(end).owner == Owner.CODE:
        return None
    here = [seen for seen in faulty if seen.machine == end.machine]
    return next(iter([*here, *(sure if is_victim(end) else [])]), None)


def _recent(seen: MachineFinding, at_ns: int) -> bool:
    """Whether it was found not long before, or after; clocks of machines differ little compared with that.

    What happened several times counts from the last time.
    """
    of_program = seen.finding.verdict is not Health.FAULTY
    within_s = WITHIN_S if seen.finding.sure or of_program else NEAR_S
    newest_ns = max(seen.finding.since_ns, seen.finding.last_ns)
    return not at_ns or newest_ns >= at_ns - round(within_s * 1e9)


def _killed(seen: MachineFinding, end: RankExit, job: str) -> bool:
    """Whether the kernel killed this process for memory."""
    found = seen.finding
    this = seen.machine == end.machine and found.item == f"rank {end.rank} of {job}"
    process = not end.pid or any(f"process {end.pid} " in line for line in found.evidence)
    return end.signal == SIGKILL and found.reason in KILLED_FOR_MEMORY and this and process
