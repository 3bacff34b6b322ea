"""A fault that most machines share evicts none of them, at every size; a rare fault beside it still evicts."""

from __future__ import annotations

import pytest

from everstep.decisions.act.evict.plan_evictions import EvictFacts, EvictPlan, plan_evictions
from everstep.decisions.act.evict.shared import WHOLE, alike_machines, kept_findings
from everstep.model.finding import Finding, MachineFinding
from everstep.model.recovery_policy import RecoveryPolicy


def faults(reason: str, numbers: range) -> list[MachineFinding]:
    found = Finding(inspection="kernel-log", reason=reason, item="GPU 3", text="Xid 79", sure=True, evidence=["a line"])
    return [MachineFinding(machine=f"m{number}", finding=found) for number in numbers]


def planned(machines: int, findings: list[MachineFinding]) -> EvictPlan:
    """Return the decision from what a stop keeps of the findings."""
    alike = alike_machines(findings)
    kept = kept_findings(findings, alike, machines)
    names = [f"m{number}" for number in range(machines)]
    return plan_evictions(EvictFacts(now_ns=1, machines=names, findings=kept, alike=alike), RecoveryPolicy())


@pytest.mark.parametrize(
    ("machines", "faulty"), [(40, 33), (100, 83), (128, 106), (129, 107), (200, 166), (1200, 1000)]
)
def test_a_fault_that_most_machines_share_evicts_none_at_any_size(machines: int, faulty: int) -> None:
    plan = planned(machines, faults("gpu-lost", range(faulty)))

    assert (plan.evict, plan.ask) == ([], [])


def test_one_machine_with_another_fault_leaves_although_a_thousand_share_one() -> None:
    plan = planned(1200, [*faults("gpu-lost", range(1000)), *faults("nvlink-down", range(1100, 1101))])

    assert [one.machine for one in plan.evict] == ["m1100"]


def test_every_machine_with_a_sure_fault_that_is_not_shared_leaves_at_once() -> None:
    plan = planned(2000, faults("gpu-lost", range(65)))

    assert len(plan.evict) == 65


def test_the_breaker_counts_all_machines_that_would_leave() -> None:
    plan = planned(2000, faults("gpu-lost", range(900)))

    assert plan.evict == []
    assert len(plan.ask) == 900
    assert plan.tripped


def test_of_very_many_findings_only_some_keep_their_evidence() -> None:
    found = faults("gpu-lost", range(600))
    kept = kept_findings(found, alike_machines(found), 2000)

    assert len(kept) == 600
    assert sum(bool(about.finding.evidence) for about in kept) == WHOLE
    everywhere = faults("gpu-lost", range(1500))
    assert len(kept_findings(everywhere, alike_machines(everywhere), 2000)) == WHOLE
