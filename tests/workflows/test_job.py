"""A job and its incidents, on a real server. Each workflow task replays the history from the start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.service import RPCError

from activities import write_to_ledger
from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.stop_ranks import StopRanks
from activities.ledger.records import NumbersUsed
from activities.write_to_ledger import ON_LEDGER_WHEN_BACK
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job_state import incident_workflow_id
from everstep.model.launch import Confirmation
from everstep.model.state_copy import StateCopies
from tests.workflows.asking import asked
from tests.workflows.conftest import exits, held
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow


def anomaly(generation: int = 1) -> Anomaly:
    return Anomaly(
        id=f"m1-{generation}",
        generation=generation,
        symptom=Symptom.CRASH,
        headline="rank 1 on m1 ended by SIGKILL",
        seen_ns=time.time_ns(),
    )


def failed(given: ConfirmSteps) -> Confirmation:
    return Confirmation(generation=given.launched.generation, ok=False, reason="rank 1 ended before its first step")


async def test_a_job_launches_waits_for_its_end_and_gives_everything_back(jobs: Any) -> None:
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.finished, 1)

    result = await handle.result()

    assert result.outcome == "finished"
    assert jobs.cluster.calls == ["prepare", "launch 1 from -1", "confirm 1", "release"]


async def test_a_job_whose_history_was_taken_back_learns_what_runs(jobs: Any) -> None:
    """Its workflow was reset, or Temporal's database is an older one. Meanwhile incidents launched generation 4."""
    copies = [copy.model_copy(update={"generation": generation}) for generation in (2, 4) for copy in held(20)]
    jobs.cluster.evidence = lambda given: Evidence(generation=given.generation, exits=exits(20), held=copies)
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly(4))
    state = await jobs.until_runs(handle, 5)
    assert (state.resume_step, [incident.number for incident in state.incidents]) == (20, [4])
    calls = [call for call in jobs.cluster.calls if call.startswith(("stop", "launch"))]
    assert calls[1:] == ["stop 4", "launch 5 from 20"]
    await handle.execute_update(JobWorkflow.finished, 6)
    assert (await handle.result()).outcome == "finished"


@pytest.mark.history("job-crash")
async def test_a_crash_is_one_incident_and_one_restart(jobs: Any) -> None:
    handle = await jobs.running()
    answers = await asyncio.gather(
        *(handle.execute_update(JobWorkflow.report, anomaly(), id=id) for id in ("report-1", "report-1", "other"))
    )
    state = await jobs.until_runs(handle, 2)

    assert len(set(answers)) == 2  # equal ids get one answer; the other id is late
    assert [one.resolution for one in state.incidents] == ["reattempt"]
    assert state.incidents[0].lost_steps == 0
    assert [call for call in jobs.cluster.calls if "launch" in call] == ["launch 1 from -1", "launch 2 from 20"]
    assert "handled" in await handle.execute_update(
        JobWorkflow.report, anomaly(1)
    )  # a report about an old generation changes nothing
    assert [note.stage for note in jobs.cluster.notes] == ["decide", "closed"]
    await handle.signal(JobWorkflow.stop, {"operator": "test"})
    assert (await handle.result()).outcome == "stopped"


async def test_a_fault_of_a_generation_that_an_incident_launched_is_not_lost(jobs: Any) -> None:
    """The generation that an incident launched may fail before the job knows that the incident is over."""
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly(1))
    await handle.execute_update(JobWorkflow.report, anomaly(2))

    state = await jobs.until(handle, lambda state: state.generation == 3 and state.status == "running")

    assert len(state.incidents) == 2
    assert state.pending == []


async def test_the_same_step_again_and_again_parks_and_an_operator_decides(jobs: Any) -> None:
    jobs.cluster.confirmation = failed
    handle = await jobs.start(retry={"max_failures_at_step": 3, "max_attempts": 10})
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(incident_workflow_id(state.spec.name, 1))

    parked = [note.text for note in jobs.cluster.notes if note.text.startswith("park: ")]
    assert parked and parked[-1].startswith("park: failed 3 times at step 20")
    launches = [call for call in jobs.cluster.calls if "launch" in call]
    assert launches == ["launch 1 from -1", "launch 2 from 20", "launch 3 from 20"]

    await incident.signal("resume", "nonsense")
    await incident.signal("resume", {"operatr": "me"})
    await asyncio.sleep(0.3)
    assert (await handle.query(JobWorkflow.current_state)).status == "parked"

    await incident.signal("resume", {"operator": "ada", "note": "mended the data"})
    jobs.cluster.confirmation = type(jobs.cluster).confirmation
    state = await jobs.until_runs(handle, 4)
    assert state.incidents[0].resolution == "resumed by operator"
    assert "ada (mended the data)" in " ".join((await incident.result())["stages"])


