"""A silent machine counts as lost only if no rank steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.detect.job_facts import JobFacts
from everstep.decisions.detect.lost_machine import find_silent_machine
from everstep.decisions.detect.step_watch import StepWatch
from everstep.model.incident import Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from tests.everstep.decisions.detect.job_facts import RANK, S, facts, seen

POLICY = RecoveryPolicy(silence={"detect_s": 10})


def silent(quiet_s: float = 12.0, longest_step_s: float = 1.0, m1_s: float = 12.0, m0_s: float = 0.0) -> JobFacts:
    return facts(
        policy=POLICY, quiet_s=quiet_s, longest_step_s=longest_step_s, unheard_s={"m0": m0_s, "m1": m1_s}, last_step=7
    )


def test_agent_and_ranks_are_silent() -> None:
    found = find_silent_machine(silent())
    assert found is not None
    assert (found.symptom, found.machines, found.quiet_s) == (Symptom.MACHINE_SILENT, ["m1"], 12.0)
    assert found.headline == "no answer of m1, and no rank completed a step for 12 s"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (silent(quiet_s=0.5), "the ranks step, so the machine works"),
        (silent(m1_s=9.0), "its agent answered a moment ago"),
        (silent(m0_s=12.0), "all machines are silent: the watcher may be cut off"),
        (silent(longest_step_s=0.0), "no step was seen yet"),
        (silent(longest_step_s=30.0), "pauses were as long before, e.g. of an evaluation"),
    ],
)
def test_a_silent_machine_is_not_reported(seen: JobFacts, why: str) -> None:
    assert find_silent_machine(seen) is None, why


@pytest.mark.parametrize(("quiet_s", "code", "opens"), [(12.0, 0, False), (61.0, 0, True), (12.0, 1, True)])
def test_if_the_other_ranks_ended_with_success_the_job_may_be_over(quiet_s: float, code: int, opens: bool) -> None:
    named = replace(silent(quiet_s=quiet_s), exits={0: seen(0, finished=True, code=code)}, machine_names=("m0", "m1"))
    assert (find_silent_machine(named) is not None) is opens


@pytest.mark.parametrize(
    ("unheard_s", "others_answer", "opens"), [(31.0, True, True), (29.0, True, False), (31.0, False, False)]
)
def test_the_only_machine_of_a_job_is_lost_if_others_answer(unheard_s: float, others_answer: bool, opens: bool) -> None:
    only = facts(
        world_size=1,
        policy=POLICY,
        quiet_s=unheard_s,
        longest_step_s=1.0,
        unheard_s={"m0": unheard_s},
        others_answer=others_answer,
    )
    assert (find_silent_machine(only) is not None) is opens


def test_a_silent_machine_of_an_older_generation_is_not_reported() -> None:
    assert (
        find_silent_machine(facts(policy=POLICY, newest=False, quiet_s=99, longest_step_s=1, unheard_s={"m1": 99.0}))
        is None
    )


@given(pauses=st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_the_longest_pause_is_remembered(pauses: list[int]) -> None:
    watch, now, steps = StepWatch(world_size=1), 0, 1
    watch.observe([RANK], 0)
    for pause in pauses:
        for _ in range(pause):
            now += 1
            watch.observe([replace(RANK, steps=steps)], now * S)
        steps += 1
    assert watch.longest_s <= max(pauses)
    if len(pauses) > 1:
        assert watch.longest_s >= max(pauses[1:-1], default=0)
