"""A scripted cluster. Its activities have the real names, answer as a test chooses, and note every call."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.agents.align_ranks import AlignRanks, RanksAligned
from activities.agents.await_machines import AwaitMachines
from activities.agents.check_room import CheckRoom
from activities.agents.check_version import CheckVersion, VersionChecked
from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.diagnose_machines import DiagnoseMachines
from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.read_folder import FolderFound, ReadFolder
from activities.agents.release_machines import ReleaseMachines
from activities.agents.replay_on_group import ReplayOnGroup
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from activities.agents.trace_ranks import TraceRanks
from activities.agents.vote_round import VoteRound
from activities.heartbeat import heartbeating
from activities.ledger.records import NumbersUsed
from activities.make_version import MakeVersion, VersionMade
from activities.pool.requests import AwaitStandbys, GiveMachinesBack, LeaseMachines, ReplaceMachines
from activities.read_closed_incident import ReadClosedIncident
from activities.registry import function
from activities.write_to_ledger import RecordJob, WriteConclusion
from everstep.errors import LedgerError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.diagnosis import Diagnosis
from everstep.model.evidence import Evidence, RankExit
from everstep.model.hang import HangResult
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.launch import Confirmation, Launched
from everstep.model.machine import Machine
from everstep.model.pool import GiveBack, Leased, LeaseRequest, Replaced
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun
from everstep.model.slow import SlowRound
from everstep.model.state_copy import Restored, StateCopies
from tests.activities.performing import tools
from tests.rank_ends import exited
from tests.workflows import answers, histories
from tests.workflows.asking import asked
from workflows.job import JobWorkflow
from workflows.messages import JobResult
from workflows.registry import WORKFLOWS, sandbox

MACHINES = [Machine(name="m0", address="127.0.0.11:1"), Machine(name="m1", address="127.0.0.12:1")]


def exits(step: int, *, signal: int = 9, rank: int = 1) -> list[RankExit]:
    """Return the ends of two ranks. ``rank`` ended by a signal, and the other rank was stopped."""
    return [
        exited(rank=rank, machine="m1", signal=signal, time_ns=time.time_ns(), completed_steps=step),
        RankExit(rank=1 - rank, machine="m0", signal=9, stopped_by_us=True, completed_steps=step),
    ]


def held(step: int) -> list[StateCopies]:
    """Return the copies of a step that both ranks hold."""
    return [StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=step) for rank in (0, 1)]


@dataclass
class ScriptedCluster:
    """The cluster's activities. Fields like ``evidence`` contain the answers. ``calls`` lists all effects in order."""

    calls: list[str] = field(default_factory=list)
    notes: list[WriteConclusion] = field(default_factory=list)
    records: list[RecordJob] = field(default_factory=list)
    confirms: list[ConfirmSteps] = field(default_factory=list)
    prepares: list[PrepareMachines] = field(default_factory=list)
    aligned: list[AlignRanks] = field(default_factory=list)
    launches: list[LaunchRanks] = field(default_factory=list)
    refused_launches: list[str] = field(default_factory=list)
    """The errors with which the next launches of incidents fail without a retry, in the order of launches."""
    runs: set[str] = field(default_factory=set)
    """The runs that commands named."""
    evidence: Callable[[StopRanks], Evidence] = lambda given: Evidence(
        generation=given.generation, exits=exits(20), held=held(20)
    )
    confirmation: Callable[[ConfirmSteps], Confirmation | Awaitable[Confirmation]] = answers.all_stepped
    found: Callable[[FindCheckpoints], Evidence] = lambda given: Evidence(generation=0)
    folder: FolderFound = field(default_factory=FolderFound)
    lacking: str = ""
    restored: Callable[[RestoreCheckpoints], Restored | Awaitable[Restored]] = lambda given: Restored(
        moved=given.copies, bytes=6_150_000 * len(given.copies), seconds=0.08
    )
    used: NumbersUsed = field(default_factory=NumbersUsed)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    """Machines that do not answer will answer once this event is set."""
    silent_s: float = 30.0
    """A wait for silent machines ends at once, without an answer, if its time limit is at most this, seconds."""
    leases: list[LeaseRequest] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Machines that the pool refuses to lease → the reasons."""
    given_back: list[GiveBack] = field(default_factory=list)
    standbys: list[Machine] = field(default_factory=list)
    """The machines that the pool can give as replacements."""
    replaced: dict[str, Replaced] = field(default_factory=dict)
    """Id of a request → the pool's answer."""
    made: Callable[[MakeVersion], VersionMade] = answers.made
    checked: Callable[[CheckVersion], VersionChecked] = lambda _: VersionChecked()
    alignment: RanksAligned = field(default_factory=lambda: RanksAligned(step=20))
    diagnosis: Callable[[DiagnoseMachines], Diagnosis] = answers.all_healthy
    diagnoses: list[DiagnoseMachines] = field(default_factory=list)
    traced: Callable[[TraceRanks], HangResult] = answers.nothing_seen
    replayed: Callable[[ReplayOnGroup], GroupRun] = answers.computed_alike
    voted: Callable[[VoteRound], SlowRound] = answers.even
    held: str = ""
    """Why the pool wants an operator's approval before machines leave; empty: it wants none."""
    blocked: set[str] = field(default_factory=set)
    """Calls, for example ``launch 2``. A call waits as long as it is in this set."""

    async def _pass(self, call: str) -> None:
        async with heartbeating():
            while call in self.blocked:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)

    @property
    def activities(self) -> list[Callable[..., Any]]:
        """All activities, for a worker."""
        return [*self.of_ranks, self.lease, self.replace, self.give_back, self.await_standbys]

    @property
    def of_ranks(self) -> list[Callable[..., Any]]:
        """All activities except those that ask the machine pool."""
        return [
            *(self.prepare, self.stop, self.find, self.look_at_folder, self.room, self.restore),
            *(self.launch, self.confirm, self.await_machines, self.release, self.decide, self.record),
            *(self.make_version, self.check_version, self.align, self.diagnose, self.trace),
            *(self.replay_group, self.slow_round),
            function(ReadClosedIncident, tools()),
        ]

    @activity.defn(name=PrepareMachines.name)
    async def prepare(self, given: PrepareMachines) -> float:
        self.runs.add(given.job.run)
        self.prepares.append(given)
        self.calls.append("prepare" if given.job.machines == MACHINES else f"prepare {given.job.machines[0].name}")
        if self.calls[-1] in self.blocked:
            raise ApplicationError("no fork server starts there", non_retryable=True)
        return 0.0

    @activity.defn(name=StopRanks.name)
    async def stop(self, given: StopRanks) -> Evidence:
        self.runs.add(given.job.run)
        self.calls.append(f"stop {given.generation}")
        await self._pass(self.calls[-1])
        return self.evidence(given)

    @activity.defn(name=TraceRanks.name)
    async def trace(self, given: TraceRanks) -> HangResult:
        self.calls.append(f"trace {given.generation}")
        await self._pass(self.calls[-1])
        return self.traced(given)

    @activity.defn(name=VoteRound.name)
    async def slow_round(self, given: VoteRound) -> SlowRound:
        self.calls.append(f"round {given.number}")
        await self._pass(self.calls[-1])
        return self.voted(given)

    @activity.defn(name=FindCheckpoints.name)
    async def find(self, given: FindCheckpoints) -> Evidence:
        self.calls.append("find" if given.at is None else f"find {given.at}")
        return self.found(given)

    @activity.defn(name=ReadFolder.name)
    async def look_at_folder(self, given: ReadFolder) -> FolderFound:
        self.calls.append(f"folder {given.path}")
        return self.folder

    @activity.defn(name=CheckRoom.name)
    async def room(self, given: CheckRoom) -> str:
        self.calls.append("room")
        return self.lacking

    @activity.defn(name=RestoreCheckpoints.name)
    async def restore(self, given: RestoreCheckpoints) -> Restored:
        self.runs.add(given.job.run)
        self.calls.append(
            "restore " + ", ".join(f"{one.ranks.first} from {one.tier} on {one.machine}" for one in given.copies)
        )
        answer = self.restored(given)
        return await answer if isinstance(answer, Awaitable) else answer

    @activity.defn(name=LaunchRanks.name)
    async def launch(self, given: LaunchRanks) -> Launched:
        self.runs.add(given.job.run)
        folder = f" of {given.reshard_from}" if given.reshard_from else ""
        self.calls.append(f"launch {given.generation} from {given.resume_step}{folder}")
        self.launches.append(given)
        await self._pass(f"launch {given.generation}")
        if given.generation > 1 and self.refused_launches:
            raise ApplicationError(self.refused_launches.pop(0), non_retryable=True)
        return Launched(
            generation=given.generation,
            resume_step=given.resume_step,
            started_ns=time.time_ns(),
            backups="every backup is outside its rank's groups",
        )

    @activity.defn(name=ConfirmSteps.name)
    async def confirm(self, given: ConfirmSteps) -> Confirmation:
        self.calls.append(f"confirm {given.launched.generation}")
        self.confirms.append(given)
        await self._pass(self.calls[-1])
        answer = self.confirmation(given)
        return await answer if isinstance(answer, Awaitable) else answer

    @activity.defn(name=AwaitMachines.name)
    async def await_machines(self, given: AwaitMachines) -> None:
        names = [machine.name for machine in given.machines]
        self.calls.append(f"await {', '.join(names)}")
        if given.patience_s <= self.silent_s and not self.back.is_set():
            raise ApplicationError("they stay silent", non_retryable=True)
        async with heartbeating():
            await self.back.wait()

    @activity.defn(name=ReleaseMachines.name)
    async def release(self, given: ReleaseMachines) -> int:
        self.runs.add(given.job.run)
        self.calls.append("release")
        return 0

    @activity.defn(name=MakeVersion.name)
    async def make_version(self, given: MakeVersion) -> VersionMade:
        self.calls.append(f"make {given.request.code}")
        await self._pass("make")
        return self.made(given)

    @activity.defn(name=CheckVersion.name)
    async def check_version(self, given: CheckVersion) -> VersionChecked:
        self.calls.append(f"check {given.job.spec.version}")
        await self._pass("check")
        return self.checked(given)

    @activity.defn(name=AlignRanks.name)
    async def align(self, given: AlignRanks) -> RanksAligned:
        self.calls.append(f"align {given.generation}")
        self.aligned.append(given)
        await self._pass("align")
        return self.alignment

    @activity.defn(name=DiagnoseMachines.name)
    async def diagnose(self, given: DiagnoseMachines) -> Diagnosis:
        self.calls.append("diagnose")
        self.diagnoses.append(given)
        await self._pass("diagnose")
        return self.diagnosis(given)

    @activity.defn(name=ReplayOnGroup.name)
    async def replay_group(self, given: ReplayOnGroup) -> GroupRun:
        self.calls.append(f"replay {given.group}")
        await self._pass(f"replay {given.group}")
        return self.replayed(given)

    @activity.defn(name=LeaseMachines.name)
    async def lease(self, given: LeaseMachines) -> Leased:
        self.leases.append(given.request)
        await self._pass("lease")
        return Leased(refused=self.refused)

    @activity.defn(name=GiveMachinesBack.name)
    async def give_back(self, given: GiveMachinesBack) -> int:
        self.given_back.append(given.request)
        return 0

    @activity.defn(name=ReplaceMachines.name)
    async def replace(self, asked: ReplaceMachines) -> Replaced:
        given = asked.request
        self.calls.append(f"replace {', '.join(one.machine for one in given.evict)}")
        await self._pass("replace")
        if self.held and not all(one.approved_by for one in given.evict):
            return Replaced(why=self.held, held=self.held)
        if given.id not in self.replaced:
            if len(self.standbys) < len(given.evict):
                known = {machine.name: machine for machine in given.keep}
                stay = {name: known[old] for name, old in given.back.items()}
                self.replaced[given.id] = Replaced(machines=stay, why="no standby is left")
            else:
                machines = {one.machine: self.standbys.pop(0) for one in given.evict}
                self.replaced[given.id] = Replaced(machines=machines)
        return self.replaced[given.id]

    @activity.defn(name=AwaitStandbys.name)
    async def await_standbys(self, given: AwaitStandbys) -> None:
        self.calls.append(f"await {given.count} to spare")
        async with heartbeating():
            while len(self.standbys) < given.count:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)

    @activity.defn(name=WriteConclusion.name)
    async def decide(self, given: WriteConclusion) -> None:
        if "ledger" in self.blocked:
            raise LedgerError("the ledger is away")
        self.notes.append(given)

    @activity.defn(name=RecordJob.name)
    async def record(self, given: RecordJob) -> NumbersUsed:
        if "records" in self.blocked:
            raise LedgerError("the ledger is away")
        self.records.append(given)
        return self.used


