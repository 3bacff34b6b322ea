"""The watcher: one in every worker process, outside Temporal.

It holds the agents' observation streams of every running job, judges them by
the pure rules of ``everstep.decisions.watch`` and reports to the job's workflow
by an update whose id is the generation's: when several watchers report the same
fault, the server lets one through. Observations are acknowledged only after the
workflow took the report; an observation that nobody heard waits in the agent's
log. So a dead worker leaves no gap as long as another one lives, and loses
nothing when none does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from temporalio.client import Client, WorkflowQueryFailedError, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from activities.convert import seen_of
from agent.client import AgentPool
from agent.v1 import agent_pb2 as pb
from everstep.decisions.watch import Finished, Seen, StallRule, judge_exits, stall_anomaly
from everstep.errors import AgentError
from everstep.incident import Anomaly
from everstep.job import JobSpec
from everstep.job_state import JobState, job_workflow_id
from everstep.machine import Machine

log = structlog.get_logger("watcher")

LIST_S = 1.0
"""Between two listings of the running jobs, seconds (ours)."""
RETRY_S = 0.2
TICK_S = 0.5
"""Between two looks at the rules that depend on time, seconds (ours)."""

SILENT_S = 10.0
"""An agent that said nothing for this long, although it speaks every second, is named in a stall (ours)."""

MachineEvent = Callable[[pb.Observation], None]


@dataclass(slots=True)
class _Watched:
    """What a watcher knows of one job; all of it can be learned again from the agents."""

    spec: JobSpec
    machines: list[Machine]
    ends: dict[int, dict[int, Seen]] = field(default_factory=dict)
    """Generation → rank → end."""
    newest: dict[str, dict[int, int]] = field(default_factory=dict)
    """Machine → generation → newest sequence number."""
    reported: set[int] = field(default_factory=set)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rank → (generation, steps)."""
    heard: dict[str, float] = field(default_factory=dict)
    """Machine → when its agent said anything, seconds of the loop's clock."""
    stall: dict[int, StallRule] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Watcher:
    """Watches every running job until it is cancelled."""

    def __init__(self, client: Client, agents: AgentPool, machine_event: MachineEvent | None = None) -> None:
        self._client = client
        self._agents = agents
        self._machine_event = machine_event
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watched: dict[str, _Watched] = {}
        self._runs: dict[str, str] = {}
        """Job's workflow → the run that was seen in the newest listing."""

    async def run(self) -> None:
        """List the running jobs again and again, and watch each of them."""
        try:
            while True:
                with contextlib.suppress(RPCError):
                    await self._list()
                await asyncio.sleep(LIST_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _list(self) -> None:
        """Watch what runs, anew where a name was taken by another run, and no longer what is over."""
        listed = {}
        async for found in self._client.list_workflows('WorkflowType="Job" AND ExecutionStatus="Running"'):
            listed[found.id] = found.run_id or ""
        for over in self._runs.keys() - listed.keys():
            self._leave(over)
        for workflow_id, run in listed.items():
            if self._runs.get(workflow_id, run) != run:
                # Another job of the same name, or continue-as-new: the agents tell again what nobody acknowledged.
                self._leave(workflow_id)
            self._runs[workflow_id] = run
            if workflow_id not in self._tasks or self._tasks[workflow_id].done():
                await self._adopt(workflow_id)

    def ensure(self, spec: JobSpec, machines: list[Machine], known: JobState | None = None) -> None:
        """Watch a job now: the launching worker need not wait for the next listing.

        Args:
            spec: the job's; a watch that goes by another one is left.
            machines: where it runs, likewise.
            known: what its workflow says, where it was asked.
        """
        workflow_id = job_workflow_id(spec.name)
        watched = self._watched.get(workflow_id)
        if watched and (watched.spec, watched.machines) != (spec, machines):
            self._leave(workflow_id)
        running = self._tasks.get(workflow_id)
        if running is None or running.done():
            watched = self._watched[workflow_id] = _Watched(spec, machines)
            if known and known.status == "running":
                # It stepped already: should no agent ever answer again, the silence is noticed all the same.
                watched.steps[0] = (known.generation, max(known.resume_step, 1))
            self._tasks[workflow_id] = asyncio.create_task(self._watch(watched), name=workflow_id)

    def _leave(self, workflow_id: str) -> None:
        self._runs.pop(workflow_id, None)
        self._watched.pop(workflow_id, None)
        if task := self._tasks.pop(workflow_id, None):
            task.cancel()

    async def _adopt(self, workflow_id: str) -> None:
        try:
            state = await self._client.get_workflow_handle(workflow_id).query("state", result_type=JobState)
        except (RPCError, WorkflowQueryFailedError) as error:
            # Asked again at the next listing; its agents keep what they saw.
            log.warning("a job cannot say yet what to watch", workflow=workflow_id, error=str(error))
            return
        if state.outcome == "":
            self.ensure(state.spec, state.machines, state)

    async def _watch(self, job: _Watched) -> None:
        with structlog.contextvars.bound_contextvars(job=job.spec.name):
            log.info("watching", machines=len(job.machines))
            tasks = [asyncio.create_task(self._judge(job))]
            for machine in job.machines:
                tasks.append(asyncio.create_task(self._observe(job, machine)))
                tasks.append(asyncio.create_task(self._follow(job, machine)))
            try:
                # The judge returns when the job's workflow is over; the streams never do.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                log.info("no longer watching")
            except Exception:
                # The next listing begins again: what was not reported yet is still in the agents' logs.
                log.exception("watching failed; it begins anew")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _observe(self, job: _Watched, machine: Machine) -> None:
        after = 0
        while True:
            request = pb.ObserveRequest(after_sequence=after, job=job.spec.name)
            try:
                async for observation in self._agents.get(machine.address).observe(request):
                    after = observation.sequence
                    self._take(job, machine, observation)
            except AgentError as error:
                log.debug("agent is silent", machine=machine.name, error=str(error))
            await asyncio.sleep(RETRY_S)

    def _take(self, job: _Watched, machine: Machine, observation: pb.Observation) -> None:
        if observation.HasField("rank_exited"):
            generation = observation.generation
            job.ends.setdefault(generation, {})[observation.rank_exited.rank] = seen_of(observation)
            job.newest.setdefault(machine.name, {})[generation] = observation.sequence
            log.info("rank ended", observation=observation.id, rank=observation.rank_exited.rank, generation=generation)
            job.woken.set()
        elif self._machine_event is not None:
            self._machine_event(observation)

    async def _follow(self, job: _Watched, machine: Machine) -> None:
        request = pb.ProgressRequest(job=job.spec.name, interval_s=TICK_S)
        while True:
            with contextlib.suppress(AgentError):
                async for reply in self._agents.get(machine.address).progress(request):
                    job.heard[machine.name] = asyncio.get_running_loop().time()
                    for rank in reply.ranks:
                        job.steps[rank.rank] = (rank.generation, max(rank.completed_steps, rank.optimizer_steps))
            await asyncio.sleep(RETRY_S)

    async def _judge(self, job: _Watched) -> None:
        world_size = job.spec.topology().world_size
        while True:
            for generation, ends in sorted(job.ends.items()):
                if generation in job.reported:
                    continue
                verdict = judge_exits(
                    generation,
                    list(ends.values()),
                    world_size=world_size,
                    now_ns=time.time_ns(),
                    policy=job.spec.policy,
                )
                if verdict is not None and not await self._report(job, verdict):
                    return
            stalled = self._stalled(job)
            if stalled is not None and not await self._report(job, stalled):
                return
            job.woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await job.woken.wait()

    def _stalled(self, job: _Watched) -> Anomaly | None:
        if not job.steps:
            return None
        generation = max(found for found, _ in job.steps.values())
        if generation in job.reported:
            return None
        counts = [steps for found, steps in job.steps.values() if found == generation]
        now_ns = time.time_ns()
        quiet_s = job.stall.setdefault(generation, StallRule(job.spec.policy)).observe(sum(counts), now_ns)
        if quiet_s is None:
            return None
        now = asyncio.get_running_loop().time()
        silent = [m.name for m in job.machines if now - job.heard.get(m.name, -math.inf) > SILENT_S]
        return stall_anomaly(
            generation, job=job.spec.name, quiet_s=quiet_s, step=max(counts), now_ns=now_ns, silent=silent
        )

    async def _report(self, job: _Watched, verdict: Anomaly | Finished) -> bool:
        """Tell the workflow, until it took it; returns False when the job is over."""
        generation = verdict.generation
        handle = self._client.get_workflow_handle(job_workflow_id(job.spec.name))
        name, argument = ("report", verdict) if isinstance(verdict, Anomaly) else ("finished", generation)
        while True:
            try:
                await handle.execute_update(name, argument, id=f"{name}-{generation}", result_type=str)
                break
            except WorkflowUpdateFailedError:
                # The run ended while the update was under way: a next run has to be told again.
                await asyncio.sleep(RETRY_S)
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    return False
                log.warning("the job did not take the report yet", error=str(error))
                await asyncio.sleep(RETRY_S)
        job.reported.add(generation)
        log.info("reported", verdict=name, generation=generation, observation=getattr(verdict, "id", ""))
        await self._acknowledge(job, generation)
        return True

    async def _acknowledge(self, job: _Watched, generation: int) -> None:
        for machine in job.machines:
            heard = [seq for found, seq in job.newest.get(machine.name, {}).items() if found <= generation]
            if heard:
                request = pb.AcknowledgeRequest(up_to_sequence=max(heard), job=job.spec.name)
                with contextlib.suppress(AgentError):
                    await self._agents.get(machine.address).acknowledge(request)
