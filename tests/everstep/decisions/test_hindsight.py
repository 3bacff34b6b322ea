"""What later events show about the verdicts of incidents."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.hindsight import Hindsight, JudgedVerdict, LaterEvents, PastIncident, judged
from everstep.model.finding import Owner

S = 10**9
HOUR = 3600 * S


def past(number: int, at_h: float, **fields: Any) -> PastIncident:
    given: dict[str, Any] = {"owner": Owner.UNKNOWN, "resolution": "reattempt", "cause": "SIGKILL"} | fields
    at_ns = int(at_h * HOUR)
    return PastIncident(f"incident/gpt/{number:04}", "gpt", 1, at_ns, at_ns + S, **given)


def first(*incidents: PastIncident, now_h: float = 100, **known: Any) -> JudgedVerdict:
    return judged(LaterEvents(int(now_h * HOUR), incidents, **known))[0]


EVICTED = past(1, 1, evicted={"m3": "hang-culprit"}, resolution="eviction", faults=[("m3", "nic")])
GONE = past(1, 1, evicted={"m3": "gone-machine"}, resolution="eviction")
ROLLBACK = past(1, 1, resolution="rollback", cause="KeyError", owner=Owner.CODE)


def test_a_machine_that_passes_its_tests_after_it_was_suspected_is_innocent() -> None:
    found = first(EVICTED, returned={"m3": [2 * HOUR]})
    assert (found.owner, found.hindsight, found.innocent) == (Owner.MACHINE, Hindsight.REFUTED, ("m3",))
    assert found.false_alarms == ["nic"]


@pytest.mark.parametrize(
    ("incident", "returned"),
    [
        (EVICTED, {}),
        (EVICTED, {"m3": [HOUR // 2]}),
        (EVICTED, {"m2": [2 * HOUR]}),
        (GONE, {"m3": [2 * HOUR]}),
        (past(1, 1, evicted={"m3": "hang-group", "m4": "hang-group"}), {"m3": [2 * HOUR]}),
    ],
    ids=["not returned", "returned before", "another machine", "it was really silent", "only one of the group"],
)
def test_what_later_events_do_not_decide_stays_open(incident: PastIncident, returned: dict[str, list[int]]) -> None:
    found = first(incident, returned=returned)
    assert (found.hindsight, found.false_alarms) == (Hindsight.OPEN, [])


def test_a_machine_that_is_evicted_again_confirms_the_first_eviction() -> None:
    again = past(2, 5, evicted={"m3": "sure-machine-fault"})
    found = first(EVICTED, again, returned={"m3": [2 * HOUR]})
    assert (found.hindsight, found.why) == (Hindsight.CONFIRMED, "m3 was evicted again")


@pytest.mark.parametrize(
    ("later", "known", "expected"),
    [
        ([], {}, Hindsight.CONFIRMED),
        ([], {"now_h": 3}, Hindsight.OPEN),
        ([], {"now_h": 3, "ended": {1: 2 * HOUR}}, Hindsight.CONFIRMED),
        ([past(2, 3, cause="KeyError")], {}, Hindsight.REFUTED),
        ([past(2, 3, cause="SIGKILL")], {}, Hindsight.CONFIRMED),
        ([past(2, 90, cause="KeyError")], {}, Hindsight.CONFIRMED),
    ],
    ids=["a day without it", "too early", "the job finished", "the same again", "another failure", "much later"],
)
def test_a_rollback(later: list[PastIncident], known: dict[str, Any], expected: Hindsight) -> None:
    found = first(ROLLBACK, *later, **known)
    assert (found.owner, found.hindsight) == (Owner.CODE, expected)


@pytest.mark.parametrize(
    ("was", "expected", "innocent"),
    [
        (Owner.MACHINE, Hindsight.CONFIRMED, ()),
        (Owner.CODE, Hindsight.REFUTED, ("m3",)),
        (Owner.UNKNOWN, Hindsight.OPEN, ()),
    ],
)
def test_a_person_decides(was: Owner, expected: Hindsight, innocent: tuple[str, ...]) -> None:
    found = first(EVICTED, decided={(1, EVICTED.id): was}, returned={"m3": [2 * HOUR]})
    assert (found.hindsight, found.innocent) == (expected, innocent)


def test_an_open_incident_has_no_verdict_yet() -> None:
    still_open = PastIncident("incident/gpt/0001", "gpt", 1, HOUR, None, Owner.UNKNOWN, "", "")
    assert judged(LaterEvents(HOUR, [still_open])) == []
