"""A loss that is NaN is detected, with the ranks that had it first. A rank without a loss is never blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.decisions.detect.job_facts import NOT_REPORTED, RankFacts, ReportedNumber
from everstep.decisions.detect.not_finite import find_not_finite
from everstep.model.incident import Anomaly, Symptom
from tests.everstep.decisions.detect.job_facts import POLICY, RANK, facts

GOOD = ReportedNumber(known=True)


def rank(number: int, loss: ReportedNumber = GOOD, *, step: int = 21, **more: Any) -> RankFacts:
    there = replace(RANK, rank=number, machine=f"m{number}", loss=loss, reported_step=step)
    return replace(there, **more)


def bad(since: int, steps: int = 1) -> ReportedNumber:
    return ReportedNumber(known=True, bad_steps=steps, since=since)


def found(*ranks: RankFacts, **more: Any) -> Anomaly | None:
    return find_not_finite(facts(ranks=list(ranks), **more))


def test_the_rank_that_had_it_first_is_named_with_its_machine() -> None:
    anomaly = found(rank(0, bad(21)), rank(1, bad(20, 2)))

    assert anomaly is not None
    assert (anomaly.symptom, anomaly.ranks, anomaly.machines, anomaly.not_after) == (
        Symptom.NOT_FINITE,
        [1],
        ["m1"],
        20,
    )
    assert anomaly.headline == "the loss is NaN or infinite since step 20, first on rank 1 on m1"


def test_a_nan_on_all_ranks_at_once_names_no_rank() -> None:
    anomaly = found(rank(0, bad(20)), rank(1, bad(20)), rank(2, NOT_REPORTED))

    assert anomaly is not None and (anomaly.ranks, anomaly.machines) == ([], [])
    assert "on all 2 ranks that report it, at once" in anomaly.headline


def test_the_only_rank_that_reports_a_loss_is_not_blamed_for_it() -> None:
    anomaly = found(rank(0, bad(20)), rank(1, NOT_REPORTED, step=-1))

    assert anomaly is not None and (anomaly.ranks, anomaly.machines) == ([], [])
    assert "rank 0 on m0, the only rank that reports it" in anomaly.headline


def test_ranks_that_have_not_reported_the_step_yet_are_waited_for() -> None:
    late = rank(1, step=19)

    assert found(rank(0, bad(20)), late) is None
    assert found(rank(0, bad(20)), late, quiet_s=6.0) is not None, "no rank steps any more, so no report will follow"
    assert found(rank(0, bad(20)), replace(late, alive=False)) is not None
    assert found(rank(0, bad(20)), replace(late, loss=NOT_REPORTED)) is not None, (
        "rank 1 reports no loss, so the rule does not wait for it"
    )


def test_a_rank_that_reports_few_steps_is_not_waited_for_and_then_no_rank_is_named() -> None:
    """Rank 1 reports only every 1000th step."""
    seldom = rank(1, step=0)
    for steps in (21, 28):
        both = [rank(0, bad(20, steps - 20), steps=steps), replace(seldom, steps=steps)]
        assert found(*both, quiet_s=0.2) is None, "the report of rank 1 may still arrive"
    anomaly = found(rank(0, bad(20, 9), steps=29), replace(seldom, steps=29), quiet_s=0.2)

    assert anomaly is not None and (anomaly.ranks, anomaly.machines, anomaly.not_after) == ([], [], 20)
    assert anomaly.headline.endswith(
        "on rank 0 on m0; the first rank is not known, since rank 1 on m1 did not report that step"
    )


def test_a_rank_that_is_far_behind_the_others_is_waited_for() -> None:
    assert found(rank(0, bad(20, 40), steps=60), rank(1, step=15, steps=16), quiet_s=0.2) is None


def test_ranks_of_a_silent_agent_are_not_waited_for_and_then_no_rank_is_named() -> None:
    anomaly = found(rank(0, bad(20)), rank(1, step=19), quiet_s=0.2, silent=["m1"])

    assert anomaly is not None and (anomaly.ranks, anomaly.machines) == ([], [])


@pytest.mark.parametrize("steps", [1, 2])
def test_a_gradient_norm_that_is_infinite_for_few_steps_is_no_anomaly(steps: int) -> None:
    """A gradient scaler skips steps with such a norm."""
    assert found(rank(0, grad_norm=bad(20, steps)), rank(1)) is None


def test_a_gradient_norm_that_stays_infinite_is_an_anomaly_and_the_earlier_value_counts() -> None:
    anomaly = found(rank(0, grad_norm=bad(18, 3)), rank(1, grad_norm=GOOD))
    assert anomaly is not None and anomaly.headline.startswith("the gradient norm is NaN or infinite since step 18")

    both = found(rank(0, bad(20), grad_norm=bad(19, 2)), rank(1, grad_norm=GOOD))
    assert both is not None and both.not_after == 19, (
        "the norm of step 19 was infinite, so its update may have spoilt the state"
    )


def test_the_policy_sets_the_number_of_steps_and_0_switches_the_rule_off() -> None:
    policy = POLICY.changed({"nan.loss_steps": 3, "nan.grad_norm_steps": 0})

    assert found(rank(0, bad(20, 2), grad_norm=bad(1, 900)), policy=policy) is None
    assert found(rank(0, bad(20, 3)), policy=policy) is not None


def test_a_nan_of_an_earlier_generation_is_not_reported() -> None:
    assert found(rank(0, bad(20)), newest=False) is None
    assert found(rank(0), rank(1)) is None
