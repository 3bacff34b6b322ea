"""Jobs of another release continue, and a job whose state cannot be read is named."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from console.views.status_text import problem_lines
from controlplane.client import Control
from controlplane.queries.status import JobLine, job_lines, job_report
from everstep.errors import ClusterError
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.rank import environment
from tests.workflows.other_release import UNREADABLE, OtherJob
from workflows.job import JobWorkflow

LATER: dict[str, Any] = {
    "spec": {"name": "later", "script": "/x.py", "later_env": {"A": "B"}},
    "machines": [],
    "generation": 3,
    "lineage": [[3, 20]],
    "status": "rehearsing",
    "incident_count": 1,
    "incidents": [{"id": "incident/later/0001", "number": 1, "headline": "rank 3 drifts", "stage": "rehearse"}],
    "failures": [{"generation": 2, "step": 20, "symptom": "drifts", "cause": "drifts", "rack": "r7"}],
    "evicted": ["m9"],
}
"""The state of a job in the form of an imagined later release."""


async def test_a_job_that_cannot_be_read_is_named_and_all_others_are_shown(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv(environment.TASK_QUEUE, queue)
    good = JobState(spec=JobSpec(name="good", script="/x.py"), machines=[], status="running", generation=1)
    async with Worker(temporal, task_queue=queue, workflows=[OtherJob]):
        for name, state in (("good", good), ("bad", UNREADABLE), ("later", LATER)):
            await temporal.start_workflow("Job", state, id=job_workflow_id(name), task_queue=queue)
        async with Control(temporal, None) as control:
            while len(await control.jobs()) < 3:  # noqa: ASYNC110 - visibility comes a moment later
                await asyncio.sleep(0.05)
            lines = {line.name: line for line in await job_lines(control)}
            with pytest.raises(ClusterError, match=r"cannot read the answer of bad.*everstep stop bad.*order"):
                await job_report(control, "bad")
            later = await job_report(control, "later")
            running = await job_report(control, "good")
            for name in ("bad", "good", "later"):
                await control.stop(name)
                await temporal.get_workflow_handle(job_workflow_id(name)).result()

    assert running.status == lines[running.name].status == "running"
    assert lines["bad"].status == "running"
    assert "cannot read" in lines["bad"].problem
    assert [line.problem for name, line in lines.items() if name != "bad"] == ["", ""]
    assert (later.status, later.generation) == (lines["later"].status, 3) == ("rehearsing", 3)
    assert [one.stage for one in later.incidents] == ["rehearse"]
    assert problem_lines(list(lines.values())) == [lines["bad"].problem]


def test_many_troubled_jobs_do_not_fill_the_terminal() -> None:
    fields: dict[str, Any] = dict.fromkeys(JobLine.model_fields) | {"problem": "trouble"}
    line = JobLine.model_construct(**fields)

    assert problem_lines([line] * 7) == ["trouble"] * 5 + ["and 2 more"]


async def test_a_server_that_is_another_cluster_s_is_told_as_such(temporal: Client) -> None:
    """The server at an address may now be another cluster's, which has other namespaces."""
    lost = Client(temporal.service_client, namespace="everstep-elsewhere", data_converter=temporal.data_converter)
    async with Control(lost, None) as control:
        for asked in (control.jobs(), control.state("gpt"), control.run_of("gpt")):
            with pytest.raises(ClusterError, match="has no namespace everstep-elsewhere, so it is not the server"):
                await asked


async def test_a_job_goes_on_from_the_state_of_a_later_release_and_keeps_what_it_says(jobs: Any) -> None:
    """After a downgrade, this release continues the workflow, has incidents, and keeps the later release's fields."""
    machines = [{"name": f"m{rank}", "address": f"127.0.0.1{rank}:1", "rack": "r7"} for rank in (0, 1)]
    spec = {**LATER["spec"], "machines": 2, "policy": {"retry": {"max_failures_at_step": 9}, "evict_after": 3}}
    pending = [{"id": "m1-9", "generation": 3, "symptom": "drifts", "headline": "rank 1 drifts", "seen_ns": 1}]
    handle = await jobs.client.start_workflow(
        "Job",
        {**LATER, "spec": spec, "machines": machines, "pending": pending},
        id=job_workflow_id("later"),
        task_queue=jobs.queue,
    )
    handle = jobs.client.get_workflow_handle_for(JobWorkflow.run, handle.id)

    state = await jobs.until(handle, lambda state: state.generation == 4 and state.status == "running")

    assert {note.anomaly.symptom for note in jobs.cluster.notes} == {Symptom("drifts")}
    assert state.spec.model_extra == {"later_env": {"A": "B"}}
    assert state.spec.policy.model_extra == {"evict_after": 3}
    assert state.machines[0].model_extra == {"rack": "r7"}
    assert state.model_extra == {"evicted": ["m9"]}
    assert state.incidents[0].stage == "rehearse"
    later = Anomaly.model_validate({"id": "x", "generation": 4, "symptom": "hot", "headline": "h", "where": "GPU 3"})
    await handle.execute_update(JobWorkflow.report, later)
    state = await jobs.until(handle, lambda state: state.generation == 5 and state.status == "running")
    assert jobs.cluster.notes[-1].anomaly.symptom == Symptom("hot")
    assert jobs.cluster.notes[-1].anomaly.model_extra == {"where": "GPU 3"}
    await handle.signal(JobWorkflow.stop, {"operator": "test"})
    await handle.result()
