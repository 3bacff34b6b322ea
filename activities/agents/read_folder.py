"""Read folder: check whether a job can start from the folder of a disk checkpoint, of any job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.base.text import listed
from everstep.decisions.keep.starts import folder_of, judge_folder
from everstep.model.machine import Machine
from everstep.model.message import Model

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient

LISTING_S = 60.0
"""The time limit of a listing of disks and remote storage, seconds."""


class FolderFound(Model):
    """The result: whether a job can start from a folder."""

    problem: str = ""
    """Why a job cannot start from the folder; empty: it can."""
    step: int = -1
    """The number of completed steps of the checkpoint."""
    ranks: int = 0
    """The number of ranks in the checkpoint."""


class ReadFolder(Activity[FolderFound]):
    """Read the folder on all machines."""

    name = "Look at checkpoint folder"

    machines: list[Machine]
    path: str
    patience_s: float = 10.0

    def line(self) -> str:
        return self.path

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=2))

    async def perform(self, tools: Tools, say: Say) -> FolderFound:
        from activities.agents.call_all import on_all
        from agent.v1 import agent_pb2 as pb

        parts = folder_of(self.path)
        if parts is None:
            example = "/disk/job/step-000000120"
            return FolderFound(problem=f"{self.path} is no checkpoint: give an absolute path such as {example}")
        request = pb.CheckpointsRequest(job=parts.job, disk_path=parts.root)
        saved_by: dict[int, tuple[str, str]] = {}

        async def list_ranks(_machine: Machine, client: AgentClient) -> dict[int, str]:
            reply = await client.checkpoints(request, timeout_s=LISTING_S)
            in_folder = [
                copy
                for copy in reply.checkpoints
                if copy.tier == pb.HeldCheckpoint.DISK
                and copy.completed_steps == parts.step
                and copy.place.startswith(f"{parts.root}/")
            ]
            saved_by.update((copy.rank, (copy.run, copy.topology)) for copy in in_folder if copy.valid)
            return {copy.rank: "" if copy.valid else copy.reason for copy in in_folder}

        seen, silent = await on_all(tools.agents, self.machines, list_ranks, say=say, patience_s=self.patience_s)
        if silent:
            return FolderFound(problem=f"{listed(silent)} does not answer: bring its agent back")
        ranks = len({rank for ranks_seen in seen.values() for rank in ranks_seen})
        return FolderFound(problem=judge_folder(self.path, seen, saved_by), step=parts.step, ranks=ranks)