async def test_a_machine_that_comes_back_without_its_memory_is_judged_like_any_other_loss(jobs: Any) -> None:
    """Even if the machine answers again, the job must not lose more steps than the policy allows."""

    def evidence(given: StopRanks) -> Evidence:
        back = jobs.cluster.back.is_set()
        return Evidence(
            generation=given.generation,
            exits=exits(900),
            held=held(100 if back else 900),
            unreachable=[] if back else ["m1"],
        )

    jobs.cluster.evidence = evidence
    handle = await jobs.start(retry={"max_lost_steps": 100})
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    jobs.cluster.back.set()
    incident = jobs.client.get_workflow_handle(incident_workflow_id(state.spec.name, 1))
    async with asyncio.timeout(60):
        await asked(incident, "stage", lambda answer: "would lose" in answer["found"])
    assert [call for call in jobs.cluster.calls if "launch" in call] == ["launch 1 from -1"]
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    await handle.result()


async def test_an_abandoned_job_leaves_nothing_running(jobs: Any) -> None:
    jobs.cluster.confirmation = failed
    handle = await jobs.start(retry={"max_attempts": 1})
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    await jobs.client.get_workflow_handle(incident_workflow_id(state.spec.name, 1)).signal(
        "abandon", {"operator": "ada"}
    )

    result = await handle.result()

    assert result.outcome == "failed"
    assert "Abandoned by ada" in result.headline
    assert jobs.cluster.calls[-2:] == ["stop 2", "release"]


@pytest.mark.parametrize("by_itself", [True, False])
async def test_a_silent_machine_parks_and_the_job_goes_on_when_it_is_back(jobs: Any, *, by_itself: bool) -> None:
    silent = ["m1"]

    def evidence(given: StopRanks) -> Evidence:
        return Evidence(
            generation=given.generation,
            exits=[RankExit(rank=1, machine="m1", signal=9, time_ns=1, completed_steps=7)],
            held=[StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=7) for rank in (0, 1)],
            unreachable=list(silent),
        )

    jobs.cluster.evidence = evidence
    handle = await jobs.start()
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    assert jobs.cluster.notes[-1].text.startswith("park: no answer of m1")
    while "await m1" not in jobs.cluster.calls:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    silent.clear()
    if by_itself:
        jobs.cluster.back.set()
    else:
        await jobs.client.get_workflow_handle(incident_workflow_id(state.spec.name, 1)).signal(
            "resume", {"operator": "ada"}
        )

    state = await jobs.until_runs(handle, 2)
    assert [one.resolution for one in state.incidents] == ["reattempt" if by_itself else "resumed by operator"]
    assert jobs.cluster.calls.count("stop 1") == 2, "the second stop asks again which copies exist"


async def test_stopping_a_job_ends_its_open_incident_too(jobs: Any) -> None:
    jobs.cluster.confirmation = failed
    handle = await jobs.start(retry={"max_attempts": 1})
    await handle.execute_update(JobWorkflow.report, anomaly())
    await jobs.until(handle, lambda state: state.status == "parked")
    await handle.signal(JobWorkflow.stop, ["nonsense"])
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})

    assert (await handle.result()).outcome == "stopped"
    state = await handle.query(JobWorkflow.current_state)
    assert "nonsense" in state.rejected[0]


async def test_who_stops_a_job_hears_of_machines_that_did_not(jobs: Any) -> None:
    jobs.cluster.evidence = lambda given: Evidence(generation=given.generation, unreachable=["m1"])
    handle = await jobs.running()
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    result = await handle.result()

    assert result.outcome == "stopped"
    assert result.headline.endswith(
        "stopped by ada; m1 did not answer: ranks may run there, and are ended once its agent answers again"
    )


async def test_a_job_that_is_stopped_while_it_starts_does_not_wait_for_its_launch(jobs: Any) -> None:
    jobs.cluster.blocked.add("launch 1")
    handle = await jobs.start()
    while not any(call.startswith("launch 1") for call in jobs.cluster.calls):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    assert (await handle.result()).outcome == "stopped"
    assert "stop 1" in jobs.cluster.calls, "ranks may run already"


