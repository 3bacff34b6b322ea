"""Finds the suspects of a replay from the groups that showed a fault (ByteRobust, section 6, algorithm 1).

A machine at fault makes each of its groups faulty. So a single machine explains the result if its groups are exactly
the faulty groups. If no single machine does, all machines of which every group was faulty are suspects, although some
of them may be healthy. (The second rule is everstep's own.)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log
from typing import NamedTuple

from everstep.decisions.blame.replay.groups import ReplayPlan
from everstep.model.replay import ReplayConclusion


class Suspects(NamedTuple):
    """The suspects of a replay, and whether one machine or several explain its result."""

    conclusion: ReplayConclusion
    machines: tuple[int, ...] = ()
    """The positions of the machines to evict."""


def suspects(plan: ReplayPlan, faulty: Mapping[str, bool | None]) -> Suspects:
    """Return the suspects.

    Args:
        plan: The planned groups.
        faulty: Name of each group → whether it showed a fault in any of its trials. None, or no entry: it could not be
            run to its end, for a reason that shows nothing about its machines.
    """
    groups = {group.name: frozenset(group.machines) for group in plan.groups}
    bad = {name for name in groups if faulty.get(name)}
    cleared = {x for name, members in groups.items() if faulty.get(name) is False for x in members}
    groups_of = plan.groups_of_machines
    alone = tuple(x for x, own in groups_of.items() if own == bad)
    possible = tuple(x for x in range(plan.machines) if x not in cleared)
    if any(faulty.get(name) is None for name in groups):
        # The groups without a result change nothing if every group of every possible suspect was faulty.
        certain = bool(bad) and all(groups_of[x] <= bad for x in possible)
        return Suspects(ReplayConclusion.ONE, alone) if certain and alone else Suspects(ReplayConclusion.INCOMPLETE)
    if not bad:
        return Suspects(ReplayConclusion.NOTHING)
    if alone:
        return Suspects(ReplayConclusion.ONE, alone)
    explained = {name for x in possible for name in groups_of[x]}
    if not bad <= explained:
        return Suspects(ReplayConclusion.INCONSISTENT)
    return Suspects(ReplayConclusion.SEVERAL, possible)


RARE = 0.02
"""Some faults, for example silent data corruption, show in only one run of fifty."""


def miss_probability(shows: float, runs: int) -> float:
    """Return the probability that a fault shows in none of its machine's trials.

    Args:
        shows: The probability that the fault shows in one trial.
        runs: The number of trials in which the machine takes part.
    """
    return float((1.0 - shows) ** runs)


def runs_needed(shows: float, miss: float) -> int:
    """Return the least number of trials that miss a fault with a probability of at most ``miss``.

    Raises:
        ValueError: ``shows`` or ``miss`` is not above 0, or above 1.
    """
    if not (0.0 < shows <= 1.0 and 0.0 < miss <= 1.0):
        raise ValueError(f"probabilities above 0 and at most 1 are needed, not {shows} and {miss}")
    if shows == 1.0:
        return 1
    runs = max(1, ceil(log(miss) / log(1.0 - shows)))
    while miss_probability(shows, runs) > miss:  # the logarithms may be rounded down
        runs += 1
    return runs


def not_reproduced(machines: int, shows: float, runs: int) -> str:
    """Describe a replay in which no group showed a fault. This does not prove that the machines are healthy."""
    rare = f", one that shows in {RARE:.3g} of them with {miss_probability(RARE, runs):.2g}" if shows != RARE else ""
    return (
        f"not reproduced on groups of {machines} machines in {runs} runs: a fault that shows in {shows:.3g} of its "
        f"runs is missed with probability {miss_probability(shows, runs):.2g}{rare}, and one that needs the full size "
        "of the job is always missed"
    )
