"""Tests that break on one machine and pass on most of its kind: each failure alone says little, the comparison does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.model.diagnosis import DiagnosticResult
from everstep.model.health import Health

BREAKS = frozenset({"test-hangs", "test-crashed", "all-to-all-failed", "reference-failed", "gpu-copy-failed"})
"""Reason codes of tests that were begun and did not come to their end. A test that lacks what it needs was not."""
NOT_BEGUN = "test-unable"
PASS_SHARE = 0.5
"""More than this share of the machines of a kind has to pass what one of them fails."""

SOFTWARE = ", torch "
"""What comes from here on in a kind is no hardware (``agent.diagnoser.kind``)."""


def failing(results: Mapping[str, Sequence[DiagnosticResult]]) -> dict[str, dict[str, str]]:
    """Machine → test → how it broke there, where most machines of its kind pass it.

    Args:
        results: Machine → what its own tests say. Of a machine whose kind is not known nothing is said.
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
            passing = sum(not one.findings for one in alike)
            if passing > PASS_SHARE * len(alike):
                found.setdefault(machine, {})[test] = f"{how}; {passing} of {len(alike)} machines of its kind pass"
    return found


def _kind(result: DiagnosticResult, own: Sequence[DiagnosticResult]) -> str:
    """The hardware; of a test whose result does not say it, as other tests of the machine do."""
    kind = result.kind or next((one.kind for one in own if one.kind), "")
    return kind.partition(SOFTWARE)[0]