@dataclass
class Jobs:
    """Starts jobs on the scripted cluster."""

    client: Client
    cluster: ScriptedCluster
    queue: str

    async def start(
        self, state: dict[str, Any] | None = None, checkpoint: CheckpointPolicy | None = None, **policy: Any
    ) -> WorkflowHandle[JobWorkflow, JobResult]:
        """Start a job of two ranks on two machines.

        Args:
            state: More fields of its ``JobState``. If it has ``versions``, the last version runs.
            checkpoint: Its checkpoint policy.
            policy: Groups of its recovery policy.
        """
        name = f"job-{uuid.uuid4().hex[:8]}"
        quick = {
            "retry": {"backoff_initial_s": 0.05, "backoff_max_s": 0.05},
            "storage": {"wait_initial_s": 0.05, "wait_max_s": 0.05, "tries": 3},
        }
        spec = JobSpec(
            name=name,
            script="/job.py",
            machines=2,
            version=len((state or {}).get("versions", [])),
            checkpoint=checkpoint or CheckpointPolicy(),
            policy=RecoveryPolicy.model_validate(
                {**policy, **{group: {**table, **policy.get(group, {})} for group, table in quick.items()}}
            ),
        )
        return await self.client.start_workflow(
            JobWorkflow.run,
            JobState(spec=spec, machines=MACHINES, **(state or {})),
            id=job_workflow_id(name),
            task_queue=self.queue,
        )

    async def running(self, *args: Any, **kwargs: Any) -> WorkflowHandle[JobWorkflow, JobResult]:
        """Start a job like :meth:`start`, and wait until it runs."""
        handle = await self.start(*args, **kwargs)
        await self.until(handle, lambda state: state.status == "running")
        return handle

    async def until_runs(self, handle: WorkflowHandle[JobWorkflow, JobResult], generation: int) -> JobState:
        """Wait until a generation of the job runs."""
        return await self.until(handle, lambda state: state.status == "running" and state.generation == generation)

    async def until(self, handle: WorkflowHandle[JobWorkflow, JobResult], ok: Callable[[JobState], bool]) -> JobState:
        """Wait until the job's state is as wanted, and return the state. The wait has no time limit of its own."""
        state: JobState = await asked(handle, "state", ok, JobState)
        return state

    @property
    def report(self) -> IncidentReport:
        """The newest report of an incident in the ledger."""
        return next(note.report for note in reversed(self.cluster.notes) if note.report)

    async def page(self, handle: WorkflowHandle[Any, Any]) -> str:
        """Return the page of a job or an incident in the Web UI."""
        found: WorkflowMetadata = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
        return str(found.current_details)


