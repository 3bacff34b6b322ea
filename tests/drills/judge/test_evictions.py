"""Who has to leave the job, and who must not."""

from __future__ import annotations

from typing import Any

import pytest

from drills.judge.evictions import due, evictions_right, over_evicted
from drills.spec.request import DrillRequest
from everstep.model.hang import HangConclusion, HangFound
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec

SPEC = JobSpec(name="x", script="/x.py", machines=4)


@pytest.mark.parametrize("between", [("m1", "m3"), ("m3", "m1")])
def test_of_a_cut_link_the_later_end_leaves_where_there_is_another_machine(between: tuple[str, str]) -> None:
    cut = DrillRequest(fault="cut-link", between=between, spare=1)
    assert due(cut, SPEC) == ["m3"]
    assert evictions_right(cut, SPEC, ["m3"]) == []
    assert evictions_right(cut, SPEC, []) == ["m3 is at fault, and did not leave the job"]
    assert evictions_right(cut, SPEC, ["m1", "m3"]) == ["m1 left the job, and nothing is wrong with it"]
    assert due(cut.model_copy(update={"spare": 0}), SPEC) == []


def test_without_a_word_it_is_the_link_to_the_machine_before_the_struck_one() -> None:
    assert DrillRequest(fault="cut-link", machine="m2").ends(SPEC) == ("m1", "m2")
    assert DrillRequest(fault="cut-link", machine="m0").ends(SPEC) == ("m0", "m3")


def test_who_leaves_on_purpose_beside_the_one_at_fault_is_told_and_allowed() -> None:
    def report(*machines: str, conclusion: HangConclusion = HangConclusion.OVER_EVICTS) -> IncidentReport:
        hang = HangFound(generation=1, conclusion=conclusion, reason="they wait", machines=[*machines])
        given: dict[str, Any] = {"evicted": [*machines], "hang": hang}
        return IncidentReport.model_construct(**given)

    hung = DrillRequest(fault="skip-collective", ranks=[1], spare=2)
    assert due(hung, SPEC) == ["m1"]
    beside = over_evicted([report("m1", "m3")], ["m1"])
    assert beside == ["m3"]
    assert evictions_right(hung, SPEC, ["m1", "m3"], beside=beside) == []
    assert over_evicted([report("m2", "m3")], ["m1"]) == [], "without the one at fault it is no over-eviction"
    assert over_evicted([report("m1", "m3", conclusion=HangConclusion.NAMES)], ["m1"]) == [], "both were named"


def test_a_slow_machine_leaves_where_there_is_another_one_and_a_slow_link_costs_none() -> None:
    assert due(DrillRequest(fault="slow-machine", machine="m2", spare=1), SPEC) == []
    assert due(DrillRequest(fault="slow-machine", machine="m2", spare=1, replaces=True), SPEC) == ["m2"]
    assert due(DrillRequest(fault="slow-link", between=("m0", "m1"), spare=1), SPEC) == []
