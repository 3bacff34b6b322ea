"""The rpc that looks at what ranks do."""

from __future__ import annotations

from agent.server.checkpoint_service import CheckpointsService
from agent.server.job_registry import Context, JobRegistry
from agent.tracer.tracer import Tracer, ranks_traced
from agent.v1 import agent_pb2 as pb


class TraceService(CheckpointsService):
    """Stacks."""

    def __init__(self, jobs: JobRegistry) -> None:
        super().__init__(jobs)
        self.tracer = Tracer(self.host.machine)

    async def Stacks(self, request: pb.StacksRequest, context: Context) -> pb.StacksReply:  # noqa: N802
        """What the processes of a job's newest generation do."""
        runner = await self.jobs.known(request.job, context)
        record, shm = runner.record, runner.ranks.shm
        living = [rank for rank in record.of(record.generation) if rank.end is None and not record.released]
        ranks = ranks_traced({rank.rank: (rank.pid, rank.start_ticks) for rank in living}, shm)
        return await self.tracer.look(ranks, record.generation, request.limit_s, ranks_only=request.ranks_only)
