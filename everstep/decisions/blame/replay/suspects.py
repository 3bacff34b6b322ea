"""Who is at fault, from which groups of a replay showed one (ByteRobust, section 6, algorithm 1).

A machine that computes wrongly makes every group that it is in faulty. One machine alone explains what was seen where
its groups are just the faulty ones. Ours: where no single machine explains it, all machines whose every group was
faulty are suspects. Those at fault are among them, and others may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log

from everstep.decisions.blame.replay.groups import ReplayPlan


class Found(StrEnum):
    """What a replay says."""

    NOTHING = "nothing"
    """No group showed a fault: that clears nobody (:func:`miss_probability`)."""
    ONE = "one"
    """A single machine at fault explains what was seen: it is among the suspects, alone where m ≤ n."""
    SEVERAL = "several"
    """No single machine does: several are at fault, and all that may be are suspects."""
    INCONSISTENT = "inconsistent"
    """One phase showed a fault that no machine explains: it does not show in every run. Run the phases again."""
    INCOMPLETE = "incomplete"
    """Groups that could not be run to their end leave open who is at fault."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The answer of a replay."""

    found: Found
    machines: tuple[int, ...] = ()
    """Positions of those to evict."""
    open_groups: tuple[str, ...] = ()
    """That could not be run to their end."""


def suspects(plan: ReplayPlan, faulty: Mapping[str, bool | None]) -> Suspects:
    """Who is at fault.

    Args:
        plan: What was run.
        faulty: Name of each group → whether it showed a fault, in any of its runs; None or absent: it could not be run
            to its end for a reason that says nothing of its machines.
    """
    groups = {group.name: frozenset(group.machines) for group in plan.groups}
    bad = {name for name in groups if faulty.get(name)}
    still_open = tuple(name for name in groups if faulty.get(name) is None)
    cleared = {x for name, members in groups.items() if faulty.get(name) is False for x in members}
    of_machine = plan.of_machines
    alone = tuple(x for x, own in of_machine.items() if own == bad)
    possible = tuple(x for x in range(plan.machines) if x not in cleared)
    if still_open:
        # Named only where the open groups change nothing: everybody who may be at fault is already known.
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
    """How likely a fault that is there shows in none of some runs.

    Args:
        shows: Probability that it shows in one run; it may be one in fifty.
        runs: In which the machine took part.
    """
    return float((1.0 - shows) ** runs)


def runs_needed(shows: float, miss: float) -> int:
    """So many runs leave a fault unseen with a probability of ``miss`` at most.

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
    """What is said of a replay in which no group showed a fault; never that the machines are clean."""
    rare = f", one that shows in {RARE:.3g} with {miss_probability(RARE, runs):.2g}" if shows != RARE else ""
    return (
        f"not reproduced on groups of {machines} machines in {runs} runs: a fault that shows in {shows:.3g} of its "
        f"runs is missed with probability {miss_probability(shows, runs):.2g}{rare}, and one that needs the full size "
        "always"
    )
