"""Which machines test what lies between them, in which rounds, and which one is at fault.

Every machine is tested with a neighbour, and in a second round, shifted by one, with the other neighbour (ByteRobust,
section 4.2). A machine that passed once works. A machine that failed with two working machines is at fault. If two
machines fail only with each other, the fault is in what lies between them.

An odd number of machines needs a third round. Suspects that were tested with suspects are tested again, with machines
that passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
"""In alphabetical order."""


def pair_of(one: str, other: str) -> Pair:
    """The pair of two machines."""
    return (one, other) if one <= other else (other, one)


FURTHER_ROUNDS = 8
"""Rounds after the shifted one, at most; a machine that is not judged by then stays unknown."""
FAILURES = 2
"""A machine is at fault if it failed with at least this many working machines."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the tests of pairs show."""

    machines: tuple[str, ...] = ()
    """At fault."""
    links: tuple[Pair, ...] = ()
    """Both machines work; what lies between them does not."""
    unsure: tuple[str, ...] = ()
    """They failed, and it is not known whether for their own fault; or no test of them could be run."""


Seen = Mapping[Pair, bool | None]
"""Pair → whether it passed; None: it could not be run."""


def shifted_rounds(machines: Sequence[str]) -> list[list[Pair]]:
    """The first rounds: each machine with one neighbour, then with the other one. Two rounds, three of an odd number;
    one of two machines; none of fewer."""
    count = len(machines)
    if count < 3:
        return [[pair_of(*machines)]] if count == 2 else []
    ring = [pair_of(machine, machines[(index + 1) % count]) for index, machine in enumerate(machines)]
    if count % 2:
        return [ring[0:-1:2], ring[1:-1:2], [ring[-1]]]
    return [ring[0::2], ring[1::2]]


def next_round(machines: Sequence[str], seen: Seen, further: int) -> list[Pair]:
    """Which pairs to test next, no machine in two of them; none: nothing more can be found out.

    Args:
        machines: All.
        seen: What is known.
        further: So many rounds were run after the shifted ones.
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
    """Who is at fault, by all that was seen."""
    known = _Known(seen)
    bad = [machine for machine in machines if machine not in known.working and known.failures(machine) >= FAILURES]
    links = [pair for pair, passed in seen.items() if passed is False and known.working.issuperset(pair)]
    told = known.working | set(bad)
    unsure = [machine for machine in machines if machine not in told] if len(machines) > 1 else []
    return Pairs(tuple(bad), tuple(sorted(links)), tuple(unsure))


class _Known:
    """What was seen, by machine."""

    def __init__(self, seen: Seen) -> None:
        self.working = {machine for pair, passed in seen.items() if passed for machine in pair}
        self.met: dict[str, dict[str, bool | None]] = defaultdict(dict)
        """Machine → each that it was tested with, and whether they passed."""
        for (one, other), passed in seen.items():
            self.met[one][other] = self.met[other][one] = passed

    def failures(self, machine: str) -> int:
        """With how many machines that work it failed."""
        return sum(passed is False and other in self.working for other, passed in self.met[machine].items())

    def is_suspect(self, machine: str) -> bool:
        """It failed, and it is not known whether it works."""
        failed = any(passed is False for passed in self.met[machine].values())
        return machine not in self.working and failed and self.failures(machine) < FAILURES
