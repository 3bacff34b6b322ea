"""Look at machines: the pool's poll of which machines exist, which jobs run where, and whether idle machines are
healthy.

A result that the poll cannot get is reported as unknown, and does not delay the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.activity import Activity, Bounds, within
from activities.clusters.cluster import Listing
from activities.heartbeat import Say, request_id
from activities.turns import gathered
from everstep.decisions.pool.unchanged import without_unchanged
from everstep.errors import EverstepError, LedgerError
from everstep.model.finding import Health, worst_first
from everstep.model.job_state import JobState, job_workflow_id, jobs_query
from everstep.model.machine import Machine
from everstep.model.pool import PollAnswers, PollQuestions, PoolReturn, RunningJob, ToClean
from everstep.model.version import CodeVersion

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from activities.tools import Tools
    from agent.v1 import agent_pb2 as pb

LIMIT = timedelta(minutes=2)
"""The time limit of a poll. A poll that exceeds it is given up, because the next poll may succeed."""
ANSWER_S = 3.0
"""A machine that does not answer within this time cannot be used now, seconds."""
RELEASE_S = 30.0
"""The time limit for the release of what a job left on a machine, seconds."""
MACHINES_AT_ONCE = 64
"""The largest number of machines that are asked at the same time."""
JOBS_AT_ONCE = 8
"""The largest number of jobs that are asked at the same time."""
JOB_ANSWER = timedelta(seconds=5)
"""The machines of a job that does not answer within this time are unknown."""


RETURNED = "returned"
"""The kind of the ledger's event of a machine that left quarantine because it passed its tests."""

T = TypeVar("T")


@dataclass(slots=True)
class _Jobs:
    """The jobs of a cluster and their machines, as far as they are known."""

    running: list[RunningJob] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why the running jobs are not known; empty: they are."""

    def have_left(self, remains: ToClean) -> bool:
        """Return whether the job is known to have left the machine. Until then its ranks may still step there, and its
        incident must stop them."""
        if remains.job in self.over:
            return True
        machine, jobs = remains.machine.name, [job for job in self.running if job.job == remains.job]
        return any(job.run != remains.run or machine not in {m.name for m in job.machines} for job in jobs)


class LookAtMachines(Activity[PollAnswers]):
    """Poll once: which machines exist, which jobs run where, and whether the idle machines are healthy."""

    name = "Look at machines"

    request: PollQuestions
    known: int
    """The number of machines that the pool knows, for the timeline."""

    def line(self) -> str:
        return f"{self.known} machines"

    def bounds(self) -> Bounds:
        return within(LIMIT)

    async def perform(self, tools: Tools, say: Say) -> PollAnswers:
        listing, problem = await self._list(tools)
        asked = {machine.name: machine for machine in self.request.idle}
        if self.request.fresh and listing is not None:
            asked |= {machine.name: machine for machine in listing.machines}
        described = await _of_each(asked.values(), lambda machine: self._describe(tools, machine))
        there = {job.job for reply in described.values() if not isinstance(reply, str) for job in reply.jobs}
        jobs = await _ask_jobs(activity.client(), activity.info().task_queue, {*self.request.leased, *there})
        remains = {one.machine.name: one for one in self.request.clean if jobs.have_left(one)}
        found = await _of_each(
            self.request.idle,
            lambda machine: self._ask(tools, machine, described[machine.name], remains.get(machine.name)),
        )
        silent = [f"job {name} does not answer on which machines it runs: {why}" for name, why in jobs.unknown.items()]
        unwritten = await write_returned(tools.ledger, self.request.returned)
        problems = [problem, jobs.problem, *silent, unwritten]
        answers = PollAnswers(
            machines=listing.machines if listing else None,
            standbys=listing.standbys if listing else 0,
            at_most=listing.at_most if listing else 0,
            jobs=jobs.running,
            over=jobs.over,
            unknown=list(jobs.unknown),
            listed=not jobs.problem,
            faults={name: fault for name, (fault, _) in found.items() if fault},
            cleaned=[name for name, (_, clean) in found.items() if clean],
            written=[] if unwritten else self.request.returned,
            problem="; ".join(problem for problem in problems if problem)[:500],
        )
        return without_unchanged(answers, self.request.before)

    async def _list(self, tools: Tools) -> tuple[Listing | None, str]:
        if tools.cluster is None:
            return None, ""
        try:
            return await tools.cluster.list(), ""
        except EverstepError as error:
            return None, f"the machines of the cluster are not known: {error}"

    async def _describe(self, tools: Tools, machine: Machine) -> pb.DescribeReply | str:
        """Return a machine's description of itself, or why it cannot be used."""
        try:
            described = await tools.agents.get(machine.address).describe(timeout_s=ANSWER_S)
        except EverstepError as error:
            return f"it does not answer: {error}"[:200]
        if described.machine != machine.name:
            return f"the agent at {machine.address} belongs to {described.machine}"
        return described

    async def _ask(
        self, tools: Tools, machine: Machine, described: pb.DescribeReply | str, remains: ToClean | None
    ) -> tuple[str, bool]:
        """Release what is left of the job from which a machine was evicted. Return why the machine cannot be used
        (empty: it can), and whether nothing of that job is left."""
        from agent.v1 import agent_pb2 as pb

        if isinstance(described, str):
            return described, False
        agent, left = tools.agents.get(machine.address), {job.job: job for job in described.jobs}
        try:
            if remains is not None and remains.job in left and left[remains.job].run in {"", remains.run}:
                await agent.release(
                    pb.ReleaseRequest(request_id=f"{request_id()}/{machine.name}", job=remains.job, run=remains.run),
                    timeout_s=RELEASE_S,
                )
                del left[remains.job]
            alive = [job for job, known in left.items() if any(rank.alive for rank in known.ranks)]
            if alive:
                return f"ranks of job {', '.join(sorted(alive)[:3])} run there", remains is not None
            if described.warm.problem:  # the libraries cannot be imported, or no process can be forked
                return f"no fork server is ready: {described.warm.problem}"[:200], remains is not None
            return _fault_of(await agent.inspect(timeout_s=ANSWER_S)), remains is not None
        except EverstepError as error:
            return f"its agent refuses a request: {error}"[:200], False


