"""This module serves the rpcs for versions of a job's code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from agent.jobs.job_runner import JobRunner
from agent.jobs.trial import try_script
from agent.jobs.variables import read_variables
from agent.server.checkpoint_service import CheckpointsService
from agent.server.job_registry import Context, check_job, refusals
from agent.v1 import agent_pb2 as pb


class CodeService(CheckpointsService):
    """Serves HasCode, PutCode, TryCode and AlignRanks."""

    async def HasCode(self, request: pb.HasCodeRequest, context: Context) -> pb.HasCodeReply:  # noqa: N802
        """Return which snapshots this machine has."""
        async with refusals(context):
            return pb.HasCodeReply(digests=await self.host.code.has(request.digests))

    async def PutCode(self, chunks: AsyncIterator[pb.CodeChunk], context: Context) -> pb.PutCodeReply:  # noqa: N802
        """Receive a snapshot."""
        async with refusals(context):
            return await self.host.code.put(chunks)

    async def TryCode(self, request: pb.TryCodeRequest, context: Context) -> pb.TryCodeReply:  # noqa: N802
        """Run a script until it joins the job."""

        async def carry_out() -> pb.TryCodeReply:
            program = request.program
            values = await asyncio.to_thread(read_variables, program.env_from, program.env_file, self.host.machine)
            return await try_script(self.host, request, values)

        async with refusals(context, command="TryCode", job=request.job, request=request.request_id):
            check_job(request.job)
            return await self.jobs.memory.once("TryCode", request, pb.TryCodeReply, carry_out)

    async def AlignRanks(self, request: pb.AlignRanksRequest, context: Context) -> pb.AlignRanksReply:  # noqa: N802
        """Make all ranks wait at the end of the same step."""
        return align(await self.jobs.known(request.job, context), request.generation, request.step)


def align(runner: JobRunner, generation: int, step: int) -> pb.AlignRanksReply:
    """Ask the ranks of a generation to wait at the end of a step; returns their progress."""
    reports = [
        runner.ranks.reports.get(rank.rank, generation)
        for rank in runner.record.living()
        if rank.generation == generation
    ]
    readable = [report for report in reports if report]
    for report in readable:
        report.align(step)
    alignments = [report.alignment() for report in readable]
    known = bool(readable) and len(readable) == len(reports) and all(rank.can for rank in alignments)
    return pb.AlignRanksReply(
        farthest=max((report.snapshot().completed_steps for report in readable), default=-1),
        known=known,
    )
