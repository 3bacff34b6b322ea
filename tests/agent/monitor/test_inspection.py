"""Events that happened once and count for some time, as every inspection notes them."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.monitor.inspection import EVENTS, Inspection, InspectionResult, Limits, Site
from everstep.model.finding import EVIDENCE_LINES, Finding

S = 1_000_000_000


class Noting(Inspection):
    """An inspection that notes what the test chooses. ``now_s`` is its clock."""

    name: ClassVar[str] = "i"
    now_s = 0

    def __init__(self) -> None:
        super().__init__(Site(now_ns=lambda: self.now_s * S), Limits(), {}, same_boot=True)

    def inspect(self) -> InspectionResult:
        return InspectionResult(self.noted())

    def items(self, now_s: int) -> list[str]:
        self.now_s = now_s
        return [found.item for found in self.noted()]


def finding(item: str = "a", line: str = "seen") -> Finding:
    return Finding(inspection="i", reason="r", item=item, text="it happened", evidence=[line], since_ns=1)


def test_an_event_counts_for_its_time_and_one_without_an_end_until_a_reboot() -> None:
    inspection = Noting()
    inspection.note(finding("short"), at_ns=0, lasts_s=10)
    inspection.note(finding("for ever"), at_ns=0, lasts_s=None)

    assert inspection.items(9) == ["short", "for ever"]
    assert inspection.items(11) == ["for ever"]


def test_a_repeated_event_is_one_with_its_count_and_counts_from_the_last_time() -> None:
    inspection = Noting()
    for second in range(8):
        inspection.note(finding(line=f"line {second}"), at_ns=second * S, lasts_s=10)

    assert inspection.items(16) == ["a"]
    [found] = inspection.noted()
    assert found.text == "it happened (8 times)"
    assert (found.since_ns, found.last_ns) == (1, 7 * S)
    assert found.evidence == [f"line {number}" for number in range(EVIDENCE_LINES)]


def test_an_event_that_counts_no_more_begins_anew() -> None:
    inspection = Noting()
    inspection.note(finding(line="old"), at_ns=0, lasts_s=10)
    inspection.note(finding(line="new"), at_ns=20 * S, lasts_s=10)

    [found] = inspection.noted()
    assert (found.text, found.evidence, found.last_ns) == ("it happened", ["new"], 0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200), max_size=300))
def test_events_are_bounded_and_the_newest_are_kept(items: list[int]) -> None:
    inspection = Noting()
    for number in items:
        inspection.note(finding(str(number)), at_ns=0, lasts_s=None)

    assert len(inspection.noted()) <= EVENTS
    if items:
        assert str(items[-1]) in inspection.items(0)
