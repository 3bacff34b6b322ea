"""A slow job is sampled while it continues. The server is real, and each task executes a workflow from its start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.agents.stop_ranks import StopRanks
from activities.agents.vote_round import VoteRound
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job_state import RUNNING_SLOW
from everstep.model.machine import Machine
from everstep.model.slow import SlowRound
from everstep.model.stage import Stage
from tests.workflows.conftest import anomaly, held
from workflows.job import JobWorkflow

STANDBYS = [Machine(name="m2", address="127.0.0.13:1")]
SLOW = Anomaly(
    id="slow-1",
    generation=1,
    symptom=Symptom.SLOW,
    headline="steps take 0.2 s since step 320, 0.1 s before",
    seen_ns=time.time_ns(),
)
ROUNDS = [f"round {number}" for number in range(1, 6)]


def flagged(growth: str, *, silent: int = 0) -> Callable[[VoteRound], SlowRound]:
    """Answer that each round flags m1, except for the first ``silent`` rounds, which fail."""

    def voted(given: VoteRound) -> SlowRound:
        if given.number <= silent:
            raise ApplicationError("no worker can look", non_retryable=True)
        return SlowRound(
            number=given.number,
            looks=10,
            outliers=[1],
            flagged="m1",
            machines=["m1"],
            ranks=[1],
            longer={"m1": growth},
            why=[f"m1: {growth}"],
        )

    return voted


def stopped(given: StopRanks) -> Evidence:
    """Answer that all ranks were ended by the stop."""
    exits = [
        RankExit(rank=rank, machine=f"m{rank}", signal=9, stopped_by_us=True, completed_steps=20) for rank in (0, 1)
    ]
    return Evidence(generation=given.generation, exits=exits, held=held(20))


async def slow(jobs: Any, voted: Callable[[VoteRound], SlowRound] | None = None, **policy: object) -> Any:
    jobs.cluster.evidence, jobs.cluster.standbys = stopped, list(STANDBYS)
    if voted is not None:
        jobs.cluster.voted = voted
    handle = await jobs.running(**policy)
    assert await handle.execute_update(JobWorkflow.observe, SLOW) == "accepted"
    return handle


async def closed(jobs: Any, handle: Any, count: int = 1) -> tuple[Any, IncidentReport]:
    state = await jobs.until(
        handle, lambda one: sum(bool(found.resolution) for found in one.incidents) == count and one.status == "running"
    )
    reports = [note.report for note in jobs.cluster.notes if note.report]
    return state, reports[-1]


@pytest.mark.history("incident-slow")
async def test_a_slow_machine_leaves_and_no_step_is_lost(jobs: Any) -> None:
    handle = await slow(jobs, flagged("no CPU"))
    state, report = await closed(jobs, handle)

    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    calls = jobs.cluster.calls
    order = [*ROUNDS, "replace m1", "prepare m2", "align 1", "stop 1", "launch 2 from 20", "confirm 2"]
    assert list(dict.fromkeys(call for call in calls if call in order)) == order
    assert (report.resolution, report.evicted, report.lost_steps, state.generation) == ("eviction", ["m1"], 0, 2)
    assert [(answer.rule, answer.machine) for answer in report.asked if answer.yes] == [("slow-machine", "m1")]
    assert report.slow is not None and report.slow.machines == ["m1"]
    assert report.slow.reason == "m1 has most slow ranks in 5 of 5 rounds. m1: no CPU"
    assert [note.text for note in jobs.cluster.notes if note.stage == Stage.VOTE] == [f"machine: {report.slow.reason}"]
    assert "m1 has most slow ranks" in report.headline


async def test_the_page_shows_the_rounds_as_they_end(jobs: Any) -> None:
    jobs.cluster.blocked.add("round 3")
    handle = await slow(jobs, flagged("no CPU"), slow={"round_s": 60.0})  # a round may last while the page is read
    state = await jobs.until(handle, lambda _: "round 3" in jobs.cluster.calls)
    incident = jobs.client.get_workflow_handle(state.incidents[0].id)

    page = (await jobs.page(incident)).splitlines()
    assert page[0] == f"## vote: round 3 of 5: {SLOW.headline}"
    rounds = [f"round {number}, 10 samples: m1 has the flag, slow ranks: 1" for number in range(1, 6)]
    assert [line for line in page if line.startswith("round ")] == rounds[:2]

    jobs.cluster.blocked.clear()
    await closed(jobs, handle)
    assert [line for line in (await jobs.page(incident)).splitlines() if line.startswith("round ")] == rounds


@pytest.mark.parametrize(
    ("voted", "policy", "conclusion"),
    [
        (None, {}, "waiting"),
        (flagged("longer"), {}, "suspect"),
        (flagged("always"), {}, "uneven work"),
        (flagged("no CPU", silent=3), {}, "nothing known"),
        (flagged("no CPU"), {"evict": {"rules": {"slow-machine": "shadow"}}}, "machine"),
        (flagged("no CPU"), {"evict": {"rules": {"slow-machine": "approve"}}}, "machine"),
        (flagged("no CPU"), {"evict": {"share": 0.0, "at_least": 0}}, "machine"),
    ],
    ids=["nobody", "suspect", "uneven", "blind", "shadow", "approve", "breaker"],
)
async def test_if_no_machine_may_leave_the_job_continues_and_is_not_sampled_again_soon(
    jobs: Any, voted: Callable[[VoteRound], SlowRound] | None, policy: dict[str, object], conclusion: str
) -> None:
    handle = await slow(jobs, voted, **policy)
    state, report = await closed(jobs, handle)

    assert (report.resolution, report.evicted, state.generation, state.incidents[0].lost_steps) == (
        "observed",
        [],
        1,
        0,
    )
    assert not {"stop 1", "replace m1", "align 1"} & set(jobs.cluster.calls)
    assert report.slow is not None and report.slow.conclusion == conclusion
    assert report.headline.startswith(f"Observed, the job continues: {SLOW.headline}; {conclusion}: ")
    assert await handle.execute_update(JobWorkflow.observe, SLOW.model_copy(update={"id": "2"})) == "already reported"


async def test_a_rank_that_dies_during_a_vote_does_not_wait_for_its_end(jobs: Any) -> None:
    jobs.cluster.blocked.add("round 2")
    handle = await slow(jobs)
    state = await jobs.until(handle, lambda _: "round 2" in jobs.cluster.calls)
    assert state.status_text == RUNNING_SLOW
    await handle.execute_update(JobWorkflow.report, anomaly())
    state, report = await closed(jobs, handle, 2)

    assert [one.resolution for one in state.incidents] == ["observed", "reattempt"]
    assert (state.generation, report.failures[0].symptom) == (2, Symptom.CRASH)
    assert "round 3" not in jobs.cluster.calls


async def test_a_job_that_finishes_or_is_stopped_during_a_vote_ends(jobs: Any) -> None:
    jobs.cluster.blocked.add("round 1")
    handle = await slow(jobs)
    await jobs.until(handle, lambda _: "round 1" in jobs.cluster.calls)
    await handle.execute_update(JobWorkflow.finished, 1)
    assert (await handle.result()).outcome == "finished"

    handle = await slow(jobs)
    await jobs.until(handle, lambda _: jobs.cluster.calls.count("round 1") == 2)
    await handle.signal(JobWorkflow.stop, {"operator": "test"})
    assert (await handle.result()).outcome == "stopped"


async def test_without_a_replacement_the_slow_machine_stays(jobs: Any) -> None:
    jobs.cluster.evidence, jobs.cluster.voted = stopped, flagged("no CPU")
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.observe, SLOW)
    state, report = await closed(jobs, handle)
    assert (report.resolution, state.generation) == ("observed", 1)
    assert "stop 1" not in jobs.cluster.calls
