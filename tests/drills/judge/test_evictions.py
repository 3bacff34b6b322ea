"""Which machines have to leave the job, and which must not."""

from __future__ import annotations

from typing import Any

import pytest

from drills.faults.all import drill_request
from drills.faults.away import CutLink
from drills.judge.evictions import eviction_problems, over_evicted
from everstep.model.hang import HangConclusion, HangResult
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec

SPEC = JobSpec(name="x", script="/x.py", machines=4)


@pytest.mark.parametrize("between", [("m1", "m3"), ("m3", "m1")])
def test_of_a_cut_link_the_later_end_leaves_where_there_is_another_machine(between: tuple[str, str]) -> None:
    cut = drill_request(fault="cut-link", between=between, spare=1)
    assert cut.leaving(SPEC) == ["m3"]
    assert eviction_problems(cut, SPEC, ["m3"]) == []
    assert eviction_problems(cut, SPEC, []) == ["m3 is at fault, and did not leave the job"]
    assert eviction_problems(cut, SPEC, ["m1", "m3"]) == ["m1 left the job, and nothing is wrong with it"]
    assert cut.model_copy(update={"spare": 0}).leaving(SPEC) == []


def test_without_a_word_it_is_the_link_to_the_machine_before_the_struck_one() -> None:
    assert CutLink(machine="m2").ends(SPEC) == ("m1", "m2")
    assert CutLink(machine="m0").ends(SPEC) == ("m0", "m3")


def test_who_leaves_on_purpose_beside_the_one_at_fault_is_told_and_allowed() -> None:
    def report(*machines: str, conclusion: HangConclusion = HangConclusion.OVER_EVICTS) -> IncidentReport:
        hang = HangResult(generation=1, conclusion=conclusion, reason="they wait", machines=[*machines])
        given: dict[str, Any] = {"evicted": [*machines], "hang": hang}
        return IncidentReport.model_construct(**given)

    hung = drill_request(fault="skip-collective", ranks=[1], spare=2)
    assert hung.leaving(SPEC) == ["m1"]
    beside = over_evicted([report("m1", "m3")], ["m1"])
    assert beside == ["m3"]
    assert eviction_problems(hung, SPEC, ["m1", "m3"], beside=beside) == []
    assert over_evicted([report("m2", "m3")], ["m1"]) == [], (
        "the machine at fault is not among these, so this was no over-eviction"
    )
    assert over_evicted([report("m1", "m3", conclusion=HangConclusion.NAMES)], ["m1"]) == [], (
        "the trace named both machines"
    )


def test_a_slow_machine_leaves_where_there_is_another_one_and_a_slow_link_costs_none() -> None:
    assert drill_request(fault="slow-machine", machine="m2", spare=1).leaving(SPEC) == []
    assert drill_request(fault="slow-machine", machine="m2", spare=1, replaces=True).leaving(SPEC) == ["m2"]
    assert drill_request(fault="slow-link", between=("m0", "m1"), spare=1).leaving(SPEC) == []
