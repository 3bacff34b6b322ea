"""Finds faults that only a comparison of machines shows: other bits, a low bandwidth, a test that only one fails.

For bitwise alignment (ByteRobust, section 4.2), all machines do the same calculation, and the digests of its results
are compared among machines of one kind. A machine is named only if more than half of the machines of its kind agree on
another result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from everstep.base.text import listed
from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Health

LISTED = 3
"""Number of differing results of a machine in a text."""


@dataclass(frozen=True, slots=True)
class BitsCompared:
    """The result of a comparison for one machine."""

    agrees: bool | None
    """Whether the machine computed the same bits as most machines of its kind; None: not known."""
    text: str = ""
    """The results that differ, or why nothing is known."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The results that one machine computed."""

    kind: str
    """The kind of the machine: a healthy machine of another kind may compute other bits."""
    digests: Mapping[str, str]
    """Name of each result → its digest."""


def compare(computed: Mapping[str, Computed]) -> dict[str, BitsCompared]:
    """Compare the results of all machines; returns machine → the result of the comparison."""
    kinds: dict[str, dict[str, Computed]] = defaultdict(dict)
    for machine, own in computed.items():
        kinds[own.kind][machine] = own
    return {machine: result for group in kinds.values() for machine, result in _of_kind(group).items()}


def _of_kind(group: Mapping[str, Computed]) -> dict[str, BitsCompared]:
    if len(group) == 1:
        return dict.fromkeys(group, BitsCompared(None, "there is no other machine of its kind to compare it with"))
    counts = Counter(tuple(sorted(own.digests.items())) for own in group.values())
    bits, count = counts.most_common(1)[0]
    if count * 2 <= len(group):
        text = "the two machines of its kind differ" if len(group) == 2 else "no majority of its kind agrees"
        return dict.fromkeys(group, BitsCompared(None, f"{text}: no machine can be named"))
    usual, compared = dict(bits), {}
    for machine, own in group.items():
        odd = sorted(name for name in usual.keys() | own.digests if usual.get(name) != own.digests.get(name))
        text = f"other bits than {count} of {len(group)} machines of its kind: {listed(odd, LISTED)}"
        compared[machine] = BitsCompared(False, text) if odd else BitsCompared(True)
    return compared


K = TypeVar("K", bound=Hashable)
LEAST = 3
"""Fewer values than this are not compared."""
LOW_SHARE = 0.5
"""A bandwidth below this share of the median is reported."""
SLOW_SHARE = 0.2
"""A bandwidth below this share of the median is a fault: other work on a machine does not lower it that far."""


def below(figures: Mapping[K, float], share: float) -> dict[K, float]:
    """Return the keys of the values below a share of the median, each with its own share of the median.

    Args:
        figures: Bandwidths that can be compared.
        share: A share of the median, above 0 and below 1.
    """
    if len(figures) < LEAST:
        return {}
    usual = median(figures.values())
    return {key: value / usual for key, value in figures.items() if value < share * usual}


BREAKS = frozenset({"test-hangs", "test-crashed", "all-to-all-failed", "reference-failed", "gpu-copy-failed"})
"""The reason codes of a test that started and broke."""
NOT_BEGUN = "test-unable"
"""The reason code of a test that could not start."""
PASS_SHARE = 0.5
"""A test that breaks on a machine is a fault if more than this share of the machines of its kind pass it."""

SOFTWARE = ", torch "
"""In the text of a kind, everything before this word describes the hardware (``agent.diagnoser.kind``)."""


def failing(results: Mapping[str, Sequence[DiagnosticResult]]) -> dict[str, dict[str, str]]:
    """Return machine → test → how the test broke on it, if most machines of the same kind pass the test.

    Args:
        results: Machine → the results of its own tests. A machine of unknown kind gets no entry.
    """
    failing_on: dict[str, dict[str, str]] = {}
    for test in dict.fromkeys(result.test for own in results.values() for result in own):
        of_test = {
            machine: result
            for machine, own in results.items()
            for result in own
            if result.test == test
            and not result.nothing
            and all(finding.reason != NOT_BEGUN for finding in result.findings)
        }
        kinds = {machine: _kind(result, results[machine]) for machine, result in of_test.items()}
        tested = Counter(kinds.values())
        passed = Counter(kinds[machine] for machine, result in of_test.items() if not result.findings)
        for machine, broken in of_test.items():
            how = next((finding.text for finding in broken.findings if finding.reason in BREAKS), "")
            kind = kinds[machine]
            if not (how and kind) or broken.verdict is not Health.UNKNOWN:
                continue
            if passed[kind] > PASS_SHARE * tested[kind]:
                text = f"{how}; {passed[kind]} of {tested[kind]} machines of its kind pass"
                failing_on.setdefault(machine, {})[test] = text
    return failing_on


def _kind(result: DiagnosticResult, own: Sequence[DiagnosticResult]) -> str:
    """Return the kind of the hardware: from the result of a test or, if it has none, from the machine's other tests."""
    kind = result.kind or next((other.kind for other in own if other.kind), "")
    return kind.partition(SOFTWARE)[0]
