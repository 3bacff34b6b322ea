"""A fake agent that sends the observations that a test chooses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from agent.fake import FakeAgent
from agent.reporting.observations import OF_NO_JOB
from agent.v1 import agent_pb2 as pb


class SpokenAgent(FakeAgent):
    """A fake agent: sends chosen observations, shows chosen ranks, and notes which observations are acknowledged."""

    def __init__(self, machine: str) -> None:
        self.acknowledged = 0
        self.machine_acknowledged = 0
        """The newest acknowledged observation that belongs to no job; 0: none."""
        self.shown: dict[str, list[pb.RankProgress]] = {}
        """Job → its ranks on this machine."""
        super().__init__(machine, observe=self.observe, acknowledge=self.acknowledge, progress=self._progress)
        self.answer(persist=pb.PersistReply(), align_backups=pb.AlignBackupsReply())

    def exited(self, job: str, generation: int, rank: int, end: pb.Exit, *, finished: bool) -> None:
        ended = pb.RankEnd(rank=rank, exit=end, finished=finished)
        self.publish(job=job, generation=generation, rank_ended=ended)

    def acknowledge(self, request: pb.AcknowledgeRequest) -> pb.AcknowledgeReply:
        if request.job == OF_NO_JOB:
            self.machine_acknowledged = max(self.machine_acknowledged, request.up_to_sequence)
        else:
            self.acknowledged = max(self.acknowledged, request.up_to_sequence)
        return super().acknowledge(request)

    @property
    def asked_to_persist(self) -> list[int]:
        return [request.step for request in self.asked("persist") if not request.whole]

    @property
    def told_whole(self) -> list[int]:
        return [request.whole for request in self.asked("persist") if request.whole]

    async def _progress(self, request: pb.ProgressRequest) -> AsyncIterator[pb.ProgressReply]:
        while True:
            if request.job in self.shown:
                yield pb.ProgressReply(time_ns=time.time_ns(), ranks=self.shown[request.job])
            await asyncio.sleep(0.1)
