"""The progress of each rank of a job, as the agent reports it."""

from __future__ import annotations

import math

from agent.jobs.job_runner import JobRunner
from agent.state.rank_record import RankRecord, to_exit
from agent.tracer.processes import STOPPED
from agent.v1 import agent_pb2 as pb
from everstep.system.procfs import state_of


def progress_of(runner: JobRunner) -> list[pb.RankProgress]:
    """Return the progress of each rank of a job's newest generation."""
    found = []
    disk = f"the state folder cannot be written: {problem}" if (problem := runner.host.disk.problem) else ""
    for rank in runner.record.of(runner.record.generation):
        report = runner.ranks.reports.get(rank.rank, rank.generation)
        progress = pb.RankProgress(
            rank=rank.rank,
            generation=rank.generation,
            pid=rank.pid,
            alive=rank.end is None,
            exit=to_exit(rank.end) if rank.end else None,
            completed_steps=-1,
            loss=math.nan,
            grad_norm=math.nan,
            saved=runner.checkpoints.place.saved.of(rank.rank),
            stopped=rank.end is None and is_stopped(rank),
        )
        if disk:
            progress.saved.disk_problem = "; ".join(filter(None, [disk, progress.saved.disk_problem]))
        if report:
            now = report.snapshot()
            progress.attached, progress.finished = now.attached, now.finished
            progress.completed_steps, progress.optimizer_steps = now.completed_steps, now.optimizer_steps
            progress.reports, progress.stepped_ns = now.published, now.stepped_ns
            progress.milestones.CopyFrom(pb.Milestones(**now.milestones))
            progress.tokens = runner.ranks.archive.tokens(rank.rank, rank.generation)
            if now.newest:
                progress.metrics.CopyFrom(runner.ranks.metrics.message(report, now.flops))
                progress.loss, progress.grad_norm = now.newest.loss, now.newest.grad_norm
        found.append(progress)
    return found


def is_stopped(rank: RankRecord) -> bool:
    """Return whether the process of a rank is stopped."""
    return state_of(rank.pid, rank.start_ticks) == STOPPED