@pytest.mark.parametrize("waits_for", ["lease", "ledger"])
async def test_a_job_that_is_stopped_before_its_launch_is_over(jobs: Any, waits_for: str) -> None:
    """It waits for machines that other jobs have, or for its checks."""
    jobs.cluster.blocked.add(waits_for)
    handle = await jobs.start()
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    if waits_for == "ledger":  # the last entry is awaited for a while, and the job is over then
        await jobs.until(handle, lambda state: state.status == "stopped")
        jobs.cluster.blocked.clear()
    result = await handle.result()
    assert (result.outcome, result.generations) == ("stopped", 0)
    assert not [call for call in jobs.cluster.calls if call.startswith("launch")]


async def test_a_cancelled_job_stops_its_ranks(jobs: Any) -> None:
    handle = await jobs.running()
    await handle.cancel()

    assert (await handle.result()).outcome == "stopped"
    assert jobs.cluster.calls[-2:] == ["stop 1", "release"]


async def test_no_recovery_waits_for_a_ledger_that_is_away(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an incident, and so the next one, would wait until the write to the ledger is given up."""
    monkeypatch.setattr(write_to_ledger, "ON_LEDGER", ON_LEDGER_WHEN_BACK)
    handle = await jobs.running()
    jobs.cluster.blocked.add("ledger")
    for generation in (1, 2):
        await handle.execute_update(JobWorkflow.report, anomaly(generation))
        state = await jobs.until(
            handle, lambda state, n=generation: state.status == "running" and state.generation == n + 1
        )
    assert jobs.cluster.notes == []
    jobs.cluster.blocked.clear()
    while len(jobs.cluster.notes) < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)

    for incident, note in zip(state.incidents, sorted(jobs.cluster.notes, key=lambda one: one.incident), strict=True):
        assert (note.incident, note.stage, note.report.headline) == (incident.id, "closed", incident.headline)
        assert note.launched.generation == note.report.generation
        assert (note.report.unwritten, note.report.launched) == (0, None), (
            "the ledger has the report as the incident would have written it"
        )
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    await handle.result()


async def test_what_a_ledger_that_is_away_lacks_is_written_before_the_job_is_over(jobs: Any) -> None:
    """An activity that is pending when its workflow ends is lost, and its next attempt would be half a minute later."""
    handle = await jobs.running()
    jobs.cluster.blocked.add("ledger")
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until_runs(handle, 2)
    while (await pending_attempts(handle)) < 4:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.1)
    await handle.execute_update(JobWorkflow.finished, 2)
    await jobs.until(handle, lambda state: state.status == "finished")
    assert jobs.cluster.notes == []
    jobs.cluster.blocked.clear()

    assert (await handle.result()).outcome == "finished"
    assert {(note.incident, note.stage) for note in jobs.cluster.notes} == {(state.incidents[0].id, "closed")}


async def pending_attempts(handle: Any) -> int:
    """Return the number of attempts of the pending activity with the most attempts."""
    described = (await handle.describe()).raw_description
    return max((one.attempt for one in described.pending_activities), default=0)


async def test_a_used_name_counts_on(jobs: Any) -> None:
    jobs.cluster.used = NumbersUsed(incidents=4, generations=9)
    handle = await jobs.start()
    state = await jobs.until(handle, lambda state: state.status == "running")
    assert state.incidents_so_far == 0, "incidents of earlier runs do not count"
    await handle.execute_update(JobWorkflow.report, anomaly(10))

    state = await jobs.until(handle, lambda state: state.generation == 11)

    assert state.incidents[0].number == 5
    assert state.incidents_so_far == 1


async def test_a_job_carries_everything_across_continue_as_new(jobs: Any) -> None:
    """Many incidents make a long history. State, numbers and pending reports are the same in the next run."""
    handle = await jobs.running(retry={"max_failures_without_progress": 1000, "max_failures_at_step": 1000})
    first_run = (await handle.describe()).run_id
    latest = jobs.client.get_workflow_handle_for(JobWorkflow.run, handle.id)
    generation = 1
    while (await latest.describe()).run_id == first_run:
        # As watchers do, an update that fails because a run ended is sent again to the next run.
        with contextlib.suppress(WorkflowUpdateFailedError, RPCError):
            await latest.execute_update(JobWorkflow.report, anomaly(generation), id=f"report-{generation}")
            generation += 1
        await jobs.until(latest, lambda state, g=generation: state.generation == g and state.status == "running")

    state = await latest.query(JobWorkflow.current_state)

    assert state.generation == generation
    assert state.incident_count == generation - 1


@pytest.mark.parametrize(
    ("failed", "symptom"),
    [
        ({"timed_out": True, "reason": "rank 3 completed no step within 600 s"}, Symptom.HANG),
        ({"emptied": ["m1"], "reason": "m1 lost its ranks before the first step"}, Symptom.CRASH),
    ],
)
async def test_a_first_launch_that_never_steps_is_an_incident(
    jobs: Any, failed: dict[str, Any], symptom: Symptom
) -> None:
    """If ranks hang before their first step, or are lost with their machine, no agent reports an end of them."""
    working: Callable[[ConfirmSteps], Confirmation] = jobs.cluster.confirmation

    def hung(given: ConfirmSteps) -> Confirmation:
        if given.launched.generation > 1:
            return working(given)
        return Confirmation(generation=1, ok=False, **failed)

    jobs.cluster.confirmation = hung
    handle = await jobs.start()

    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")

    assert state.incidents[0].number == 1
    assert jobs.cluster.notes[0].anomaly.symptom is symptom


async def test_checkpoints_that_vanished_park_a_job_that_would_lose_too_much(jobs: Any) -> None:
    handle = await jobs.running(retry={"max_lost_steps": 10})
    await handle.execute_update(JobWorkflow.report, anomaly(1))
    await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")
    jobs.cluster.evidence = lambda given: Evidence(
        generation=given.generation,
        exits=[RankExit(rank=1, machine="m1", signal=9, time_ns=time.time_ns(), completed_steps=60)],
    )
    await handle.execute_update(JobWorkflow.report, anomaly(2))

    await jobs.until(handle, lambda state: state.status == "parked")

    for _ in range(200):  # the incident writes to the ledger in the background
        if any("would lose 60 steps" in note.text for note in jobs.cluster.notes):
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"only this was noted: {[note.text for note in jobs.cluster.notes]}")


NOT_GONE = {"m1": "rank 1 (pid 4711, state D) has been dying for 40 s"}
DYING = "m1: rank 1 (pid 4711, state D) has been dying for 40 s"


async def test_ranks_that_take_long_to_die_are_waited_for_and_named(jobs: Any) -> None:
    gone = asyncio.Event()

    def dies_slowly(given: StopRanks) -> Evidence:
        if given.generation == 1 and not gone.is_set():
            return Evidence(generation=1, dying=NOT_GONE)
        return Evidence(generation=given.generation, exits=exits(20), held=held(20))

    jobs.cluster.evidence = dies_slowly
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly())

    state = await jobs.until(handle, lambda state: any("dying" in one.stage for one in state.incidents))

    [one] = state.incidents
    assert one.stage == f"stop: {DYING}"
    incident = jobs.client.get_workflow_handle_for(IncidentWorkflow.run, one.id)
    assert (await incident.query(IncidentWorkflow.current_stage)).found == DYING
    assert DYING in await jobs.page(incident)
    assert not [call for call in jobs.cluster.calls if call.startswith("launch 2")]
    gone.set()
    report = await incident.result()
    assert report.recovered
    assert report.failures[0].step == 20


async def test_ranks_that_do_not_die_park_the_job_with_the_reason(jobs: Any) -> None:
    gone = asyncio.Event()

    def never(given: StopRanks) -> Evidence:
        if not gone.is_set():
            return Evidence(generation=given.generation, dying=NOT_GONE)
        return Evidence(generation=given.generation, exits=exits(20), held=held(20))

    jobs.cluster.evidence = never
    handle = await jobs.running(stop={"kill_patience_s": 0.5})
    await handle.execute_update(JobWorkflow.report, anomaly())

    state = await jobs.until(handle, lambda state: state.status == "parked")

    parked = [note.text for note in jobs.cluster.notes if note.text.startswith("park")]
    assert f"the machines could not be stopped: {DYING}; they have 0.5 s" in parked[0]
    gone.set()
    incident = jobs.client.get_workflow_handle_for(IncidentWorkflow.run, state.incidents[0].id)
    await incident.signal("resume", {"operator": "ada", "note": "the node was reset"})
    assert (await incident.result()).recovered
