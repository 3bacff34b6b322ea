"""Plans the rounds of tests of pairs of machines, and finds the machines and links at fault.

Each machine is tested with one neighbour and, in a second round, with its other neighbour (ByteRobust, section 4.2). An
odd number of machines needs a third round. A machine that passed once works. A machine that failed with two working
machines is at fault. If two working machines fail with each other, the link between them is at fault. A machine that
failed and did not meet two working machines is tested again, with machines that passed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
"""The two machines in alphabetical order."""


def pair_of(one: str, other: str) -> Pair:
    """Return the pair of two machines."""
    return (one, other) if one <= other else (other, one)


FURTHER_ROUNDS = 8
"""Largest number of rounds after the shifted rounds; a machine that is not judged by then stays unknown."""
FAILURES = 2
"""A machine is at fault if it failed with at least this many working machines."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The result of the tests of pairs."""

    machines: tuple[str, ...] = ()
    """The machines at fault."""
    links: tuple[Pair, ...] = ()
    """The links at fault: both machines work, but not with each other."""
    unsure: tuple[str, ...] = ()
    """The machines whose tests failed, perhaps because of another machine, or could not be run at all."""


PairsPassed = Mapping[Pair, bool | None]
"""Pair → whether it passed; None: it could not be run."""


def shifted_rounds(machines: Sequence[str]) -> list[list[Pair]]:
    """Return the first rounds, in which each machine meets both of its neighbours.

    There are two rounds, three for an odd number of machines, one for two machines, and none for a single machine.
    """
    count = len(machines)
    if count < 3:
        return [[pair_of(*machines)]] if count == 2 else []
    ring = [pair_of(machine, machines[(index + 1) % count]) for index, machine in enumerate(machines)]
    if count % 2:
        return [ring[0:-1:2], ring[1:-1:2], [ring[-1]]]
    return [ring[0::2], ring[1::2]]


def next_round(machines: Sequence[str], results: PairsPassed, further: int) -> list[Pair]:
    """Return the pairs to test next, each machine in at most one pair; none if further tests would show nothing.

    Args:
        machines: All machines.
        results: The results so far.
        further: The number of rounds after the shifted rounds.
    """
    for planned in shifted_rounds(machines):
        if any(pair not in results for pair in planned):
            return planned
    if further >= FURTHER_ROUNDS:
        return []
    by_machine, pairs = _ByMachine(results), []
    free = deque(machine for machine in machines if machine in by_machine.working)
    for suspect in machines:
        if not by_machine.is_suspect(suspect):
            continue
        met = []
        while free and free[0] in by_machine.met[suspect]:
            met.append(free.popleft())
        if free:
            pairs.append(pair_of(suspect, free.popleft()))
        free.extendleft(reversed(met))
    return pairs


def judge_pairs(machines: Sequence[str], results: PairsPassed) -> Pairs:
    """Return the machines and links at fault, from all results."""
    by_machine = _ByMachine(results)
    working = by_machine.working
    bad = [machine for machine in machines if machine not in working and by_machine.failures(machine) >= FAILURES]
    links = [pair for pair, passed in results.items() if passed is False and working.issuperset(pair)]
    judged = working.union(bad)
    unsure = [machine for machine in machines if machine not in judged] if len(machines) > 1 else []
    return Pairs(tuple(bad), tuple(sorted(links)), tuple(unsure))


class _ByMachine:
    """The results of pairs, by machine."""

    def __init__(self, results: PairsPassed) -> None:
        self.working = {machine for pair, passed in results.items() if passed for machine in pair}
        self.met: dict[str, dict[str, bool | None]] = defaultdict(dict)
        """Machine → each machine with which it was tested → whether the pair passed."""
        for (first, second), passed in results.items():
            self.met[first][second] = self.met[second][first] = passed

    def failures(self, machine: str) -> int:
        """Return the number of working machines with which a machine failed."""
        return sum(passed is False and other in self.working for other, passed in self.met[machine].items())

    def is_suspect(self, machine: str) -> bool:
        """Return whether a machine failed, and is neither known to work nor judged to be at fault."""
        failed = any(passed is False for passed in self.met[machine].values())
        return machine not in self.working and failed and self.failures(machine) < FAILURES
