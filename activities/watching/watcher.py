"""The watcher: it runs in every worker process, outside Temporal, and reports faults to the workflows of jobs.

It reads the agents' observation streams of every running job and judges them by the rules of
``everstep.decisions.detect.rules``. It reports to the job's workflow by an update whose id contains the generation. If
several watchers report the same fault, the server accepts only the first report. Observations are acknowledged only
after the workflow accepted the report; until then they stay in the agent's log. So no observation is lost when a worker
dies, or when no worker runs.

Jobs are independent of each other here. A job whose state cannot be read, or whose workflow does not answer, is asked
again, and all other jobs are watched meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import structlog
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.agents.other_machines import another_answers
from activities.clusters.cluster import Cluster
from activities.heartbeat import steady_ns
from activities.turns import ShareOfTime, in_turns
from activities.watching.acknowledger import Acknowledger
from activities.watching.copy_requests import ASK_S, copy_requests
from activities.watching.hang_sampler import HangSampler
from activities.watching.job_view import BARE_S, Finished, JobView
from activities.watching.save_pacer import SavePacer
from agent.client import AgentClient, AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.base.backoff import Backoff
from everstep.base.log_once import LoggedErrors
from everstep.decisions.keep.disk_schedule import Agreed
from everstep.decisions.notices import PacedJob
from everstep.errors import EverstepError
from everstep.model.incident import STILL_RUNNING, Anomaly
from everstep.model.job import JobSpec
from everstep.model.job_state import NOT_YET, JobState, job_workflow_id, jobs_query
from everstep.model.machine import Machine

log = structlog.get_logger("watcher")

LIST_S = 1.0
"""The time between two listings of the running jobs, seconds."""
RETRY_S = 0.2
"""The first wait before an agent or Temporal is asked again, seconds; the job's policy has the longest wait for a
silent agent."""
ANSWER_LIMIT = timedelta(seconds=5)
"""A job's workflow that does not answer within this time is asked again."""
ADOPT_AGAIN_S = 30.0
"""The longest wait between two questions to a workflow that does not answer, seconds."""
TICK_S = 0.5
"""The time between two evaluations of the rules that depend on time, seconds."""
STOPPED_TICK_S = 0.1
"""The time between two evaluations while the process of a rank is stopped, seconds."""
NOTIFY_AGAIN_S = 30.0
"""The interval at which agents are notified again which step is on all disks, seconds: an agent may have missed it."""
ENDS_LOGGED = 64
"""The largest number of ranks of a generation whose ends are logged separately."""

MachineEvent = Callable[[pb.Observation], asyncio.Future[None]]
"""Accepts a machine event; the future is done once the event is in the ledger."""