async def write_returned(ledger: Ledger, returned: Sequence[PoolReturn]) -> str:
    """Write into the ledger which machines left quarantine; returns why that failed, or an empty text."""
    from activities.ledger.ledger import Ledger
    from activities.ledger.records import MachineEventRecord

    events = [
        MachineEventRecord(
            observation=f"pool-{one.machine}-{one.time_ns}",
            machine=one.machine,
            job=one.job,
            time_ns=one.time_ns,
            kind=RETURNED,
            text="it passed its tests and left quarantine",
        )
        for one in returned
    ]
    try:
        if events:
            await ledger.call(Ledger.machine_events_seen, events)
    except LedgerError as error:
        return f"the ledger does not have the machines that left quarantine: {error}"
    return ""


async def _of_each(machines: Iterable[Machine], ask: Callable[[Machine], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Return machine → its answer; a limited number of machines is asked at the same time."""
    room, listed = asyncio.Semaphore(MACHINES_AT_ONCE), list(machines)

    async def in_room(machine: Machine) -> T:
        async with room:
            return await ask(machine)

    answers = await gathered(map(in_room, listed))
    return {machine.name: answer for machine, answer in zip(listed, answers, strict=True)}


def _fault_of(reply: pb.InspectReply) -> str:
    """Return the worst fault that inspections report; empty: they report no fault, or the result is unknown."""
    from agent.reporting.observations import finding_of

    found = worst_first(finding_of(one) for state in reply.inspections for one in state.findings)
    return next((f"{one.reason}: {one.headline}"[:200] for one in found if one.verdict is Health.FAULTY), "")


async def _ask_jobs(client: Client, task_queue: str, leased: Iterable[str]) -> _Jobs:
    """Return where the jobs of a cluster run. Jobs with leases are asked even if Temporal's list does not have them
    yet."""
    names = dict.fromkeys(leased)
    jobs = _Jobs()
    try:
        async for workflow in client.list_workflows(jobs_query(task_queue, 'ExecutionStatus="Running"')):
            names[workflow.id.removeprefix("job/")] = None
    except RPCError as error:
        jobs.problem = f"the jobs that run could not be listed: {error}"[:200]
    room = asyncio.Semaphore(JOBS_AT_ONCE)

    async def ask(name: str) -> None:
        handle = client.get_workflow_handle(job_workflow_id(name))
        async with room:
            try:
                described = await handle.describe(rpc_timeout=JOB_ANSWER)
                if described.status != WorkflowExecutionStatus.RUNNING:
                    jobs.over.append(name)
                    return
                state: JobState = await handle.query("state", result_type=JobState, rpc_timeout=JOB_ANSWER)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    jobs.over.append(name)
                else:
                    jobs.unknown[name] = str(error)[:200]
            except Exception as error:  # a job of another release, or with payloads that cannot be read
                jobs.unknown[name] = f"{type(error).__name__}: {error}"[:200]
            else:
                jobs.running.append(
                    RunningJob(
                        job=name,
                        run=state.run,
                        machines=state.machines,
                        launched=state.launched,
                        settled=state.status == "running",
                        version=CodeVersion.of(state.spec).id if state.spec.code else "",
                    )
                )

    await gathered(map(ask, names))
    return jobs
