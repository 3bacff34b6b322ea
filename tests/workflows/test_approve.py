"""An operator approves that machines leave a job, by a command or a signal. Only the shown machines may leave."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError

from activities.agents.stop_ranks import StopRanks
from controlplane.client import Control
from everstep.model.eviction import EvictMode
from everstep.model.evidence import Evidence
from everstep.model.launch import Confirmation
from everstep.rank import environment
from tests.workflows.asking import ASK_S
from tests.workflows.conftest import anomaly
from tests.workflows.test_evict import POLICY, STANDBYS, WHO, explanation_of, failed, faulty, gone
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow

ASKS = {"evict": {"share": 0.0, "at_least": 0}}
"""A policy with which the breaker trips at once."""


async def parked(jobs: Any, handle: Any) -> Any:
    """Wait until a job is parked, and return the handle of its incident."""
    await jobs.until(handle, lambda state: state.status == "parked")
    return jobs.client.get_workflow_handle((await handle.query(JobWorkflow.current_state)).incidents[0].id)


async def everstep(jobs: Any, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the real command against the server of the tests, and return the exit code and both outputs."""
    config = jobs.client.service_client.config
    own = {
        "TEMPORAL_ADDRESS": config.target_host,
        "TEMPORAL_NAMESPACE": jobs.client.namespace,
        environment.TASK_QUEUE: jobs.queue,
        "XDG_STATE_HOME": str(folder),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "console.main", *arguments),
        env=os.environ | own,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_one_command_approves_and_says_what(jobs: Any, tmp_path: Path) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1")
    handle = await failed(jobs, **ASKS)
    incident = await parked(jobs, handle)
    name = handle.id.removeprefix("job/")
    code, out, err = await everstep(jobs, tmp_path, "status", name)
    assert code == 0, err
    assert f"approve   everstep approve {name}    replaces m1 (silent-machine)" in out
    assert f"an operator has to approve that it leaves the job ('everstep approve {name}')" in out

    code, out, err = await everstep(jobs, tmp_path, "approve", name, "--by", "ada", "--note", "its power is out")
    assert code == 0, err
    assert out.startswith("m1 (silent-machine) ") and f"everstep attach {name}" in out
    state = await jobs.until_runs(handle, 2)
    assert ([machine.name for machine in state.machines], state.evicted_ns) == (["m0", "m2"], [])

    report = jobs.report
    who = "ada (its power is out)"
    assert (report.resolution, report.approved) == ("eviction", {"m1": who})
    assert f"by eviction of m1, approved by {who}, lost 0 steps" in report.headline
    told = "\n".join(note.text for note in jobs.cluster.notes)
    assert f"m1 (silent-machine), approved by {who}; m2 for m1" in told
    assert "resumed" not in told + str(state.incidents[0].resolution)
    assert (await explanation_of(jobs, incident.id)).answers[0].result == f"it left the job, approved by {who}"

    code, _, err = await everstep(jobs, tmp_path, "approve", name)
    assert (code, f"job {name} has no open incident; the job is running" in err) == (2, True)
    code, _, err = await everstep(jobs, tmp_path, "approve", "no-such-job")
    assert (code, "there is no job no-such-job" in err) == (2, True)


async def test_a_job_that_waits_for_something_else_has_nothing_to_approve(jobs: Any, tmp_path: Path) -> None:
    handle = await jobs.running(**POLICY, retry={"max_attempts": 1})
    jobs.cluster.confirmation = lambda given: Confirmation(
        generation=given.launched.generation, ok=False, reason="rank 1 died again"
    )
    await handle.execute_update(JobWorkflow.report, anomaly())
    incident = await parked(jobs, handle)
    code, out, err = await everstep(jobs, tmp_path, "approve", handle.id.removeprefix("job/"))
    assert (code, out) == (2, "")
    assert "parked for another reason, 1 reattempts did not bring the job back" in err
    await incident.signal(IncidentWorkflow.approve, WHO)
    while "REJECTED: approve by ada" not in await jobs.page(incident):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(ASK_S)
    assert (await handle.query(JobWorkflow.current_state)).status == "parked"


async def test_a_job_that_is_not_parked_has_nothing_to_approve(jobs: Any, tmp_path: Path) -> None:
    jobs.cluster.blocked.add("launch 2")
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "recovering")
    code, _, err = await everstep(jobs, tmp_path, "approve", handle.id.removeprefix("job/"))
    assert (code, "the job is not parked, its incident is at stage" in err) == (2, True)
    jobs.cluster.blocked.clear()
    await jobs.until_runs(handle, 2)


async def test_the_page_the_stage_and_the_update_name_who_waits(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), faulty("m1")
    handle = await failed(jobs, evict={"rules": {"sure-machine-fault": EvictMode.APPROVE}})
    incident = await parked(jobs, handle)
    assert "**Parked: an operator has to approve that m1 (gpu-lost) may leave.**" in await jobs.page(incident)
    at_hand = await Control(jobs.client, None).stage(incident.id)
    assert [(one.machine, one.rule) for one in at_hand.to_approve] == [("m1", "sure-machine-fault")]
    for nonsense in ([], [{"operator": ""}], [WHO, "more"]):
        with pytest.raises(WorkflowUpdateFailedError):
            await incident.execute_update("approve", args=nonsense)
    answer = await incident.execute_update(IncidentWorkflow.approve_by_update, WHO)
    assert answer == f"m1 (gpu-lost) may leave job {handle.id.removeprefix('job/')}"
    await jobs.until_runs(handle, 2)
    assert (await Control(jobs.client, None).stage(incident.id)).to_approve == []
    assert jobs.report.approved == {"m1": "ada (it is the switch)"}


async def test_an_approval_is_for_the_machines_that_were_shown(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), faulty("m1")
    handle = await failed(jobs, evict={"mode": EvictMode.APPROVE})
    incident = await parked(jobs, handle)

    def both(given: StopRanks) -> Evidence:
        [one] = faulty("m0")(given).findings  # another fault than that of m1: the same one would be shared
        other = one.model_copy(update={"finding": one.finding.model_copy(update={"reason": "gpu-count"})})
        return faulty("m1")(given).model_copy(update={"findings": [other, *faulty("m1")(given).findings]})

    jobs.cluster.evidence = both
    await incident.signal(IncidentWorkflow.approve, WHO)
    await jobs.until(
        handle, lambda state: state.status == "parked" and [one.name for one in state.machines] == ["m0", "m2"]
    )
    at_hand = await incident.query(IncidentWorkflow.current_stage)
    assert [one.machine for one in at_hand.to_approve] == ["m0"]
    await incident.signal(IncidentWorkflow.resume, {"operator": "bob"})
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    report = jobs.report
    assert (report.resolution, report.approved) == ("resumed by operator", {"m1": "ada (it is the switch)"})
