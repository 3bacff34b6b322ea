"""Idle machines get the code of jobs: each version once, on few machines at a time, and never on machines of a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.pool import ready
from everstep.decisions.pool.ready import differing
from everstep.model.machine import Machine
from everstep.model.pool import PollAnswers, PoolMachine, PoolPlace, PoolState, ReadyResult, RunningJob

IDLE = {PoolPlace.STANDBY, PoolPlace.FREE}
MACHINES = st.lists(
    st.builds(
        lambda place, fault, uncleaned: (place, fault, uncleaned),
        st.sampled_from(list(PoolPlace)),
        st.sampled_from(["", "xid-79"]),
        st.booleans(),
    ),
    max_size=40,
)
JOBS = st.lists(
    st.builds(
        lambda number, settled, version: RunningJob(
            job=f"job-{number}", run="r", machines=[], settled=settled, version=version
        ),
        st.integers(0, 30),
        st.booleans(),
        st.sampled_from(["", *(f"v{number}" for number in range(20))]),
    ),
    max_size=20,
    unique_by=lambda job: job.job,
)


def pool(machines: list[tuple[PoolPlace, str, bool]]) -> PoolState:
    return PoolState(
        machines={
            f"m{number}": PoolMachine(
                machine=Machine(name=f"m{number}", address=f"a{number}"), place=place, fault=fault, uncleaned=uncleaned
            )
            for number, (place, fault, uncleaned) in enumerate(machines)
        }
    )


@given(machines=MACHINES, jobs=JOBS)
def test_checks_end_and_only_idle_machines_are_asked(
    machines: list[tuple[PoolPlace, str, bool]], jobs: list[RunningJob]
) -> None:
    state, looked, asked = pool(machines), PollAnswers(jobs=jobs), set[tuple[str, str]]()
    settled = {job.version for job in jobs if job.settled and job.version}
    for _ in range(10):
        requests = ready.wanted(state, looked)
        for request in requests:
            assert request.version in settled
            assert 0 < len(request.machines) <= ready.MACHINES
            for machine in request.machines:
                one = state.machines[machine.name]
                assert (one.place in IDLE, one.fault, one.uncleaned) == (True, "", False)
            names = {machine.name for machine in request.machines}
            asked |= {(name, request.version) for name in names}
            ready.apply(state, request, ReadyResult(machines=dict.fromkeys(names, "")))
        if not requests:
            break
    assert ready.wanted(state, looked) == []
    assert all(len(one.ready) <= ready.KEPT for one in state.machines.values())
    fit = [name for name, one in state.machines.items() if one.place in IDLE and not one.fault and not one.uncleaned]
    if sum(job.settled and job.version != "" for job in jobs) <= ready.KEPT:
        assert asked == {(name, version) for name in fit for version in settled}


def test_standbys_come_first_and_a_machine_that_did_not_answer_is_asked_again() -> None:
    state = pool([(PoolPlace.FREE, "", False)] * ready.MACHINES + [(PoolPlace.STANDBY, "", False)])
    looked = PollAnswers(jobs=[RunningJob(job="gpt", run="r", machines=[], settled=True, version="v1")])
    [request] = ready.wanted(state, looked)
    assert request.machines[0].name == f"m{ready.MACHINES}"
    ready.apply(state, request, ReadyResult(machines={"m0": "no room"}))
    [again] = ready.wanted(state, looked)
    assert "m0" not in {machine.name for machine in again.machines}
    assert len(again.machines) == ready.MACHINES
    assert state.machines["m0"].ready == {"v1": "gpt: no room"}


def test_an_impossible_check_is_not_repeated_for_ever() -> None:
    state = pool([(PoolPlace.STANDBY, "", False)])
    looked = PollAnswers(jobs=[RunningJob(job="gpt", run="r", machines=[], settled=True, version="v1")])
    [request] = ready.wanted(state, looked)
    ready.apply(state, request, ready.failed(request, "there is no store"))
    assert ready.wanted(state, looked) == []


HERE = {"python": "3.11.9", "torch": "2.9.1"}


@pytest.mark.parametrize(
    ("elsewhere", "said"),
    [
        ([HERE], ""),
        ([], ""),
        ([{}], ""),
        ([{"numpy": "2.3.0"}], ""),
        ([{"torch": "2.8.0"}, HERE], ""),
        ([HERE | {"torch": "2.8.0"}], "torch 2.9.1 instead of 2.8.0"),
        (
            [{"torch": "2.8.0", "python": "3.12.1"}, {"torch": "2.7.1"}],
            "python 3.11.9 instead of 3.12.1, torch 2.9.1 instead of 2.7.1 or 2.8.0",
        ),
    ],
)
def test_a_difference_from_all_other_machines_is_named(elsewhere: list[dict[str, str]], said: str) -> None:
    assert differing(HERE, elsewhere) == said
