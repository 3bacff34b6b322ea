"""Invalid messages are rejected or recorded, and the job continues."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError

from everstep.model.job_state import incident_workflow_id
from everstep.model.launch import Confirmation
from tests.workflows.conftest import anomaly
from workflows.job import JobWorkflow


def failed(given: Any) -> Confirmation:
    return Confirmation(generation=given.launched.generation, ok=False, reason="rank 1 died again")


HUGE = "x" * 500_000
NONSENSE: list[list[Any]] = [
    [],
    [None],
    [7],
    ["text"],
    [{"operator": 7}],
    [{"operator": "ada", "note": "n", "more": 1}],
    [{"operator": "ada"}, "a second argument"],
    [HUGE],
    [{"operator": HUGE, "note": HUGE}],
]


@pytest.mark.parametrize("target", ["job", "incident"])
async def test_signals_without_sense_are_rejected(jobs: Any, target: str) -> None:
    jobs.cluster.confirmation = failed
    handle = await jobs.start(retry={"max_attempts": 1})
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(incident_workflow_id(state.spec.name, 1))
    for arguments in NONSENSE:
        if target == "job":
            await handle.signal("stop", args=arguments)
            await handle.signal("incident_stage", args=arguments)
        else:
            await incident.signal("resume", args=arguments)
            await incident.signal("abandon", args=arguments)
    await handle.signal("no_such_signal", "x")

    state = await jobs.until(handle, lambda state: True)
    assert state.stop_requested == ""
    assert state.status == "parked"
    assert (await incident.query("stage"))["name"] == "parked"
    await handle.signal("stop", {"operator": "ada", "note": "enough " * 100})
    result = await handle.result()
    assert result.outcome == "stopped"
    assert len(result.headline) < 5_000


async def test_updates_without_sense_change_nothing(jobs: Any) -> None:
    handle = await jobs.running()
    for name in ("report", "finished"):
        for arguments in [[], ["text"], [{"generation": "x"}], [None]]:
            with pytest.raises(WorkflowUpdateFailedError):
                await handle.execute_update(name, args=arguments)
    for generation in (0, -5):
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update(JobWorkflow.finished, generation)
    state = await handle.query(JobWorkflow.current_state)
    assert (state.status, state.generation, state.outcome) == ("running", 1, "")
    await handle.execute_update(JobWorkflow.finished, 1)
    assert (await handle.result()).outcome == "finished"


async def test_a_job_cancelled_while_its_incident_is_open_leaves_nothing_running(jobs: Any) -> None:
    jobs.cluster.confirmation = failed
    handle = await jobs.start(retry={"max_attempts": 1})
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    await handle.cancel()

    assert (await handle.result()).outcome == "stopped"
    incident = jobs.client.get_workflow_handle(incident_workflow_id(state.spec.name, 1))
    assert (await incident.result())["resolution"] == "abandoned"
    assert jobs.cluster.calls[-1] == "release"


async def test_lost_steps_count_to_where_the_job_went_on_in_the_end(jobs: Any) -> None:
    import time

    from everstep.model.evidence import Evidence
    from everstep.model.state_copy import StateCopies
    from tests.workflows.conftest import exits, held

    def evidence(given: Any) -> Evidence:
        if given.generation == 1:
            return Evidence(generation=1, exits=exits(21), held=held(20))
        older = [StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=19) for rank in (0, 1)]
        return Evidence(generation=2, exits=exits(20), held=older)

    def confirmation(given: Any) -> Confirmation:
        ok = given.launched.generation == 3
        return Confirmation(generation=given.launched.generation, ok=ok, reason="", stepped_ns=time.time_ns())

    jobs.cluster.evidence, jobs.cluster.confirmation = evidence, confirmation
    handle = await jobs.start()
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.generation == 3)
    assert state.incidents[0].lost_steps == 2