def anomaly(generation: int = 1, *, symptom: Symptom = Symptom.CRASH) -> Anomaly:
    """Return a report that rank 1 ended by SIGKILL."""
    return Anomaly(
        id=f"m1-{generation}",
        generation=generation,
        symptom=symptom,
        headline="rank 1 on m1 ended by SIGKILL",
        ranks=[1],
        machines=["m1"],
        seen_ns=time.time_ns(),
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for ``make histories``."""
    parser.addoption("--record-histories", action="store_true", help="store the histories that tests are marked with")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let marked tests record the histories that their marks name, if the option is given."""
    if config.getoption("--record-histories"):
        for item in items:
            if isinstance(item, pytest.Function) and item.get_closest_marker("history"):
                item.fixturenames.insert(0, "recorded")


@pytest.fixture
async def recorded(request: pytest.FixtureRequest, temporal: Client) -> AsyncIterator[None]:
    """After the test, store the histories that its marks name."""
    since = datetime.now(UTC)
    yield
    marker = request.node.get_closest_marker("history")
    await histories.record(temporal, marker.args, since)


@pytest.fixture
async def jobs(temporal: Client) -> AsyncIterator[Jobs]:
    """Jobs on a real server. The worker caches no runs, so each workflow task replays the history."""
    async with jobs_on(temporal) as found:
        yield found


@contextlib.asynccontextmanager
async def jobs_on(temporal: Client) -> AsyncIterator[Jobs]:
    """Yield jobs on any server. The worker caches no runs."""
    cluster, queue, flows = ScriptedCluster(), f"q-{uuid.uuid4().hex[:8]}", list(WORKFLOWS)
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=flows,
        activities=cluster.activities,
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    ):
        yield Jobs(temporal, cluster, queue)
