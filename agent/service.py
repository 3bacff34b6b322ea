"""The agent's gRPC service: each rpc of ``proto/agent/v1/agent.proto``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

import everstep
from agent import logs
from agent.client import UnknownJob
from agent.fork_client import ForkServer
from agent.processes import is_alive
from agent.records import JobRecord, RankRecord
from agent.requests import Command, RequestMemory
from agent.runner import Host, JobRunner, to_exit
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.errors import AgentError, ConfigError, EverstepError, Fenced
from everstep.job import JOB_NAME

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply", bound=Message)

PROGRESS_FLOOR_S = 0.01
PROGRESS_CEILING_S = 1.0

logger = structlog.get_logger()


class AgentService(agent_pb2_grpc.AgentServicer):
    """Serves one machine."""

    def __init__(self, host: Host, memory: RequestMemory) -> None:
        self.host = host
        self.memory = memory
        self.runners: dict[str, JobRunner] = {}
        self.started_ns = time.time_ns()

    # Coming up.

    async def recover(self) -> int:
        """Take over what an earlier agent left; returns the number of adopted ranks."""
        last_told = self.host.log.last
        for path in sorted((self.host.state_dir / "jobs").glob("*/job.json")):
            if "." in path.parent.name:
                continue
            try:
                record = JobRecord.load(path.parent)
            except (ValueError, OSError) as error:
                logger.error("a job's record is damaged and ignored", path=str(path), reason=str(error))
                continue
            self.runners[record.job] = JobRunner(self.host, record)
        servers = await self.host.fork_servers.adopt(lambda server: self.host.spawn(self._answered(server)))
        adopted = len(self._living(servers))
        self.host.log.append(agent_started=pb.AgentStarted(adopted_ranks=adopted, pid=os.getpid()))
        for job, server in servers.items():
            if job not in self.runners:
                self._rebuild(server)
        for job, runner in self.runners.items():
            runner.retell(last_told)
            if runner.record.released:
                continue
            if job in servers:
                runner.attach(servers.pop(job))
            runner.find_orphans()
            for rank in runner.record.living():
                runner.watch(rank)
            if runner.server is None and runner.record.prepared and not runner.server_is_silent():
                self.host.spawn(runner.ensure_server())
            runner.save()
        for server in servers.values():
            await server.end()
        self._sweep()
        return adopted

    def _rebuild(self, server: ForkServer) -> JobRunner:
        """A job whose record is lost: what runs is kept, and its fences."""
        logger.warning("rebuilding a job's record from its fork server", job=server.job, pid=server.pid)
        record = JobRecord(job=server.job, prepared=True, fenced=server.table["fenced"])
        runner = self.runners[server.job] = JobRunner(self.host, record)
        return runner

    async def _answered(self, server: ForkServer) -> None:
        """A fork server that was silent when this agent started answers."""
        runner = self.runners.get(server.job) if server.job else None
        if server.job and runner is None:
            runner = self._rebuild(server)
        if runner is None or runner.record.released or runner.server:
            await self.host.fork_servers.keep_or_end(server)
            return
        async with runner.lock:
            if runner.server is None:
                runner.attach(server)
                runner.find_orphans()
                runner.save()

    def _living(self, servers: dict[str, ForkServer]) -> set[int]:
        """Ranks that run, as the fork servers and the records say."""
        found = {row["pid"] for server in servers.values() for row in server.table["ranks"] if not row["exit"]}
        records = [runner.record for runner in self.runners.values() if not runner.record.released]
        known = [rank for record in records for rank in record.living()]
        return found | {rank.pid for rank in known if is_alive(rank.pid, rank.start_ticks)}

    def _sweep(self) -> None:
        """Give back the shared memory of jobs that are not here any more."""
        kept = {job for job, runner in self.runners.items() if not runner.record.released}
        for path in self.host.shm_dir.iterdir():
            if path.name not in kept:
                logger.warning("removing shared memory that no job owns", path=str(path))
                shutil.rmtree(path, ignore_errors=True)

    # Commands.

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:  # noqa: N802
        """What this machine is and what runs on it."""
        reply = pb.DescribeReply(
            machine=self.host.machine, version=everstep.__version__, started_ns=self.started_ns, pid=os.getpid()
        )
        for job, runner in self.runners.items():
            record = runner.record
            if record.released:
                continue
            server = runner.server
            reply.jobs.add(
                job=job,
                generation=record.generation,
                fenced_generation=record.fenced,
                fork_server_pid=server.pid if server and not server.lost else 0,
                ranks=self._progress(runner),
            )
        return reply

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:  # noqa: N802
        """Start the job's fork server."""
        runner = self.runners.get(request.job)
        if runner is None or runner.record.released:
            self.memory.forget(request.job)  # the replies belong to an earlier job of this name

        async def carry_out() -> pb.PrepareReply:
            runner = self._new_runner(request.job)
            async with runner.lock:
                record = runner.record
                reused = runner.server is not None and not runner.server.lost
                wanted = (request.python, dict(request.env))
                if reused and (record.python, record.env) != wanted:
                    if record.living():
                        raise AgentError(f"{request.job} runs with another interpreter or environment: stop it first")
                    await self._end_server(runner)
                    reused = False
                record.python, record.env = wanted
                record.prepared = True
                runner.save()
                server = await runner.ensure_server()
                return pb.PrepareReply(
                    fork_server_pid=server.pid, reused=reused, seconds=0.0 if reused else server.seconds
                )

        return await self._command("Prepare", request, pb.PrepareReply, context, carry_out)

    async def StartStore(self, request: pb.StartStoreRequest, context: Context) -> pb.StartStoreReply:  # noqa: N802
        """Start the rendezvous store of a generation."""

        async def carry_out() -> pb.StartStoreReply:
            runner = self._runner(request.job)
            async with runner.lock:
                store = await runner.start_store(request.generation)
            return pb.StartStoreReply(host=self.host.address, port=store.port, pid=store.pid)

        return await self._command("StartStore", request, pb.StartStoreReply, context, carry_out)

    async def Launch(self, request: pb.LaunchRequest, context: Context) -> pb.LaunchReply:  # noqa: N802
        """Start this machine's ranks of a generation."""

        async def carry_out() -> pb.LaunchReply:
            runner = self._runner(request.job)
            async with runner.lock:
                ranks = await runner.launch(request)
            started = [pb.RankProcess(rank=r.rank, pid=r.pid, forked_ns=r.forked_ns) for r in ranks]
            return pb.LaunchReply(generation=request.generation, resume_step=request.resume_step, ranks=started)

        return await self._command("Launch", request, pb.LaunchReply, context, carry_out)

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:  # noqa: N802
        """Kill and fence; return the evidence and the checkpoints."""

        async def carry_out() -> pb.StopReply:
            runner = self._new_runner(request.job)  # an unknown job gets its fence too
            async with runner.lock:
                ranks = await runner.stop(request.generation, request.grace_s)
                checkpoints = await asyncio.to_thread(held_checkpoints, runner.shm)
            evidence = [self._evidence(runner, rank) for rank in ranks]
            return pb.StopReply(ranks=evidence, checkpoints=checkpoints)

        return await self._command("Stop", request, pb.StopReply, context, carry_out)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:  # noqa: N802
        """End the job on this machine."""

        async def carry_out() -> pb.ReleaseReply:
            runner = self.runners.get(request.job)
            if runner is None or runner.record.released:
                return pb.ReleaseReply()
            async with runner.lock:
                freed = await runner.release()
            self.host.log.forget(request.job)
            self.memory.forget(request.job)
            self.host.fork_servers.warm_up()
            return pb.ReleaseReply(bytes_freed=freed)

        return await self._command("Release", request, pb.ReleaseReply, context, carry_out)

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: Context) -> pb.AcknowledgeReply:  # noqa: N802
        """Forget observations."""
        self.host.log.acknowledge(request.up_to_sequence, request.job)
        return pb.AcknowledgeReply()

    # Streams.

    async def Observe(self, request: pb.ObserveRequest, context: Context) -> AsyncIterator[pb.Observation]:  # noqa: N802
        """The observation log, then live."""
        async for found in self.host.log.follow(request.after_sequence, request.job):
            yield found

    async def Progress(self, request: pb.ProgressRequest, context: Context) -> AsyncIterator[pb.ProgressReply]:  # noqa: N802
        """Where each rank stands: on change, and once a second."""
        interval = min(max(request.interval_s, PROGRESS_FLOOR_S), PROGRESS_CEILING_S)
        sent, sent_at = b"", 0.0
        while True:
            runner = self.runners.get(request.job)
            reply = pb.ProgressReply()
            if runner:
                reply.generation = runner.record.generation
                reply.ranks.extend(self._progress(runner))
            state = reply.SerializeToString(deterministic=True)
            if state != sent or time.monotonic() - sent_at >= PROGRESS_CEILING_S:
                sent, sent_at = state, time.monotonic()
                reply.time_ns = time.time_ns()
                yield reply
            await asyncio.sleep(interval)

    async def Steps(self, request: pb.StepsRequest, context: Context) -> AsyncIterator[pb.StepsReply]:  # noqa: N802
        """Step records of one rank, or of all."""
        runner = await self._known(request.job, context)
        runner.drain()
        for rank in runner.archive.ranks() if request.rank < 0 else [request.rank]:
            for reply in runner.archive.read(rank, request.from_step):
                yield reply

    async def ReadLog(self, request: pb.ReadLogRequest, context: Context) -> AsyncIterator[pb.LogChunk]:  # noqa: N802
        """Captured output of one rank."""
        runner = await self._known(request.job, context)
        names = {pb.ReadLogRequest.STDOUT: "out", pb.ReadLogRequest.STDERR: "err"}
        wanted = {
            stream: runner.log_path(request.rank, suffix)
            for stream, suffix in names.items()
            if request.stream in (pb.ReadLogRequest.BOTH, stream)
        }
        if not any(logs.kept_files(path) for path in wanted.values()) and not request.follow:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"rank {request.rank} of {request.job} has no log on {self.host.machine}"
            )
        async for chunk in logs.read_log(wanted, request.tail_bytes, request.follow):
            yield chunk

    # Copies of training state.

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Context) -> pb.CheckpointsReply:  # noqa: N802
        """The copies that this machine holds."""
        raise NotImplementedError

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreReply:  # noqa: N802
        """Bring copies into own slots."""
        raise NotImplementedError

    async def Persist(self, request: pb.PersistRequest, context: Context) -> pb.PersistReply:  # noqa: N802
        """Write a coming step to disk."""
        raise NotImplementedError

    async def OpenExchange(self, request: pb.OpenExchangeRequest, context: Context) -> pb.OpenExchangeReply:  # noqa: N802
        """Where other agents send and fetch state."""
        raise NotImplementedError

    # Parts.

    async def _command(
        self,
        name: str,
        request: Command,
        reply_type: type[Reply],
        context: Context,
        carry_out: Callable[[], Awaitable[Reply]],
    ) -> Reply:
        log = logger.bind(command=name, job=request.job, request=request.request_id)
        try:
            if not JOB_NAME.fullmatch(request.job):
                raise ConfigError(f"{request.job!r} is not a job name: use up to 30 of a-z, 0-9 and '-'")
            return await self.memory.once(name, request, reply_type, carry_out)
        except (EverstepError, OSError) as error:
            log.warning("refused", reason=str(error))
            await context.abort(status_of(error), str(error))
            raise

    def _runner(self, job: str) -> JobRunner:
        runner = self.runners.get(job)
        if runner and runner.record.released:  # a late attempt must not bring it back
            raise AgentError(f"{job} is over on {self.host.machine}: its memory was given back")
        if runner is None or not runner.record.prepared:
            raise UnknownJob(f"{job} is not prepared on {self.host.machine}: call Prepare first")
        return runner

    def _new_runner(self, job: str) -> JobRunner:
        runner = self.runners.get(job)
        if runner and not runner.record.released:
            return runner
        folder = self.host.state_dir / "jobs" / job
        if folder.exists():  # an earlier job of this name: its logs are kept until the next one
            previous = folder.with_name(f"{job}.previous")
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        runner = self.runners[job] = JobRunner(self.host, JobRecord(job=job))
        runner.save()
        return runner

    async def _end_server(self, runner: JobRunner) -> None:
        if runner.server:
            await runner.server.end()
            runner.server = None

    async def _known(self, job: str, context: Context) -> JobRunner:
        runner = self.runners.get(job)
        if runner is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{self.host.machine} knows no job {job!r}")
            raise AssertionError
        return runner

    def _progress(self, runner: JobRunner) -> list[pb.RankProgress]:
        found = []
        for rank in runner.record.of(runner.record.generation):
            report = runner.reports.get(rank.rank, rank.generation)
            progress = pb.RankProgress(
                rank=rank.rank,
                generation=rank.generation,
                pid=rank.pid,
                alive=rank.end is None,
                exit=to_exit(rank.end) if rank.end else None,
                completed_steps=-1,
                loss=math.nan,
                grad_norm=math.nan,
            )
            if report:
                now = report.snapshot()
                progress.attached, progress.finished = now.attached, now.finished
                progress.completed_steps, progress.optimizer_steps = now.completed_steps, now.optimizer_steps
                progress.milestones.CopyFrom(pb.Milestones(**now.milestones))
                progress.tokens = runner.archive.tokens(rank.rank, rank.generation)
                if now.newest:
                    progress.loss, progress.grad_norm = now.newest.loss, now.newest.grad_norm
            found.append(progress)
        return found

    def _evidence(self, runner: JobRunner, rank: RankRecord) -> pb.RankEvidence:
        now = runner.snapshot(rank)
        said = logs.of_generation(logs.tail(runner.log_path(rank.rank, "err"), logs.SEARCHED_BYTES), rank.generation)
        return pb.RankEvidence(
            rank=rank.rank,
            generation=rank.generation,
            pid=rank.pid,
            exit=to_exit(rank.end) if rank.end else None,
            stopped_by_us=rank.stopped,
            completed_steps=now.completed_steps if now else -1,
            exception=rank.exception,
            log_tail=said[-logs.TAIL_BYTES :].decode(errors="replace"),
        )


def held_checkpoints(shm: Path) -> list[pb.HeldCheckpoint]:
    """The checkpoints in a job's shared memory, each verified by its checksum."""
    from everstep.slot_reader import held

    found = []
    for path in sorted(shm.glob("checkpoint-*")):
        rank = path.name.partition("-")[2]
        if not rank.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError):
            found += [
                pb.HeldCheckpoint(
                    rank=int(rank),
                    completed_steps=slot.completed_steps,
                    bytes=slot.bytes,
                    valid=slot.valid,
                    reason=slot.reason,
                )
                for slot in held(path)
            ]
    return found


def status_of(error: Exception) -> grpc.StatusCode:
    """The gRPC status that stands for an error; :func:`agent.client.translate` is its inverse."""
    match error:
        case Fenced():
            return grpc.StatusCode.FAILED_PRECONDITION
        case ConfigError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case UnknownJob():
            return grpc.StatusCode.NOT_FOUND
        case OSError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case _:
            return grpc.StatusCode.ABORTED
