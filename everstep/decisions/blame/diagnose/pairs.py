"""The pair tests of machines: their rounds, and the machine that is at fault.

Every machine is tested with a neighbour, and in a second round, shifted by one, with the other neighbour (ByteRobust,
section 4.2). A machine that passed once works. A machine that failed with two working machines is at fault. If two
machines fail only with each other, the fault is between them.

An odd number of machines needs a third round. Suspects that were tested with suspects are tested again, with machines
that passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
"""The two machines in alphabetical order."""


def pair_of(one: str, other: str) -> Pair:
    """The pair of two machines."""
    return (one, other) if one <= other else (other, one)


FURTHER_ROUNDS = 8
"""The largest number of rounds after the shifted round; a machine that is not judged by then stays unknown."""
FAILURES = 2
"""A machine is at fault if it failed with at least this many working machines."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The result of the pair tests."""

    machines: tuple[str, ...] = ()
    """Machines at fault."""
    links: tuple[Pair, ...] = ()
    """Both machines work; what lies between them does not."""
    unsure: tuple[str, ...] = ()
    """Machines whose tests failed, perhaps because of another machine, or could not be run at all."""


Seen = Mapping[Pair, bool | None]
"""Pair → whether it passed; None: it could not be run."""


def shifted_rounds(machines: Sequence[str]) -> list[list[Pair]]:
    """Return the first rounds: each machine with its first neighbour, then with the other. There are two rounds, three
    for an odd number of machines, one for two machines, and none for fewer."""
    count = len(machines)
    if count < 3:
        return [[pair_of(*machines)]] if count == 2 else []
    ring = [pair_of(machine, machines[(index + 1) % count]) for index, machine in enumerate(machines)]
    if count % 2:
        return [ring[0:-1:2], ring[1:-1:2], [ring[-1]]]
    return [ring[0::2], ring[1::2]]


def next_round(machines: Sequence[str], seen: Seen, further: int) -> list[Pair]:
    """Return the pairs to test next, each machine in at most one pair; none: further tests would show nothing.

    Args:
        machines: All machines.
        seen: The results so far.
        further: The number of rounds after the shifted rounds.
    """
    for planned in shifted_rounds(machines):
        if any(pair not in seen for pair in planned):
            return planned
    if further >= FURTHER_ROUNDS:
        return []
    known, found, busy = _Known(seen), [], set[str]()
    working = [machine for machine in machines if machine in known.working]
    for suspect in machines:
        if not known.is_suspect(suspect):
            continue
        met = known.met[suspect]
        partner = next((machine for machine in working if machine not in met and machine not in busy), None)
        if partner is not None:
            busy.add(partner)
            found.append(pair_of(suspect, partner))
    return found


def judge_pairs(machines: Sequence[str], seen: Seen) -> Pairs:
    """Return the machines at fault, from all results."""
    known = _Known(seen)
    bad = [machine for machine in machines if machine not in known.working and known.failures(machine) >= FAILURES]
    links = [pair for pair, passed in seen.items() if passed is False and known.working.issuperset(pair)]
    told = known.working | set(bad)
    unsure = [machine for machine in machines if machine not in told] if len(machines) > 1 else []
    return Pairs(tuple(bad), tuple(sorted(links)), tuple(unsure))


class _Known:
    """The results by machine."""

    def __init__(self, seen: Seen) -> None:
        self.working = {machine for pair, passed in seen.items() if passed for machine in pair}
        self.met: dict[str, dict[str, bool | None]] = defaultdict(dict)
        """Machine → each that it was tested with, and whether they passed."""
        for (one, other), passed in seen.items():
            self.met[one][other] = self.met[other][one] = passed

    def failures(self, machine: str) -> int:
        """Return with how many working machines the machine failed."""
        return sum(passed is False and other in self.working for other, passed in self.met[machine].items())

    def is_suspect(self, machine: str) -> bool:
        """Return whether the machine failed and is not known to work."""
        failed = any(passed is False for passed in self.met[machine].values())
        return machine not in self.working and failed and self.failures(machine) < FAILURES
