"""Which finding of an inspection explains that ranks ended."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.decisions.detect.root_cause import is_victim
from everstep.model.health import Health, MachineFinding
from everstep.model.incident import RankExit

WITHIN_S = 600.0
"""A finding explains an end only if it is not older than this at the time (ours): what a job has lived with for longer
is not what ended it."""
KILLED_FOR_MEMORY = ("oom-kill", "oom-kill-limit")
"""Reason codes of the kernel's line about a process that it killed because memory was used up."""
SIGKILL = 9


def explanation(findings: Iterable[MachineFinding], end: RankExit | None) -> MachineFinding | None:
    """The finding that explains an end; None: none does.

    First that the kernel killed this very rank for memory, then a fault of the machine on which it ran. A fault of
    another machine explains it only where the rank ended because a peer went away, or no rank ended by itself, and
    where it names that machine with confidence. Nothing else is concluded.

    Args:
        findings: What inspections say, the worst first.
        end: The first end; None: no rank ended by itself.
    """
    found = [seen for seen in findings if end is None or not end.time_ns or _recent(seen, end)]
    faulty = [seen for seen in found if seen.finding.verdict is Health.FAULTY]
    sure = [seen for seen in faulty if seen.finding.sure]
    if end is None:
        return next(iter(sure), None)
    killed = [seen for seen in found if _killed(seen, end)]
    here = [seen for seen in faulty if seen.machine == end.machine]
    return next(iter([*killed, *here, *(sure if is_victim(end) else [])]), None)


def _recent(seen: MachineFinding, end: RankExit) -> bool:
    """Whether it was found before the rank ended, and not long before, or after it; clocks of machines differ little
    compared with that."""
    return seen.finding.since_ns >= end.time_ns - round(WITHIN_S * 1e9)


def _killed(seen: MachineFinding, end: RankExit) -> bool:
    of_this_rank = seen.finding.item.startswith(f"rank {end.rank} of ")
    return (
        end.signal == SIGKILL
        and seen.machine == end.machine
        and seen.finding.reason in KILLED_FOR_MEMORY
        and of_this_rank
    )
