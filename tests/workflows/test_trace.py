"""A hung job is sampled before it is stopped. The server is real, and each task executes a workflow from its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.agents.stop_ranks import StopRanks
from activities.agents.trace_ranks import TraceRanks
from everstep.model.evidence import Evidence
from everstep.model.hang import HangResult
from everstep.model.incident import Symptom
from everstep.model.machine import Machine
from everstep.model.stage import Stage
from tests.workflows.conftest import anomaly, held
from workflows.job import JobWorkflow

STANDBYS = [Machine(name="m2", address="127.0.0.13:1"), Machine(name="m3", address="127.0.0.14:1")]
REASON = "rank 1 on m1: 1 rank waits for it; it waits for no rank: step > acquire (other)"


def stopped(given: StopRanks) -> Evidence:
    """Answer that all ranks were ended by the stop."""
    return Evidence(generation=given.generation, held=held(20))


def named(*machines: str, conclusion: str = "names") -> Callable[[TraceRanks], HangResult]:
    """Answer a trace with a result that names these machines."""
    return lambda given: HangResult(
        generation=given.generation,
        conclusion=conclusion,
        method="wait-for graph",
        reason=REASON,
        ranks=[1],
        machines=[*machines],
        suspects=["m1"],
        innocent=max(len(machines) - 1, 0) if conclusion == "over-evicts" else 0,
        picture="dp 0\n  A [B]",
        looks=2,
    )


async def hung(jobs: Any, traced: Callable[[TraceRanks], HangResult], **policy: object) -> Any:
    jobs.cluster.evidence, jobs.cluster.traced = stopped, traced
    handle = await jobs.running(**{"silence": {"evict_s": 0.0}, **policy})
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=Symptom.HANG))
    return handle


async def steps_again(jobs: Any, handle: Any) -> Any:
    return await jobs.until_runs(handle, 2)


@pytest.mark.history("incident-hung")
async def test_the_named_machine_leaves_before_the_next_launch(jobs: Any) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    state = await steps_again(jobs, await hung(jobs, named("m1")))

    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    calls = jobs.cluster.calls
    assert calls.index("trace 1") < calls.index("stop 1") < calls.index("replace m1") < calls.index("launch 2 from 20")
    report = jobs.report
    assert (report.resolution, report.evicted, next(stage.name for stage in report.timings)) == (
        "eviction",
        ["m1"],
        Stage.TRACE,
    )
    assert report.hang and report.hang.reason == REASON
    assert [(answer.rule, answer.machine) for answer in report.asked if answer.yes] == [("hang-culprit", "m1")]
    [note] = [note for note in jobs.cluster.notes if note.stage == Stage.TRACE]
    assert note.text == f"names: {REASON}"
    assert report.hang.picture.splitlines()[-1] == "  A [B]", "the ledger has the picture"
    assert report.headline.endswith(f"rank 1 on m1 ended by SIGKILL: {REASON}")


async def test_over_eviction_is_reported_as_over_eviction(jobs: Any) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    state = await steps_again(jobs, await hung(jobs, named("m0", "m1", conclusion="over-evicts")))
    assert sorted(machine.name for machine in state.machines) == ["m2", "m3"]
    assert {answer.rule for answer in jobs.report.asked if answer.yes} == {"hang-group"}
    assert all("over-eviction, 1 of 2 machines" in answer.why for answer in jobs.report.asked if answer.yes)


async def test_without_a_standby_the_job_does_not_wait_for_one(jobs: Any) -> None:
    """A restart may be enough, since not every hang is caused by a machine."""
    state = await steps_again(jobs, await hung(jobs, named("m1")))
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    report = jobs.report
    assert report.resolution == "reattempt"
    assert any("the job is tried again with them" in stage.found for stage in report.timings)


async def test_a_breaker_that_a_hang_trips_tells_an_operator_and_does_not_park_the_job(jobs: Any) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    over_evicts = named("m0", "m1", conclusion="over-evicts")
    state = await steps_again(jobs, await hung(jobs, over_evicts, evict={"share": 0.0, "at_least": 1}))
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert jobs.report.resolution == "reattempt"
    assert "2 machines of 2 would be evicted" in next(one.why for one in jobs.report.asked if one.rule == "breaker")


def fails(given: TraceRanks) -> HangResult:
    raise ApplicationError("no worker can look", non_retryable=True)


@pytest.mark.parametrize(
    "traced",
    [named(conclusion="not a machine"), named(conclusion="nothing known"), fails],
    ids=["script", "?", "fails"],
)
async def test_without_a_named_machine_the_job_is_launched_again_as_it_is(
    jobs: Any, traced: Callable[[TraceRanks], HangResult]
) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    state = await steps_again(jobs, await hung(jobs, traced))
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert jobs.report.resolution == "reattempt"


async def test_a_trace_that_does_not_end_is_given_up(jobs: Any) -> None:
    jobs.cluster.blocked.add("trace 1")
    state = await steps_again(jobs, await hung(jobs, named("m1"), hang={"trace_s": 0.5}))
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    [stage] = [stage for stage in jobs.report.timings if stage.name == Stage.TRACE]
    assert stage.found.startswith("failed")


@pytest.mark.parametrize(("symptom", "trace_s"), [(Symptom.CRASH, 20.0), (Symptom.HANG, 0.0)])
async def test_a_crash_is_not_traced_and_tracing_can_be_turned_off(jobs: Any, symptom: Symptom, trace_s: float) -> None:
    jobs.cluster.traced = named("m1")
    handle = await jobs.running(hang={"trace_s": trace_s})
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=symptom))
    await steps_again(jobs, handle)
    assert "trace 1" not in jobs.cluster.calls


async def test_samples_of_another_generation_evict_no_machine(jobs: Any) -> None:
    """The samples are of generation 7, which does not hang. So no machine leaves."""
    jobs.cluster.standbys = list(STANDBYS)
    handle = await hung(jobs, lambda given: named("m1")(given).model_copy(update={"generation": 7}))
    state = await steps_again(jobs, handle)
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
