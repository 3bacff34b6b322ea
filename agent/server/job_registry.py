"""This module keeps the jobs of a machine by name, carries each command out once, and converts errors to statuses."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from agent.checkpoints.peers.backups import PeerBackups
from agent.jobs.host import Host
from agent.jobs.job_runner import JobRunner
from agent.launcher.fork_client import inherited_environment
from agent.monitor.inspection import RankSeen
from agent.server.idempotency import Command, RequestMemory
from agent.state.job_record import FILE as RECORD
from agent.state.job_record import JobRecord
from agent.statuses import status_of
from everstep.errors import AgentError, ConfigError, EverstepError, Fenced, UnknownJob
from everstep.model.job import JOB_NAME, REPLAY_NAME, owner_of
from everstep.model.run_id import is_older
from everstep.system.procfs import boot_id

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply", bound=Message)

logger = structlog.get_logger()


class JobRegistry:
    """The jobs of a machine by name."""

    def __init__(self, host: Host, memory: RequestMemory) -> None:
        self.host = host
        self.memory = memory
        self.runners: dict[str, JobRunner] = {}
        self.started_ns = time.time_ns()
        self._turn = asyncio.Lock()

    def ranks_seen(self) -> list[RankSeen]:
        """Return the ranks of all jobs on this machine, for inspections. Called in any thread."""
        return [
            RankSeen(runner.record.job, rank.rank, rank.pid, rank.end is None)
            for runner in list(self.runners.values())
            if not runner.record.released
            for rank in list(runner.record.of(runner.record.generation))
        ]

    def variables_seen(self) -> list[Mapping[str, str]]:
        """Return, for each job, the variables of its ranks that name interfaces. Called in any thread.

        If there is no job, the variables that ranks would have are returned.
        """
        records = [runner.record for runner in list(self.runners.values()) if not runner.record.released]
        jobs: list[Mapping[str, str]] = [record.network for record in records if record.ranks]
        return jobs or [{**self.host.sockets, **inherited_environment()}]

    def code_in_use(self) -> set[str]:
        """Return the snapshots of code that jobs on this machine run. Called in any thread."""
        records = [runner.record for runner in list(self.runners.values())]
        return {record.code for record in records if record.code and not record.released}

    def copies_of(self, job: str) -> PeerBackups | None:
        """Return a job's backups for the data port; None: the job is not on this machine. Called in any thread."""
        runner = self.runners.get(job)
        return runner.checkpoints.received if runner and not runner.record.released else None

    async def command(
        self,
        name: str,
        request: Command,
        reply_type: type[Reply],
        context: Context,
        carry_out: Callable[[], Awaitable[Reply]],
    ) -> Reply:
        """Carry a command out once for each request id; errors become statuses."""
        async with refusals(context, command=name, job=request.job, request=request.request_id):
            check_job(request.job)
            if name != "Release":
                await self._turn_to(request.job, request.run)
            return await self.memory.once(name, request, reply_type, carry_out)

    async def _turn_to(self, job: str, run: str) -> None:
        """Remove the remains of an earlier run of a job's name before a command of a newer run is carried out.

        Remains exist if the agent was down, or failed, at the end of the earlier run.

        Raises:
            Fenced: the command belongs to an older run, and the newer run is not over.
        """
        known = self.runners.get(job)
        if known is None or (run in {"", known.record.run} and not known.record.released):
            return  # this needs no lock; the end of another job may hold the lock for long
        async with self._turn:
            runner = self.runners.get(job)
            if runner is None or run in {"", runner.record.run}:
                return
            theirs = runner.record.run
            if is_older(run, theirs) and not runner.record.released:
                raise Fenced(
                    f"{self.host.machine} has run {theirs} of {job}, which is newer than {run}: commands of older runs "
                    f"are refused. If {run} was submitted later, the clock of Temporal's machine was set back: wait "
                    "until it is later again, or use another name"
                )
            if not runner.record.released:
                logger.warning("removing the remains of an earlier run", job=job, run=theirs or "unknown", newer=run)
                await self.release(runner)
            self.new_runner(job, run)

    async def release(self, runner: JobRunner) -> int:
        """End a job on this machine, and its replays; returns the bytes of memory that were freed."""
        freed = await self.end_replays(runner.record.job)
        async with runner.lock:
            freed += await runner.release()
        self.host.log.forget(runner.record.job)
        self.memory.forget(runner.record.job)
        await self.host.fork_servers.forget(runner.record.job)
        self.host.fork_servers.warm_up()
        return freed

    async def end_others_than(self, job: str) -> None:
        """End the other replays of a job before ranks of the job, or of one of its replays, start.

        A machine runs only one of them at a time.

        Raises:
            AgentError: ``job`` is a replay, and the job itself runs on this machine.
        """
        owner = self.runners.get(owner_of(job))
        if owner_of(job) != job and owner and not owner.record.released and owner.record.living():
            raise AgentError(
                f"ranks of {owner.record.job} run on {self.host.machine}: a replay must wait until they have ended"
            )
        await self.end_replays(owner_of(job), but=job)

    async def end_replays(self, job: str, *, but: str = "") -> int:
        """End the replays of a job on this machine, except ``but``; returns the bytes of memory that were freed."""
        runners = {name: runner for name, runner in self.runners.items() if owner_of(name) == job}
        replays = [runner for name, runner in runners.items() if name not in {job, but}]
        return sum([await self.release(runner) for runner in replays if not runner.record.released])

    def runner(self, job: str) -> JobRunner:
        """Return a job that was prepared and is not over.

        Raises:
            AgentError: the job is over.
            UnknownJob: the job was not prepared.
        """
        runner = self.present(job)
        if not runner.record.prepared:
            raise UnknownJob(f"{job} is not prepared on {self.host.machine}: call Prepare first")
        return runner

    def present(self, job: str) -> JobRunner:
        """Return a job that is not over. It need not be prepared, because copies of its state need no fork server.

        Raises:
            AgentError: the job is over.
            UnknownJob: the job was never on this machine.
        """
        runner = self.runners.get(job)
        if runner is None:
            raise UnknownJob(f"{job} is not prepared on {self.host.machine}: call Prepare first")
        runner.check_present()  # a late attempt must not bring the job back
        return runner

    def new_runner(self, job: str, run: str) -> JobRunner:
        """Return a job that is not over; it is registered if it is new."""
        runner = self.runners.get(job)
        if runner and not runner.record.released:
            return runner
        folder = self.host.state_dir / "jobs" / job
        self.host.disk.forget(folder / RECORD)  # from the earlier job of this name
        self.host.disk.run(("new", job), lambda: _set_aside(folder))
        record = JobRecord(job=job, run=run, boot=boot_id(), revision=runner.record.revision if runner else 0)
        runner = self.runners[job] = JobRunner(self.host, record)
        self.host.records.begin(record)
        runner.ranks.save()
        runner.mark_memory()
        return runner

    async def known(self, job: str, context: Context) -> JobRunner:
        """Return a job that was on this machine at any time; ends the rpc if there is none."""
        runner = self.runners.get(job)
        if runner is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{self.host.machine} knows no job {job!r}")
            raise AssertionError
        return runner


@contextlib.asynccontextmanager
async def refusals(context: Context, **fields: str) -> AsyncIterator[None]:
    """If the context raises an error, end the rpc with the error's status; with ``fields``, also log the error."""
    try:
        yield
    except (EverstepError, OSError) as error:
        if fields:
            logger.warning("refused", reason=str(error), **fields)
        await context.abort(status_of(error), str(error))
        raise


def _set_aside(folder: Path) -> None:
    """Keep the logs of the previous job of a name beside those of the new job, until the next job of this name."""
    if folder.exists():
        previous = folder.with_name(f"{folder.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)


def check_job(job: str) -> None:
    """Refuse a text that is not the name of a job or of a replay, because it becomes the name of folders.

    Raises:
        ConfigError: the text is not such a name.
    """
    if not (JOB_NAME.fullmatch(job) or REPLAY_NAME.fullmatch(job)):
        raise ConfigError(f"{job!r} is not a job name: use up to 30 of a-z, 0-9 and '-'")
