"""What operators do to workflows and to databases: resets, terminations, restored backups and lost files.

No ranks of a living job are ended by it, and the job reaches its end with the losses of an undisturbed run. Run by
``make drills``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from controlplane.local import cluster_processes, plan
from drills import DrillCluster
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, incident_workflow_id, job_workflow_id
from tests.drills.deployed import ROOT, read

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

STEPS = 60
LIMIT_S = 120.0
Losses = dict[int, float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[DrillCluster]:
    async with DrillCluster(machines=2, standbys=0, workers=2) as opened:
        yield opened


async def start(cluster: DrillCluster, job: str, pace_s: float = 0.3) -> Path:
    """Start a job of two ranks; returns the file with its losses."""
    losses = cluster.folder / f"{job}.jsonl"
    sizes = ["--steps", str(STEPS), "--seq", "16", "--layers", "2", "--dim", "32"]
    args = [*sizes, "--step-seconds", str(pace_s), "--losses", str(losses)]
    spec = JobSpec(name=job, script=str(ROOT / "examples" / "gpt.py"), args=args, machines=2)
    await cluster.control.start_job(spec, cluster.machines)
    return losses


# The loops below have no event that they could wait for.
# ruff: noqa: ASYNC110


async def trained(losses: Path, step: int) -> None:
    """Wait until the first rank has written the loss of a step."""
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(losses.exists) or step not in read(losses):
            await asyncio.sleep(0.05)


async def until(cluster: DrillCluster, job: str, holds: Callable[[JobState], bool]) -> JobState:
    """Wait until the state of a job is as it should be."""
    async with asyncio.timeout(LIMIT_S):
        while not holds(state := await cluster.control.state(job)):
            await asyncio.sleep(0.2)
    return state


async def kill_a_rank(cluster: DrillCluster, job: str, generation: int) -> None:
    """Kill a rank of a generation, once all its ranks run."""
    async with cluster.control.feed(job, cluster.machines) as feed:
        async for picture in feed.pictures():
            alive = [rank.pid for rank in picture.ranks.values() if rank.alive and rank.generation == generation]
            if len(alive) == 2:
                os.kill(alive[1], signal.SIGKILL)
                return


async def reset(cluster: DrillCluster, job: str, before: str) -> None:
    """Reset a job's workflow to the workflow task before its first event of a kind, as an operator does."""
    client, workflow = cluster.control.client, job_workflow_id(job)
    history = await client.get_workflow_handle(workflow).fetch_history()
    wanted = EventType.Value(f"EVENT_TYPE_{before}")
    first = next(event.event_id for event in history.events if event.event_type == wanted)
    completed = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    task = max(event.event_id for event in history.events if event.event_type == completed and event.event_id < first)
    described = await client.get_workflow_handle(workflow).describe()
    request = ResetWorkflowExecutionRequest(
        namespace=client.namespace,
        workflow_execution=WorkflowExecution(workflow_id=workflow, run_id=described.run_id),
        reason="a drill",
        workflow_task_finish_event_id=task,
        request_id=f"reset-{job}",
    )
    await client.workflow_service.reset_workflow_execution(request)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: DrillCluster) -> Losses:
    losses = await start(cluster, "undisturbed", 0.0)
    await until(cluster, "undisturbed", lambda state: state.status == "finished")
    return read(losses)


async def finished(cluster: DrillCluster, job: str, losses: Path, undisturbed: Losses) -> JobState:
    state = await until(cluster, job, lambda state: state.outcome != "" or state.status == "parked")
    assert state.status == "finished", json.dumps(state.model_dump(mode="json"))[:3000]
    assert read(losses) == undisturbed
    return state


@pytest.mark.parametrize("again", [False, True], ids=["steps", "fails-again"])
@pytest.mark.parametrize("before", ["START_CHILD_WORKFLOW_EXECUTION_INITIATED", "CHILD_WORKFLOW_EXECUTION_COMPLETED"])
async def test_a_job_that_is_reset_to_before_its_incident_goes_on(
    cluster: DrillCluster, undisturbed: Losses, before: str, again: bool
) -> None:
    job = f"reset-{before[:5].lower()}-{again}".lower()
    losses = await start(cluster, job)
    await trained(losses, 5)
    await kill_a_rank(cluster, job, 1)
    await until(cluster, job, lambda state: state.status == "running" and state.generation == 2)
    await trained(losses, 12)
    await reset(cluster, job, before)
    if again:
        state = await until(cluster, job, lambda state: state.status == "running")
        await kill_a_rank(cluster, job, max(state.generation, 2))
    state = await finished(cluster, job, losses, undisturbed)
    assert state.generation == (3 if again else 2), "the reset stopped no rank"


async def test_temporals_database_is_an_older_one(cluster: DrillCluster, undisturbed: Losses) -> None:
    """The backup was made before an incident, so the restored history does not know the generation that runs."""
    losses = await start(cluster, "restored")
    await trained(losses, 5)
    database, backup = cluster.file.database, cluster.folder / "backup.db"
    with sqlite3.connect(database) as source, sqlite3.connect(backup) as target:
        source.backup(target)
    source.close()
    target.close()
    await kill_a_rank(cluster, "restored", 1)
    await until(cluster, "restored", lambda state: state.status == "running" and state.generation == 2)
    await trained(losses, 12)
    plan.hold(cluster.home, "temporal")
    server = cluster_processes.identify(cluster.processes()["temporal"])
    assert server
    cluster_processes.send(server, signal.SIGKILL)
    while cluster_processes.alive(server):
        await asyncio.sleep(0.05)
    for suffix in ("", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    backup.rename(database)
    plan.let_go(cluster.home, "temporal")
    await trained(losses, 20)
    await kill_a_rank(cluster, "restored", 2)
    await finished(cluster, "restored", losses, undisturbed)


@pytest.mark.parametrize("close", ["terminate", "cancel"])
async def test_an_incident_that_is_closed_leaves_the_job_alive(
    cluster: DrillCluster, undisturbed: Losses, close: str
) -> None:
    job = f"incident-{close}"
    losses = await start(cluster, job)
    await trained(losses, 5)
    await kill_a_rank(cluster, job, 1)
    state = await until(cluster, job, lambda state: bool(state.incidents))
    incident = cluster.control.client.get_workflow_handle(incident_workflow_id(job, state.incidents[0].number))
    await (incident.terminate("a drill") if close == "terminate" else incident.cancel())
    async with asyncio.timeout(LIMIT_S):
        while (state := await cluster.control.state(job)).outcome == "":
            if state.status == "parked":  # the incident was closed before its launch: an operator decides
                open_one = next(one for one in state.incidents if not one.resolution)
                handle = cluster.control.client.get_workflow_handle(open_one.id)
                await handle.signal("resume", {"operator": "ada"})
            await asyncio.sleep(0.5)
    assert state.status == "finished"
    assert read(losses) == undisturbed


async def test_the_ledgers_file_is_lost(cluster: DrillCluster, undisturbed: Losses) -> None:
    losses = await start(cluster, "no-ledger")
    await trained(losses, 5)
    (cluster.home / "ledger.db").unlink()
    await kill_a_rank(cluster, "no-ledger", 1)
    await finished(cluster, "no-ledger", losses, undisturbed)
    found = await cluster.control.ledger()
    assert found is not None
    assert [one.id for one in await found.call(type(found).incidents, "no-ledger")] == ["incident/no-ledger/0001"]
    again = await start(cluster, "no-ledger-again", 0.0)
    await finished(cluster, "no-ledger-again", again, undisturbed)
