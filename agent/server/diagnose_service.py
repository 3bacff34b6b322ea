"""This module serves the rpcs for a diagnosis: tests of a stopped machine, and samples of running ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agent.diagnoser.diagnoser import Diagnoser
from agent.server.checkpoint_service import CheckpointsService
from agent.server.job_registry import Context, JobRegistry, check_job, refusals
from agent.tracer.tracer import Tracer, ranks_traced
from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.errors import AgentError


class DiagnoseService(CheckpointsService):
    """Serves Diagnose, Sample and Stacks."""

    def __init__(self, jobs: JobRegistry) -> None:
        super().__init__(jobs)
        host = self.host
        self.diagnoser = Diagnoser(host.machine, host.address, host.state_dir, host.sockets)
        self.tracer = Tracer(host.machine)

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> AsyncIterator[pb.DiagnoseReply]:  # noqa: N802
        """Run tests; each result is sent when its test ends."""
        async with refusals(context, command="Diagnose", job=request.job, request=request.request_id):
            if request.job:
                check_job(request.job)
            self._check_idle(request)
            run = self.diagnoser.start(request)
            async for reply in self.diagnoser.follow(run):
                yield reply

    def _check_idle(self, request: pb.DiagnoseRequest) -> None:
        """Refuse tests while ranks live, because both need the same devices and tests would measure wrong values.

        Raises:
            AgentError: ranks live on this machine, or the machine has a job that did not request the tests.
        """
        seen = [rank for rank in self.jobs.ranks_seen() if rank.alive]
        if seen:
            ranks = listed([str(rank.rank) for rank in seen if rank.job == seen[0].job])
            raise AgentError(f"ranks {ranks} of {seen[0].job} run on {self.host.machine}: stop the job first")
        for job, runner in self.jobs.runners.items():
            record = runner.record
            if not record.released and (job != request.job or request.run not in {"", record.run}):
                raise AgentError(
                    f"{self.host.machine} has the job {job}, run {record.run or 'unknown'}, which may start its ranks "
                    "at any time: tests are run for that job or not at all"
                )

    async def Sample(self, request: pb.SampleRequest, context: Context) -> pb.SampleReply:  # noqa: N802
        """Sample the current state of the processes of a job's newest generation."""
        runner = await self.jobs.known(request.job, context)
        record, shm = runner.record, runner.ranks.shm
        living = [rank for rank in record.of(record.generation) if rank.end is None and not record.released]
        ranks = ranks_traced({rank.rank: (rank.pid, rank.start_ticks) for rank in living}, shm)
        return await self.tracer.sample(
            request.job, ranks, record.generation, request.limit_s, ranks_only=request.ranks_only
        )

    async def Stacks(self, request: pb.StacksRequest, context: Context) -> pb.StacksReply:  # noqa: N802
        """Return whole stacks and flight records of one of the newest samples."""
        await self.jobs.known(request.job, context)
        async with refusals(context, command="Stacks", job=request.job):
            return self.tracer.stacks(request.job, request.time_ns, request.ranks)
