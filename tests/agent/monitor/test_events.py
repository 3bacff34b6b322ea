"""What happened once and counts for some time."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.monitor import events
from everstep.model.finding import EVIDENCE_LINES, Finding

S = 1_000_000_000


def finding(item: str = "a", line: str = "seen") -> Finding:
    return Finding(inspection="i", reason="r", item=item, text="it happened", evidence=[line], since_ns=1)


def test_it_counts_for_its_time_and_one_without_an_end_until_a_reboot() -> None:
    kept: list[dict[str, Any]] = []
    events.add(kept, finding("short"), now_ns=0, lasts_s=10)
    events.add(kept, finding("for ever"), now_ns=0, lasts_s=None)

    assert [event["finding"]["item"] for event in events.current(kept, 9 * S)] == ["short", "for ever"]
    assert [event["finding"]["item"] for event in events.current(kept, 11 * S)] == ["for ever"]


def test_a_repeated_one_is_one_with_its_count_and_counts_from_the_last_time() -> None:
    kept: list[dict[str, Any]] = []
    for second in range(8):
        events.add(kept, finding(line=f"line {second}"), now_ns=second * S, lasts_s=10)

    [found] = events.findings(events.current(kept, 16 * S))
    assert found.text == "it happened (8 times)"
    assert (found.since_ns, found.last_ns) == (1, 7 * S)
    assert found.evidence == [f"line {number}" for number in range(EVIDENCE_LINES)]


def test_one_that_counts_no_more_begins_anew() -> None:
    kept: list[dict[str, Any]] = []
    events.add(kept, finding(line="old"), now_ns=0, lasts_s=10)
    events.add(kept, finding(line="new"), now_ns=20 * S, lasts_s=10)

    [found] = events.findings(kept)
    assert (found.text, found.evidence, found.last_ns) == ("it happened", ["new"], 0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200), max_size=300))
def test_they_are_bounded_and_the_newest_are_kept(items: list[int]) -> None:
    kept: list[dict[str, Any]] = []
    for number in items:
        events.add(kept, finding(str(number)), now_ns=0, lasts_s=None)

    assert len(kept) <= events.KEPT
    if items:
        assert any(event["finding"]["item"] == str(items[-1]) for event in kept)
