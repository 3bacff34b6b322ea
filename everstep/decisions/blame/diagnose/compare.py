"""Faults that only a comparison of machines shows: other bits, a low bandwidth, a test that fails on one machine only.

Bitwise alignment (ByteRobust, section 4.2): every machine does the same calculation, and the digests of the results are
compared. More than half of the machines of a kind have to agree, or none is named; if two machines differ, neither is
named. Results of machines of different kinds are not compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Health

NAMED = 3
"""The number of differing results of one machine that are named."""


@dataclass(frozen=True, slots=True)
class BitsCompared:
    """The result of a comparison for one machine."""

    agrees: bool | None
    """False: the machine computed other bits than most machines. None: not known."""
    text: str = ""
    """Why not, or what differs."""
    differing: tuple[str, ...] = field(default=())
    """Names of the results that differ from most."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The results that one machine computed."""

    kind: str
    """The kind of the machine: machines of other kinds may correctly compute other bits."""
    digests: Mapping[str, str]
    """Name of each result → digest."""


def compare(computed: Mapping[str, Computed]) -> dict[str, BitsCompared]:
    """Compare the results of all machines, and return the result for each machine."""
    kinds: dict[str, dict[str, Computed]] = defaultdict(dict)
    for machine, one in computed.items():
        kinds[one.kind][machine] = one
    return {machine: said for group in kinds.values() for machine, said in _of_kind(group).items()}


def _of_kind(group: Mapping[str, Computed]) -> dict[str, BitsCompared]:
    if len(group) == 1:
        return dict.fromkeys(group, BitsCompared(None, "there is no other machine of its kind to compare it with"))
    counts = Counter(_bits(one) for one in group.values())
    bits, count = counts.most_common(1)[0]
    if count * 2 <= len(group):
        text = "the two machines of this kind differ" if len(group) == 2 else "no majority of the machines agrees"
        return dict.fromkeys(group, BitsCompared(None, f"{text}: nobody can be named"))
    usual, found = dict(bits), {}
    for machine, one in group.items():
        odd = tuple(sorted(name for name in usual.keys() | one.digests if usual.get(name) != one.digests.get(name)))
        more = f" and {len(odd) - NAMED} more" if len(odd) > NAMED else ""
        text = f"other bits than {count} of {len(group)} machines of its kind: {', '.join(odd[:NAMED])}{more}"
        found[machine] = BitsCompared(False, text, odd) if odd else BitsCompared(True)
    return found


def _bits(one: Computed) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(one.digests.items()))


K = TypeVar("K", bound=Hashable)
LEAST = 3
"""Fewer figures than this are not compared."""
LOW_SHARE = 0.5
"""Less than this share of the median is worth a look …"""
SLOW_SHARE = 0.2
"""… and a share below this is a fault: other work on a machine does not lower its bandwidth that far."""


def below(figures: Mapping[K, float], share: float) -> dict[K, float]:
    """Those below a share of the median of all, with which share of it they have.

    Args:
        figures: Bandwidths of what is alike.
        share: Of the median, above 0 and below 1.
    """
    if len(figures) < LEAST:
        return {}
    usual = median(figures.values())
    return {one: value / usual for one, value in figures.items() if value < share * usual}


BREAKS = frozenset({"test-hangs", "test-crashed", "all-to-all-failed", "reference-failed", "gpu-copy-failed"})
"""Reason codes of tests that started but did not end. A test without its requirements did not start."""
NOT_BEGUN = "test-unable"
PASS_SHARE = 0.5
"""The share of the machines of a kind that has to pass a test which one of them fails."""

SOFTWARE = ", torch "
"""The part of a kind from which on it does not describe hardware (``agent.diagnoser.kind``)."""


def failing(results: Mapping[str, Sequence[DiagnosticResult]]) -> dict[str, dict[str, str]]:
    """Return machine → test → how the test broke there, if most machines of its kind pass the test.

    Args:
        results: Machine → the results of its own tests. A machine of unknown kind gets no entry.
    """
    found: dict[str, dict[str, str]] = {}
    for test in dict.fromkeys(one.test for said in results.values() for one in said):
        of_test = {
            machine: one
            for machine, said in results.items()
            for one in said
            if one.test == test and not one.nothing and all(each.reason != NOT_BEGUN for each in one.findings)
        }
        for machine, broken in of_test.items():
            how = next((each.text for each in broken.findings if each.reason in BREAKS), "")
            kind = _kind(broken, results[machine])
            if not (how and kind) or broken.verdict is not Health.UNKNOWN:
                continue
            alike = [one for other, one in of_test.items() if _kind(one, results[other]) == kind]
            passing = sum(not result.findings for result in alike)
            if passing > PASS_SHARE * len(alike):
                found.setdefault(machine, {})[test] = f"{how}; {passing} of {len(alike)} machines of its kind pass"
    return found


def _kind(result: DiagnosticResult, own: Sequence[DiagnosticResult]) -> str:
    """Return the hardware kind; if the result of a test does not name it, the kind from other tests of the machine."""
    kind = result.kind or next((one.kind for one in own if one.kind), "")
    return kind.partition(SOFTWARE)[0]
