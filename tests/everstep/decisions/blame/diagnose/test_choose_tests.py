"""The choice of tests for a symptom."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.classify.rule import FaultClass
from everstep.decisions.blame.diagnose.choose_tests import ROWS, choose_tests
from everstep.model.diagnosis import BETWEEN_MACHINES, Diagnostic
from everstep.model.finding import Owner
from everstep.model.incident import Symptom


@pytest.mark.parametrize("symptom", [Symptom.CRASH, Symptom.EXCEPTION])
def test_an_nccl_error_leads_to_the_tests_of_the_paper(symptom: Symptom) -> None:
    """The paper's order is EUD, then all-to-all within a machine, then all-gather with neighbours."""
    found = choose_tests(symptom, FaultClass.NCCL_ERROR, Owner.UNKNOWN)
    order = [found.tests.index(one) for one in (Diagnostic.EUD, Diagnostic.ALL_TO_ALL, Diagnostic.ALL_GATHER)]

    assert order == sorted(order)
    assert Diagnostic.BITWISE not in found.tests


def test_a_loss_that_is_not_finite_leads_to_a_comparison_of_bits() -> None:
    assert Diagnostic.BITWISE in choose_tests(Symptom.NOT_FINITE, FaultClass.NAN, Owner.UNKNOWN).tests


@pytest.mark.parametrize(
    ("symptom", "fault", "owner"),
    [
        (Symptom.EXCEPTION, "", ""),
        (Symptom.UPDATE, "", ""),
        (Symptom.CRASH, FaultClass.DATA_ERROR, Owner.DATA),
        (Symptom.CRASH, FaultClass.REMOTE_STORAGE, Owner.STORAGE),
    ],
)
def test_if_no_machine_is_at_fault_none_is_tested(symptom: str, fault: str, owner: str) -> None:
    found = choose_tests(symptom, fault, owner)

    assert found.tests == ()
    assert found.why


def test_an_unknown_failure_leads_to_all_tests_that_are_not_off() -> None:
    assert set(choose_tests("a symptom of a later release").tests) == set(Diagnostic)
    assert set(choose_tests(Symptom.CRASH, off=["eud", "dcgm"]).tests) == set(Diagnostic) - {
        Diagnostic.EUD,
        Diagnostic.DCGM,
    }


def test_tests_of_one_machine_come_before_those_of_two() -> None:
    for row in ROWS:
        between = [test in BETWEEN_MACHINES for test in row.choice.tests]
        assert between == sorted(between)
        assert len(set(row.choice.tests)) == len(row.choice.tests)
