"""The suspects of a replay, from the groups that showed a fault (ByteRobust, section 6, algorithm 1).

A machine that computes wrongly makes every group that it is in faulty. A single machine explains the result if
its groups are exactly the faulty groups. Everstep adds: if no single machine explains the result, all machines whose
every group was faulty are suspects. The machines at fault are among them, and healthy machines may be, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log

from everstep.decisions.blame.replay.groups import ReplayPlan


class Found(StrEnum):
    """The result of a replay."""

    NOTHING = "nothing"
    """No group showed a fault: that clears no machine (:func:`miss_probability`)."""
    ONE = "one"
    """A single machine at fault explains the result: it is among the suspects, and alone if m ≤ n."""
    SEVERAL = "several"
    """No single machine does: several are at fault, and all that may be are suspects."""
    INCONSISTENT = "inconsistent"
    """One phase showed a fault that no machine explains: the fault does not show in every trial. Run the
    phases again."""
    INCOMPLETE = "incomplete"
    """Groups that could not be run to their end leave open who is at fault."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The answer of a replay."""

    found: Found
    machines: tuple[int, ...] = ()
    """Positions of those to evict."""
    open_groups: tuple[str, ...] = ()
    """Groups that could not be run to their end."""


def suspects(plan: ReplayPlan, faulty: Mapping[str, bool | None]) -> Suspects:
    """Return the suspects.

    Args:
        plan: The planned groups.
        faulty: Name of each group → whether it showed a fault, in any of its trials; None or absent: it could not be
        run
            to its end for a reason that shows nothing about its machines.
    """
    groups = {group.name: frozenset(group.machines) for group in plan.groups}
    bad = {name for name in groups if faulty.get(name)}
    still_open = tuple(name for name in groups if faulty.get(name) is None)
    cleared = {x for name, members in groups.items() if faulty.get(name) is False for x in members}
    of_machine = plan.of_machines
    alone = tuple(x for x, own in of_machine.items() if own == bad)
    possible = tuple(x for x in range(plan.machines) if x not in cleared)
    if still_open:
        # Suspects are named only if the open groups change nothing: every possible suspect is already known.
        known = tuple(x for x in possible if of_machine[x] <= bad)
        certain = bool(bad) and known == possible
        return Suspects(Found.ONE if certain and alone else Found.INCOMPLETE, alone if certain else (), still_open)
    if not bad:
        return Suspects(Found.NOTHING)
    if alone:
        return Suspects(Found.ONE, alone)
    explained = {name for x in possible for name in of_machine[x]}
    if not bad <= explained:
        return Suspects(Found.INCONSISTENT)
    return Suspects(Found.SEVERAL, possible)


RARE = 0.02
"""Some faults show in one run of fifty only, as some do that corrupt data in silence."""


def miss_probability(shows: float, runs: int) -> float:
    """Return the probability that an existing fault shows in none of some trials.

    Args:
        shows: The probability that it shows in one trial; it may be one in fifty.
        runs: The number of trials in which the machine took part.
    """
    return float((1.0 - shows) ** runs)


def runs_needed(shows: float, miss: float) -> int:
    """Return how many trials leave a fault unseen with a probability of at most ``miss``.

    Raises:
        ValueError: ``shows`` or ``miss`` is not above 0 and at most 1.
    """
    if not (0.0 < shows <= 1.0 and 0.0 < miss <= 1.0):
        raise ValueError(f"probabilities above 0 and at most 1 are needed, not {shows} and {miss}")
    if shows == 1.0:
        return 1
    runs = max(1, ceil(log(miss) / log(1.0 - shows)))
    while miss_probability(shows, runs) > miss:  # floats: the logarithms may round down
        runs += 1
    return runs


def not_reproduced(machines: int, shows: float, runs: int) -> str:
    """Describe a replay in which no group showed a fault; the text never states that the machines are healthy."""
    rare = f", one that shows in {RARE:.3g} with {miss_probability(RARE, runs):.2g}" if shows != RARE else ""
    return (
        f"not reproduced on groups of {machines} machines in {runs} runs: a fault that shows in {shows:.3g} of its "
        f"runs is missed with probability {miss_probability(shows, runs):.2g}{rare}, and one that needs the full size "
        "always"
    )