class Watcher:
    """Watches every running job of a task queue until it is cancelled."""

    def __init__(
        self,
        client: Client,
        agents: AgentClients,
        task_queue: str,
        machine_event: MachineEvent | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._client = client
        self._task_queue = task_queue
        self._agents = agents
        self._machine_event = machine_event
        self._cluster = cluster
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.watched: dict[str, JobView] = {}
        """Id of a job's workflow → the view of the job, for all watched jobs."""
        self._before: dict[str, JobView] = {}
        """Id of a job's workflow → the earlier view of a job that will be watched again."""
        self.reported: Counter[str] = Counter()
        """Name of an update → how many such reports were accepted."""
        self._runs: dict[str, str] = {}
        """Id of a job's workflow → its run in the newest listing."""
        self._adopting: dict[str, asyncio.Task[None]] = {}
        self._troubles = LoggedErrors()
        """Errors of workflows that do not answer which machines to watch."""
        self._failures = LoggedErrors()
        """Errors of the watch of a job."""

    async def run(self) -> None:
        """List the running jobs until cancelled, and watch each of them."""
        try:
            while True:
                with contextlib.suppress(RPCError):
                    await self._list()
                await asyncio.sleep(LIST_S)
        finally:
            tasks = [*self._tasks.values(), *self._adopting.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _list(self) -> None:
        """Watch the running jobs: start a watch again if its job has a new run, and end the watch of closed jobs."""
        listed = {}
        async for workflow in self._client.list_workflows(jobs_query(self._task_queue, 'ExecutionStatus="Running"')):
            listed[workflow.id] = workflow.run_id or ""
        for workflow_id in self._runs.keys() - listed.keys():
            self._leave(workflow_id)
        for workflow_id, run in listed.items():
            if self._runs.get(workflow_id, run) != run:
                # A new job of the same name, or continue-as-new: agents send again what was not acknowledged.
                before = self.watched.get(workflow_id)
                self._leave(workflow_id)
                if before:
                    self._before[workflow_id] = before
            self._runs[workflow_id] = run
            unwatched = workflow_id not in self._tasks or self._tasks[workflow_id].done()
            if unwatched and workflow_id not in self._adopting:
                # The answer is not awaited here, because a workflow without a worker answers late or never.
                self._adopting[workflow_id] = asyncio.create_task(self._adopt(workflow_id))

    def ensure(
        self, spec: JobSpec, machines: list[Machine], known: JobState | None = None, *, generation: int = 0
    ) -> None:
        """Watch a job at once, so that the launching worker need not wait for the next listing.

        Args:
            spec: The job's specification; a watch with another specification is replaced.
            machines: The job's machines; a watch of other machines is replaced.
            known: The answer of the job's workflow, if the workflow was asked.
            generation: The newest generation that is known to run on these machines.
        """
        workflow_id = job_workflow_id(spec.name)
        watched = before = self.watched.get(workflow_id)
        if watched and (watched.spec, watched.machines) != (spec, machines):
            self._leave(workflow_id)
        running = self._tasks.get(workflow_id)
        if running is None or running.done():
            watched = self.watched[workflow_id] = JobView(spec, machines)
            if before := before or self._before.pop(workflow_id, None):
                watched.continue_from(before)
            if known:
                _learn_from(watched, known)
            self._tasks[workflow_id] = asyncio.create_task(self._watch(watched), name=workflow_id)
        self.watched[workflow_id].machines_of = max(generation, self.watched[workflow_id].machines_of or 0)

    def _leave(self, workflow_id: str) -> None:
        self._runs.pop(workflow_id, None)
        self.watched.pop(workflow_id, None)
        self._before.pop(workflow_id, None)
        self._troubles.recovered(workflow_id)
        self._failures.recovered(workflow_id)
        for tasks in (self._tasks, self._adopting):
            if task := tasks.pop(workflow_id, None):
                task.cancel()

    async def _adopt(self, workflow_id: str) -> None:
        """Ask a job which machines to watch until it answers, and watch them; errors affect this job only."""
        handle, wait_s = self._client.get_workflow_handle(workflow_id), LIST_S
        while True:
            try:
                state = await handle.query("state", result_type=JobState, rpc_timeout=ANSWER_LIMIT)
                break
            except Exception as error:
                # The job's agents keep their observations.
                if self._troubles.is_new(workflow_id, error):
                    log.warning(
                        "a job does not answer which machines to watch; it is asked again",
                        job=workflow_id,
                        error=str(error),
                    )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, ADOPT_AGAIN_S)
        self._troubles.recovered(workflow_id)
        self._adopting.pop(workflow_id, None)  # this must be first, because ensure() may cancel the task of this name
        if state.outcome == "":
            self.ensure(state.spec, state.machines, state, generation=state.generation)

    def paced_jobs(self) -> list[PacedJob]:
        """Return the watched jobs whose pace of saves is known."""
        return [paced for job in self.watched.values() if (paced := job.paced()) is not None]

    async def _watch(self, job: JobView) -> None:
        with structlog.contextvars.bound_contextvars(job=job.spec.name):
            log.info("watching", machines=len(job.machines))
            tasks = [
                asyncio.create_task(loop(job))
                for loop in (self._judge, self._persist, self._align, self._ask_what_runs)
            ]
            if len(job.machines) == 1:
                tasks.append(asyncio.create_task(self._ask_others(job)))
            tasks.append(asyncio.create_task(HangSampler(self._agents, job).run()))
            tasks.append(asyncio.create_task(SavePacer(self._agents, job).run()))
            tasks.append(asyncio.create_task(Acknowledger(self._agents, job, self.watched).run()))
            try:
                async for machine in in_turns(job.machines):
                    tasks.append(asyncio.create_task(self._observe(job, machine)))
                    tasks.append(asyncio.create_task(self._follow(job, machine)))
                # The judge returns when the job's workflow is over; the streams never return.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                log.info("no longer watching")
            except Exception as error:
                # The next listing starts the watch again: the agents' logs still have what was not reported.
                if self._failures.is_new(job_workflow_id(job.spec.name), error):
                    log.exception("watching a job failed; it is started again")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _observe(self, job: JobView, machine: Machine) -> None:
        after, backoff = 0, Backoff(RETRY_S, job.spec.policy.silence.retry_max_s)
        while True:
            began = time.monotonic()
            request = pb.ObserveRequest(after_sequence=after, job=job.spec.name, active_findings=True)
            try:
                async for observation in self._agents.get(machine.address).observe(request):
                    after = observation.sequence or after
                    self._apply(job, machine, observation)
            except EverstepError as error:
                log.debug("agent is silent", machine=machine.name, error=str(error))
            await asyncio.sleep(backoff.next_s(lasted_s=time.monotonic() - began))

    def _apply(self, job: JobView, machine: Machine, observation: pb.Observation) -> None:
        if observation.HasField("rank_ended"):
            job.ended(machine.name, observation, steady_ns())
            rank, generation = observation.rank_ended.rank, observation.generation
            known = job.ends(generation)
            log_end = (
                log.info if known <= ENDS_LOGGED else log.debug
            )  # thousands of lines would block the event loop for seconds
            log_end("rank ended", observation=observation.id, rank=rank, generation=generation)
            if known == ENDS_LOGGED:
                log.info("further ends of ranks are not logged separately", generation=generation)
            return
        if observation.HasField("machine_finding"):
            job.found(machine.name, observation, steady_ns())
        if self._machine_event is not None and observation.sequence:
            job.acknowledgements.noted(machine.name, observation, self._machine_event(observation))

    async def _follow(self, job: JobView, machine: Machine) -> None:
        request = pb.ProgressRequest(job=job.spec.name, interval_s=TICK_S)
        backoff = Backoff(RETRY_S, job.spec.policy.silence.retry_max_s)
        while True:
            began = time.monotonic()
            with contextlib.suppress(EverstepError):
                async for reply in self._agents.get(machine.address).progress(request):
                    job.showed(machine.name, reply, steady_ns())
            await asyncio.sleep(backoff.next_s(lasted_s=time.monotonic() - began))

    async def _judge(self, job: JobView) -> None:
        pace = ShareOfTime()
        while True:
            job.woken.clear()
            pace.begin()
            verdicts = list(job.verdicts(steady_ns()))
            pace.end()
            for verdict in verdicts:
                if verdict.generation not in job.reported and not await self._report(job, verdict):
                    return
            await pace.rest()
            tick_s = STOPPED_TICK_S if job.has_stopped_ranks else TICK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(job.rest_s(tick_s, steady_ns())):
                    await job.woken.wait()

    async def _ask_what_runs(self, job: JobView) -> None:
        """Ask the job's workflow on which machines a new generation runs.

        While a machine does not know the job, also ask which generation runs, because that machine may be lost.
        """
        handle, asked_s = self._client.get_workflow_handle(job_workflow_id(job.spec.name)), time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            newer = job.newer
            if newer is None and not (job.has_bare and time.monotonic() - asked_s >= BARE_S):
                continue
            asked_s = time.monotonic()
            with contextlib.suppress(Exception):  # the question is repeated
                state = await handle.query("state", result_type=JobState, rpc_timeout=ANSWER_LIMIT)
                _learn_from(job, state)
                if newer is not None:
                    self.ensure(state.spec, state.machines, state, generation=newer)

    async def _ask_others(self, job: JobView) -> None:
        """While the only machine of a job does not answer, ask whether other machines of the cluster do."""
        while True:
            await asyncio.sleep(TICK_S)
            unheard = job.latest.unheard_s.values() if job.latest else ()
            is_silent = bool(unheard) and min(unheard) >= job.spec.policy.silence.detect_s
            job.others_answer = is_silent and await another_answers(self._agents, self._cluster, job.machines)

    async def _persist(self, job: JobView) -> None:
        """Ask all machines to write a step to disk when it is due, and report which steps all ranks have on disk."""
        last_sent: tuple[int, Agreed] | None = None
        sent_at, pace = -math.inf, ShareOfTime()
        async with copy_requests(self._agents, job.machines) as ask:
            await asyncio.sleep(TICK_S / 3)  # run at another time than the judge
            while True:
                pace.begin()
                step, for_disks = job.persist(steady_ns()), job.on_disks()
                pace.end()
                generation, agreed = for_disks
                news = agreed != Agreed() and (for_disks != last_sent or time.monotonic() - sent_at > NOTIFY_AGAIN_S)
                if step is not None or news:
                    last_sent, sent_at = for_disks, time.monotonic()
                    request = pb.PersistRequest(
                        job=job.spec.name,
                        step=step or 0,
                        whole=agreed.keep,
                        generation=generation,
                        settled=agreed.settled,
                        gone=agreed.gone,
                    )
                    ask(partial(AgentClient.persist, request=request, timeout_s=ASK_S))
                await pace.rest()
                await asyncio.sleep(TICK_S)

    async def _align(self, job: JobView) -> None:
        """Make machines back up the same steps if a machine is too slow to back up every step, or ranks drift apart."""
        last_sent, pace = None, ShareOfTime()
        async with copy_requests(self._agents, job.machines) as ask:
            await asyncio.sleep(2 * TICK_S / 3)
            while True:
                pace.begin()
                aligning = job.align(steady_ns())
                pace.end()
                if aligning:
                    generation, aligned = aligning
                    if last_sent is None or aligned.named != last_sent.named:
                        log.info("aligning backups", generation=generation, whole=aligned.whole, named=aligned.named)
                    if aligned.apart and not (last_sent and last_sent.apart):
                        log.warning("ranks drift apart", generation=generation, steps=aligned.apart)
                    last_sent = aligned
                    request = pb.AlignBackupsRequest(
                        job=job.spec.name,
                        generation=generation,
                        whole=aligned.whole,
                        settled=aligned.settled,
                        named=aligned.named,
                        apart=aligned.apart,
                    )
                    ask(partial(AgentClient.align_backups, request=request, timeout_s=ASK_S))
                await pace.rest()
                await asyncio.sleep(TICK_S)

    async def _report(self, job: JobView, verdict: Anomaly | Finished) -> bool:
        """Report to the workflow until it accepts; returns False when the job is over.

        A faulty machine is reported only once per call, so that it does not delay the report of a rank's end. The fault
        is judged again later.
        """
        generation = verdict.generation
        handle = self._client.get_workflow_handle(job_workflow_id(job.spec.name))
        name, argument, id = update_of(verdict)
        problems, backoff = LoggedErrors(), Backoff(RETRY_S, job.spec.policy.silence.retry_max_s)
        while True:
            try:
                await handle.execute_update(name, argument, id=id, result_type=str)
                break
            except WorkflowUpdateFailedError as error:
                if isinstance(verdict, Anomaly) and name == "observe":
                    return True
                if isinstance(error.cause, ApplicationError) and error.cause.type == NOT_YET:
                    return True  # the fault is reported again while it is active
                # If the run ended during the update, the next run needs the report again.
                if problems.is_new(name, error):
                    log.warning("the job refused the report, which is sent again", error=str(error.cause))
                await asyncio.sleep(backoff.next_s())
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    return False
                if problems.is_new(name, error):
                    log.warning("the report did not reach the job yet, and is sent again", error=str(error))
                if name == "observe":
                    return True
                await asyncio.sleep(RETRY_S)
        if isinstance(verdict, Anomaly):
            job.accepted(verdict, steady_ns())
        else:
            job.reported.add(generation)
        self.reported[name] += 1
        log.info("reported", verdict=name, generation=generation, observation=getattr(verdict, "id", ""))
        return True


def update_of(verdict: Anomaly | Finished) -> tuple[str, Anomaly | int, str]:
    """Return the update that reports a verdict to the job's workflow: its name, argument, and an id that is equal for
    all watchers."""
    if isinstance(verdict, Finished):
        return "finished", verdict.generation, f"finished-{verdict.generation}"
    if verdict.symptom in STILL_RUNNING:
        return "observe", verdict, f"observe-{verdict.id}"
    return "report", verdict, f"report-{verdict.generation}"


def _learn_from(job: JobView, state: JobState) -> None:
    """Apply the state of a job's workflow."""
    job.faults.known = state.observed_told
    if state.status == "running":
        job.note_running(state.generation, max(state.resume_step, 1), steady_ns())
