"""Reports about a generation before its first step, and the checks of that step, on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.stop_ranks import StopRanks
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job_state import NOT_YET
from everstep.model.launch import Confirmation, Showing
from everstep.model.ranks import Ranks
from everstep.model.stage import NOT_CONFIRMED
from tests.rank_ends import exited
from tests.workflows.conftest import anomaly
from workflows.job import JobWorkflow

Answer = Callable[[ConfirmSteps], Any]


def stepped(given: ConfirmSteps) -> Confirmation:
    return Confirmation(
        generation=given.launched.generation,
        ok=True,
        reason="all stepped",
        stepped_ns=time.time_ns(),
        completed_steps=9,
    )


def lives(given: ConfirmSteps) -> Confirmation:
    return Confirmation(
        generation=given.launched.generation,
        ok=True,
        confirmed=False,
        reason="all 2 ranks live for 10 s; no step was shown",
        stepped_ns=time.time_ns(),
    )


def hangs(given: ConfirmSteps) -> Confirmation:
    return Confirmation(generation=given.launched.generation, ok=False, timed_out=True, reason="no step within 600 s")


def fails(given: ConfirmSteps) -> Confirmation:
    raise ApplicationError("the worker had a bad day", non_retryable=True)


async def waits(given: ConfirmSteps) -> Confirmation:
    await asyncio.sleep(3600)
    raise AssertionError


def answers(*each: Answer) -> Answer:
    """Return a function that gives one answer after the other, and then always the last one."""
    left = list(each)

    def answer(given: ConfirmSteps) -> Any:
        return (left.pop(0) if len(left) > 1 else left[0])(given)

    return answer


async def refused(handle: Any, seen: Anomaly) -> bool:
    """Return whether the job refuses a report for now."""
    try:
        await handle.execute_update(JobWorkflow.report, seen, id=f"report-{seen.generation}")
    except WorkflowUpdateFailedError as error:
        assert isinstance(error.cause, ApplicationError)
        return error.cause.type == NOT_YET
    return False


async def test_what_is_seen_of_a_generation_before_its_first_step_opens_nothing(jobs: Any) -> None:
    """Otherwise a hang that was seen during a recovery would open an incident as soon as the recovery is over."""
    step = asyncio.Event()

    async def slow(given: ConfirmSteps) -> Confirmation:
        await step.wait()
        return stepped(given)

    jobs.cluster.confirmation = answers(stepped, slow, stepped)
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly(1))
    while "confirm 2" not in jobs.cluster.calls:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)

    for symptom in (Symptom.HANG, Symptom.UNSAVED):
        assert await refused(handle, anomaly(2, symptom=symptom))
    step.set()
    state = await jobs.until_runs(handle, 2)
    assert len(state.incidents) == 1
    assert state.pending == []

    # The same id again: the earlier refusal must not be repeated as the answer.
    assert not await refused(handle, anomaly(2, symptom=Symptom.HANG))
    state = await jobs.until(handle, lambda state: state.generation == 3 and state.status == "running")
    assert len(state.incidents) == 2


async def test_before_the_first_step_of_all_a_hang_opens_nothing_and_a_crash_does(jobs: Any) -> None:
    jobs.cluster.confirmation = answers(waits, stepped)
    handle = await jobs.start()
    while "confirm 1" not in jobs.cluster.calls:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)

    assert await refused(handle, anomaly(1, symptom=Symptom.HANG))
    assert not await refused(handle, anomaly(1))
    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")
    assert len(state.incidents) == 1


async def test_a_first_launch_that_nobody_could_confirm_is_asked_about_again(jobs: Any) -> None:
    jobs.cluster.confirmation = answers(fails, fails, stepped)
    handle = await jobs.start()

    state = await jobs.until(handle, lambda state: state.status == "running")

    assert jobs.cluster.calls.count("confirm 1") == 3
    assert state.incidents == []
    assert state.first_step_s > 0


async def test_a_hang_is_noticed_though_nobody_could_say_so_at_first(jobs: Any) -> None:
    jobs.cluster.confirmation = answers(fails, hangs, stepped)
    handle = await jobs.start()

    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")

    assert jobs.cluster.notes[0].anomaly.symptom is Symptom.HANG
    assert len(state.incidents) == 1


@pytest.mark.parametrize(("silent", "launches"), [(2, 2), (10, 3)])
async def test_a_restart_is_not_stopped_because_nobody_could_say_whether_it_steps(
    jobs: Any, silent: int, launches: int
) -> None:
    """It is stopped only after many checks without a result."""
    jobs.cluster.confirmation = answers(stepped, *[fails] * silent, stepped)
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly(1))

    state = await jobs.until(handle, lambda state: state.generation > 1 and state.status == "running")

    assert state.generation == launches
    assert jobs.cluster.calls.count("confirm 2") == min(silent + 1, 10)
    assert len(state.incidents) == 1


async def test_waiting_for_the_first_step_goes_on_in_the_next_run(jobs: Any) -> None:
    jobs.cluster.confirmation = answers(waits, hangs, stepped)
    handle = await jobs.start()
    while "confirm 1" not in jobs.cluster.calls:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    first_run = (await handle.describe()).run_id
    latest = jobs.client.get_workflow_handle_for(JobWorkflow.run, handle.id)
    for _ in range(60):  # the signals make the history long
        await latest.signal(JobWorkflow.stop, "nonsense")

    state = await jobs.until(latest, lambda state: state.generation == 2 and state.status == "running")

    assert (await latest.describe()).run_id != first_run
    assert [one.number for one in state.incidents] == [1]
    first, again = jobs.cluster.confirms[:2]
    assert again.timeout_s < first.timeout_s == 1800.0, "the next run waits only for the rest of the time"


async def test_a_script_that_shows_nothing_is_running_and_not_confirmed_until_it_steps(jobs: Any) -> None:
    step = asyncio.Event()

    async def later(given: ConfirmSteps) -> Confirmation:
        await step.wait()
        return stepped(given)

    jobs.cluster.confirmation = answers(lives, later)
    handle = await jobs.start()
    state = await jobs.until(handle, lambda state: state.status == "running")
    assert (state.status_text, state.first_step_s) == (NOT_CONFIRMED, 0.0)
    assert f"{NOT_CONFIRMED}: all 2 ranks live" in await jobs.page(handle)
    while len(jobs.cluster.confirms) < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    assert jobs.cluster.confirms[1].known_alive
    step.set()

    state = await jobs.until(handle, lambda state: state.status_text == "running")
    assert state.first_step_s > 0
    assert NOT_CONFIRMED not in await jobs.page(handle)


async def test_what_never_shows_a_step_stays_not_confirmed_and_ends_well(jobs: Any) -> None:
    jobs.cluster.confirmation = lives
    handle = await jobs.start()
    await jobs.until(handle, lambda state: state.status == "running" and not state.confirm_by_ns)

    await handle.execute_update(JobWorkflow.finished, 1)

    assert (await handle.result()).outcome == "finished"
    assert jobs.cluster.calls.count("confirm 1") == 2


def never_stepped(given: StopRanks) -> Evidence:
    raised = {"code": 1, "exception": "ValueError: bad data", "time_ns": time.time_ns()}
    return Evidence(
        generation=given.generation,
        exits=[
            exited(rank=1, machine="m1", shown_steps=0, **raised),
            RankExit(rank=0, machine="m0", signal=9, stopped_by_us=True, shown_steps=0),
        ],
    )


async def test_a_fault_before_any_step_parks_though_the_ranks_lived_for_a_while_each_time(jobs: Any) -> None:
    """For example, imports are slow: each restart lives long enough to count as running, but not confirmed."""
    jobs.cluster.confirmation = lives
    jobs.cluster.evidence = never_stepped
    handle = await jobs.start(retry={"max_failures_at_step": 3})
    for generation in (1, 2, 3):
        state = await jobs.until(
            handle, lambda state, g=generation: state.generation == g and state.status == "running"
        )
        await handle.execute_update(JobWorkflow.report, anomaly(generation))
    state = await jobs.until(handle, lambda state: state.status == "parked")

    first = state.incidents[0]
    assert (first.resolution, first.confirmed, first.seconds) == (NOT_CONFIRMED, False, None)
    assert first.headline.startswith("Running, not confirmed, by reattempt: rank 1 on m1 raised ValueError")
    assert "failed 3 times before any step was shown (ValueError)" in jobs.cluster.notes[-1].text
    assert not any("Recovered" in note.text for note in jobs.cluster.notes)


async def test_what_the_script_showed_and_how_long_its_start_took_is_known_to_later_restarts(jobs: Any) -> None:
    def shown(given: ConfirmSteps) -> Confirmation:
        return stepped(given).model_copy(update={"showing": Showing(kind="calls", silent=Ranks.of([1]))})

    jobs.cluster.confirmation = shown
    jobs.cluster.evidence = lambda given: Evidence(generation=given.generation, emptied=["m1"])
    handle = await jobs.start(confirm={"timeout_s": 0.05, "factor": 1000.0})
    # The job is running as soon as it is launched, but the time of its first step is known only after that step.
    state = await jobs.until(handle, lambda state: state.status == "running" and state.first_step_s > 0)
    await handle.execute_update(JobWorkflow.report, anomaly(1))
    await jobs.until_runs(handle, 2)

    restart = jobs.cluster.confirms[-1]
    assert restart.showing == Showing(kind="calls", silent=Ranks.of([1]))
    assert restart.timeout_s == pytest.approx(1000 * state.first_step_s)
