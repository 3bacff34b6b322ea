"""The next incident of a job after an incident was closed from outside, for example because it was terminated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.recover.reopen import LONGEST_S, hold_reason, newest_begin, newest_generation, reopen_wait_s
from everstep.decisions.act.recover.rules import RestartFacts, decide
from everstep.decisions.keep.lineage import extended, usable
from everstep.model.evidence import Evidence
from everstep.model.incident import Failure, Left, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopies

LAUNCHES = st.lists(st.integers(0, 100), max_size=5)


@given(st.integers(1, 1000), LAUNCHES)
def test_no_generation_that_was_launched_is_launched_again(generation: int, steps: list[int]) -> None:
    launches = [(generation + 1 + position, step) for position, step in enumerate(steps)]
    left = Left(how="terminated", launches=launches, resume_step=steps[-1] if steps else -1)

    newest = newest_generation(generation, left)

    assert all(newest + 1 > launched for launched, _ in [*launches, (generation, 0)])
    assert newest_begin(7, left) == (steps[-1] if steps else 7)


def test_steps_that_a_closed_incident_launched_are_used() -> None:
    left = Left(how="terminated", launches=[(2, 20), (3, 20)], resume_step=20)
    lineage = extended([(1, -1)], left.launches)
    copies = [StateCopies.one(rank=0, machine="m0", completed_steps=step, generation=3) for step in (20, 24)]

    assert usable(copies, lineage) == copies


def test_the_launches_of_a_deleted_incident_are_not_known_and_their_steps_are_not_used() -> None:
    left = Left(how="deleted", known=False)
    lineage = extended([(1, -1)], [*left.launches, (newest_generation(1, left) + 1, 20)])
    known, unknown = (StateCopies.one(rank=0, machine="m0", completed_steps=20, generation=one) for one in (1, 3))
    beyond = StateCopies.one(rank=0, machine="m0", completed_steps=22, generation=3)

    assert newest_generation(1, left) > 100
    assert known in usable([known, unknown, beyond], lineage)
    assert beyond not in usable([known, unknown, beyond], lineage)
    assert hold_reason("incident/gpt/0001", left).startswith("incident/gpt/0001 was deleted; its history is gone")


@given(st.integers(0, 10_000))
def test_the_wait_grows_to_a_limit_and_the_first_incident_does_not_wait(closed: int) -> None:
    assert 0 <= reopen_wait_s(closed) <= reopen_wait_s(closed + 1) <= LONGEST_S
    assert reopen_wait_s(1) == 0
    assert reopen_wait_s(2) > 0


def test_an_incident_after_a_closed_one_waits_for_an_operator() -> None:
    failure = Failure(generation=1, step=20, symptom=Symptom.CRASH, cause="SIGKILL")
    facts = RestartFacts(
        failure=failure,
        history=(),
        attempts=0,
        evidence=Evidence(generation=1),
        restore_step=20,
        world_size=2,
        needs_operator="incident/gpt/0001 was terminated by ada",
    )

    decision = decide(facts, RecoveryPolicy())

    assert (decision.rule, decision.text) == ("operator-must-decide", facts.needs_operator)
