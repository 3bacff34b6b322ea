"""A scripted cluster: activities of the real names that answer from a script and note every call."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities import messages
from activities.ledger.records import NumbersUsed
from activities.messages import (
    ConfirmInput,
    DecideInput,
    LaunchInput,
    PrepareInput,
    RecordInput,
    ReleaseInput,
    StopInput,
)
from everstep.incident import Anomaly, Confirmation, Evidence, Held, Launched, RankExit, Symptom
from everstep.job import JobSpec
from everstep.job_state import JobState, job_workflow_id
from everstep.machine import Machine
from everstep.policy import RecoveryPolicy
from workflows.job import JobWorkflow
from workflows.messages import JobResult
from workflows.registry import WORKFLOWS, sandbox

MACHINES = [Machine(name="m0", address="127.0.0.11:1"), Machine(name="m1", address="127.0.0.12:1")]


def exits(step: int, *, signal: int = 9, rank: int = 1) -> list[RankExit]:
    """Rank ``rank`` ended by a signal, the other one was stopped."""
    return [
        RankExit(rank=rank, machine="m1", signal=signal, time_ns=time.time_ns(), completed_steps=step),
        RankExit(rank=1 - rank, machine="m0", signal=9, stopped_by_us=True, completed_steps=step),
    ]


def held(step: int) -> list[Held]:
    """Both ranks hold the state of a step."""
    return [Held(rank=rank, machine=f"m{rank}", completed_steps=step) for rank in (0, 1)]


@dataclass
class ScriptedCluster:
    """Answers what ``evidence`` and ``confirmation`` say; ``calls`` has every effect in order."""

    calls: list[str] = field(default_factory=list)
    notes: list[DecideInput] = field(default_factory=list)
    evidence: Callable[[StopInput], Evidence] = lambda given: Evidence(
        generation=given.generation, exits=exits(20), held=held(20)
    )
    confirmation: Callable[[ConfirmInput], Confirmation] = lambda given: Confirmation(
        generation=given.launched.generation,
        ok=True,
        reason="all stepped",
        stepped_ns=time.time_ns(),
        completed_steps=21,
    )
    used: NumbersUsed = field(default_factory=NumbersUsed)

    @activity.defn(name=messages.PREPARE)
    async def prepare(self, given: PrepareInput) -> float:
        self.calls.append("prepare")
        return 0.0

    @activity.defn(name=messages.STOP)
    async def stop(self, given: StopInput) -> Evidence:
        self.calls.append(f"stop {given.generation}")
        return self.evidence(given)

    @activity.defn(name=messages.LAUNCH)
    async def launch(self, given: LaunchInput) -> Launched:
        self.calls.append(f"launch {given.generation} from {given.resume_step}")
        return Launched(generation=given.generation, resume_step=given.resume_step, started_ns=time.time_ns())

    @activity.defn(name=messages.CONFIRM)
    async def confirm(self, given: ConfirmInput) -> Confirmation:
        self.calls.append(f"confirm {given.launched.generation}")
        return self.confirmation(given)

    @activity.defn(name=messages.RELEASE)
    async def release(self, given: ReleaseInput) -> int:
        self.calls.append("release")
        return 0

    @activity.defn(name=messages.DECIDE)
    async def decide(self, given: DecideInput) -> None:
        self.notes.append(given)

    @activity.defn(name=messages.RECORD)
    async def record(self, given: RecordInput) -> NumbersUsed:
        return self.used


@dataclass
class Jobs:
    """Starts jobs on the scripted cluster."""

    client: Client
    cluster: ScriptedCluster
    queue: str

    async def start(self, **policy: float) -> WorkflowHandle[JobWorkflow, JobResult]:
        """Start a job of two ranks on two machines."""
        name = f"job-{uuid.uuid4().hex[:8]}"
        defaults = {"backoff_initial_s": 0.05, "backoff_max_s": 0.05}
        spec = JobSpec(name=name, script="/job.py", machines=2, policy=RecoveryPolicy.model_validate(defaults | policy))
        return await self.client.start_workflow(
            JobWorkflow.run,
            JobState(spec=spec, machines=MACHINES),
            id=job_workflow_id(name),
            task_queue=self.queue,
        )

    async def until(self, handle: WorkflowHandle[JobWorkflow, JobResult], ok: Callable[[JobState], bool]) -> JobState:
        """Wait until the job's state is as wanted; the test's time-out bounds it."""
        while True:
            state = await handle.query(JobWorkflow.current_state)
            if ok(state):
                return state
            await asyncio.sleep(0.05)


def anomaly(generation: int = 1, *, symptom: Symptom = Symptom.CRASH) -> Anomaly:
    """Rank 1 ended by SIGKILL."""
    return Anomaly(
        id=f"m1-{generation}",
        generation=generation,
        symptom=symptom,
        headline="rank 1 on m1 ended by SIGKILL",
        ranks=[1],
        machines=["m1"],
        seen_ns=time.time_ns(),
    )


@pytest.fixture
async def jobs(temporal: Client) -> AsyncIterator[Jobs]:
    """Jobs on a real server and a worker that caches nothing: every workflow task replays from the start."""
    cluster = ScriptedCluster()
    queue = f"q-{uuid.uuid4().hex[:8]}"
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=list(WORKFLOWS),
        activities=[
            cluster.prepare,
            cluster.stop,
            cluster.launch,
            cluster.confirm,
            cluster.release,
            cluster.decide,
            cluster.record,
        ],
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    ):
        yield Jobs(temporal, cluster, queue)
