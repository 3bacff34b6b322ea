"""This module serves the rpcs for copies of training state."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import structlog

from agent.checkpoints.job_checkpoints import JobCheckpoints
from agent.checkpoints.tiers import storage_check
from agent.checkpoints.tiers.listing import root_of, unlisted_disk
from agent.jobs.job_runner import JobRunner, run_in_memory
from agent.jobs.variables import read_variables
from agent.server.job_registry import Context, JobRegistry, check_job, refusals
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.errors import AgentError, ConfigError, CorruptCheckpoint, EverstepError
from everstep.slots.checksum import hashing_threads

MOST_RESTORES = 8
"""The largest number of shards that a Restore copies at the same time."""
DISK_PATIENCE_S = 5.0
"""The longest time that a Stop waits for a disk, seconds."""

logger = structlog.get_logger()


class CheckpointsService(agent_pb2_grpc.AgentServicer):
    """Serves Checkpoints, CheckStorage, Restore, Persist, AlignBackups, PaceSaves and OpenExchange."""

    def __init__(self, jobs: JobRegistry) -> None:
        self.jobs = jobs
        self.host = jobs.host

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Context) -> pb.CheckpointsReply:  # noqa: N802
        """List the copies that this machine holds, in all tiers. The job need not be known to this agent."""
        async with refusals(context):
            check_job(request.job)
            runner = self.jobs.runners.get(request.job)
            run = run_in_memory(self.host.shm_dir / request.job)
            copies = (
                runner.checkpoints
                if runner
                else JobCheckpoints(self.host.place(request.job, run), self.host.exchange, 0)
            )
            verify = request.verify
            memory, below = await asyncio.gather(
                asyncio.to_thread(copies.in_memory, verify_own=verify, verify_backups=verify),
                self.host.reads.do(lambda: copies.tiers.held(request)),
            )
        return pb.CheckpointsReply(checkpoints=[*memory, *below])

    async def CheckStorage(self, request: pb.CheckStorageRequest, context: Context) -> pb.CheckStorageReply:  # noqa: N802
        """Check whether checkpoints can be written to their locations; storage that hangs is not judged."""
        async with refusals(context):
            check_job(request.job)
        checks = storage_check.checks(request.job, request.disk_path, request.remote_url)
        missing = ""
        try:
            await asyncio.to_thread(read_variables, request.env_from, request.env_file, self.host.machine)
        except ConfigError as error:
            missing = str(error)
        return pb.CheckStorageReply(problems=await storage_check.problems(checks), missing=missing)

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreReply:  # noqa: N802
        """Copy states into own slots, and verify them."""

        async def carry_out() -> pb.RestoreReply:
            runner = self.jobs.present(request.job)
            check_restore(request)
            async with runner.lock:
                runner.check_present()
                living = {rank.rank for rank in runner.record.living()} & {shard.rank for shard in request.shards}
                if living:
                    raise AgentError(f"rank {min(living)} still lives and writes its slots: stop it first")
                return pb.RestoreReply(shards=await self._restore(runner, request))

        return await self.jobs.command("Restore", request, pb.RestoreReply, context, carry_out)

    async def _restore(self, runner: JobRunner, request: pb.RestoreRequest) -> list[pb.ShardRestored]:
        loop, fenced = asyncio.get_running_loop(), runner.record.fenced
        threads = hashing_threads(min(len(request.shards), MOST_RESTORES))

        def one(shard: pb.ShardSource) -> pb.ShardRestored:
            began = time.monotonic()
            reply = pb.ShardRestored(rank=shard.rank)
            try:
                reply.bytes = runner.checkpoints.restore(shard, request.checkpoint, fenced, threads)
                reply.ok = True
            except (EverstepError, OSError) as error:
                reply.damaged, reply.reason = isinstance(error, CorruptCheckpoint), str(error)
                logger.warning("a copy was not restored", job=request.job, rank=shard.rank, reason=str(error))
            reply.seconds = time.monotonic() - began
            return reply

        pool = ThreadPoolExecutor(MOST_RESTORES, thread_name_prefix="restore")
        try:
            return list(await asyncio.gather(*(loop.run_in_executor(pool, one, shard) for shard in request.shards)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # the threads need this loop, so the loop must not wait

    async def Persist(self, request: pb.PersistRequest, context: Context) -> pb.PersistReply:  # noqa: N802
        """Write a future step to disk too."""
        runner = await self.jobs.known(request.job, context)
        runner.checkpoints.persist(request)
        return pb.PersistReply()

    async def AlignBackups(self, request: pb.AlignBackupsRequest, context: Context) -> pb.AlignBackupsReply:  # noqa: N802
        """Back up the step that all machines back up."""
        (await self.jobs.known(request.job, context)).checkpoints.align(request)
        return pb.AlignBackupsReply()

    async def PaceSaves(self, request: pb.PaceSavesRequest, context: Context) -> pb.PaceSavesReply:  # noqa: N802
        """Ask the ranks to save after another number of steps."""
        (await self.jobs.known(request.job, context)).ranks.pace_saves(request)
        return pb.PaceSavesReply()

    async def OpenExchange(self, request: pb.OpenExchangeRequest, context: Context) -> pb.OpenExchangeReply:  # noqa: N802
        """Return the addresses and the token with which another agent sends and fetches the job's state."""
        async with refusals(context):
            check_job(request.job)
            if self.jobs.copies_of(request.job) is None:
                self.jobs.runner(request.job)
            if (run := self.jobs.runners[request.job].record.run) != request.run:
                raise AgentError(
                    f"{self.host.machine} has run {run or 'unknown'} of {request.job}, and {request.machine} asks for "
                    f"{request.run or 'an unknown one'}"
                )
        return self.host.exchange.opened(request.job)

    async def copies_after_stop(self, runner: JobRunner, verify_bytes: int | None) -> list[pb.HeldCheckpoint]:
        """List the copies for the answer to Stop. Of most copies only the header is read; small own slots are verified.

        Args:
            runner: The job's runner.
            verify_bytes: Own slots are verified if all of them together have at most this many bytes; None: always.
        """
        copies, place = runner.checkpoints, runner.checkpoints.place
        request = pb.CheckpointsRequest(job=place.job, disk_path=runner.disk_path(), patience_s=DISK_PATIENCE_S)
        # This reads the state folder and then lists all folders at once. Each of the two may take the complete time.
        below = asyncio.create_task(self.host.reads.do(lambda: copies.tiers.held(request), 2 * DISK_PATIENCE_S))
        found = await asyncio.to_thread(copies.in_memory, verify_own=verify_bytes is None, own_bytes=verify_bytes or 0)
        try:
            return [*found, *await below]
        except (TimeoutError, AgentError) as error:
            return [*found, unlisted_disk(place, root_of(place, request.disk_path), error)]


def check_restore(request: pb.RestoreRequest) -> None:
    """Refuse a Restore without shards, or with a rank twice.

    Raises:
        ConfigError: there are no shards, or a rank is named twice.
    """
    ranks = [shard.rank for shard in request.shards]
    if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
        raise ConfigError(f"shards of ranks {ranks}: each rank must be named once, counted from 0")
