"""Align ranks: all ranks of a job end the same step, save it, and wait there.

This happens before each stop that is not urgent: before an update of the code, and before the replacement of a machine
whose ranks still step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import Field

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.base.backoff import Backoff
from everstep.base.text import listed
from everstep.errors import AgentError
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine
from everstep.model.message import Model

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient
    from agent.v1 import agent_pb2 as pb

ASKED_S = 3.0
"""An agent that does not answer within this time is left out, seconds."""
INTERVAL_S = 0.02
"""The time between two samples of the ranks by an agent, seconds."""
AHEAD = 1
"""The largest number of steps by which one rank can be ahead of another in synchronous training."""
ASK_AGAIN_S = 30.0
"""The request is repeated at this interval, seconds. Ranks that get no request for ``REQUEST_VALID_S``
(``step_reports.py``) stop waiting and continue."""
STILL_S, STILL_STEPS = 5.0, 5.0
"""The alignment is given up when no rank has completed a step for this time, seconds, and for the time of this many
steps."""
NAMED = 4
"""The largest number of ranks that an answer names."""


class RanksAligned(Model):
    """The result of an alignment: whether all ranks wait at the end of the same step."""

    step: int = -1
    """The number of completed steps at which all ranks wait; -1: they do not wait."""
    why: str = ""
    """The reason why the ranks are not aligned; empty: they are."""


class AlignRanks(Activity[RanksAligned]):
    """Make all ranks of a generation end the same step, save it and wait there."""

    name = "Align ranks"

    job: PlacedJob
    generation: int
    backed_up: list[int] = Field(default_factory=list)
    """Ranks whose backup must have the step too, because they resume from it on other machines."""

    @property
    def _patience_s(self) -> float:
        return self.job.spec.policy.stop.align_s

    def line(self) -> str:
        return f"generation {self.generation}: all ranks end the same step"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self._patience_s + 15))

    async def perform(self, tools: Tools, say: Say) -> RanksAligned:
        """Choose a step that no rank has passed, and wait until all ranks have completed and saved it."""
        from activities.agents.call_all import on_all
        from agent.v1 import agent_pb2 as pb

        agents, spec, machines = tools.agents, self.job.spec, self.job.machines

        async def farthest(_machine: Machine, client: AgentClient) -> pb.AlignRanksReply:
            return await client.align_ranks(pb.AlignRanksRequest(job=spec.name, generation=self.generation))

        asked, silent = await on_all(agents, machines, farthest, say=say, patience_s=ASKED_S)
        if silent:
            return RanksAligned(why=f"{listed(silent, NAMED)} does not answer: the ranks are stopped as they are")
        if not all(reply.known for reply in asked.values()):
            return RanksAligned(why="the script does not number its steps: the ranks are stopped as they are")
        step = max(reply.farthest for reply in asked.values()) + AHEAD
        ranks: dict[int, pb.RankProgress] = {}
        progress_seen = _LastProgress(step)
        backed_up = frozenset(self.backed_up)
        changed = asyncio.Event()
        request = pb.AlignRanksRequest(job=spec.name, generation=self.generation, step=step)

        async def keep_asking(machine: Machine) -> None:
            while True:
                await asyncio.sleep(ASK_AGAIN_S)
                with contextlib.suppress(AgentError):
                    await agents.get(machine.address).align_ranks(request)

        async def follow(machine: Machine) -> None:
            client, backoff = agents.get(machine.address), Backoff(0.1, 1.0)
            while True:
                with contextlib.suppress(AgentError):
                    await client.align_ranks(request)
                    progress = pb.ProgressRequest(job=spec.name, interval_s=INTERVAL_S)
                    async for reply in client.progress(progress):
                        for rank in reply.ranks:
                            if rank.generation == self.generation:
                                ranks[rank.rank] = rank
                                progress_seen.observe(rank)
                        changed.set()
                await asyncio.sleep(backoff.next_s())

        world = spec.topology().world_size
        followers = [asyncio.create_task(loop(machine)) for machine in machines for loop in (follow, keep_asking)]
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    changed.clear()
                    late = _late(ranks, world, step, backed_up)
                    if not late:
                        living = [rank.completed_steps for rank in ranks.values() if rank.alive]
                        return RanksAligned(step=min(living, default=step))
                    say(f"{world - len(late)} of {world} ranks ended step {step}")
                    if progress_seen.is_final:
                        raise TimeoutError
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), STILL_S / 5)
        except TimeoutError:
            limit = (
                f"and no rank goes on for {progress_seen.seconds:.0f} s"
                if progress_seen.is_final
                else f"within {self._patience_s:g} s"
            )
            return RanksAligned(
                why=f"{listed([f'rank {at}' for at in late], NAMED)} did not end step {step} and save it {limit}: "
                "the ranks are stopped as they are"
            )
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)


@dataclass
class _LastProgress:
    """Measures how long no rank has completed a step, since a rank that hangs makes all other ranks wait for it."""

    _step: int
    """The step that all ranks have to complete."""
    _seen: dict[int, int] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)
    _step_s: float = 0.0

    def observe(self, rank: pb.RankProgress) -> None:
        """Note the progress of a rank."""
        if self._seen.get(rank.rank) != rank.completed_steps:
            self._seen[rank.rank], self._since = rank.completed_steps, time.monotonic()
        self._step_s = max(self._step_s, rank.metrics.step_s, rank.metrics.typical_step_s)

    @property
    def seconds(self) -> float:
        """The time since a rank was last seen to complete a step, seconds."""
        return time.monotonic() - self._since

    @property
    def is_final(self) -> bool:
        """Whether a rank will not complete the step. It is False if the time of a step is not known. It is also False
        once all ranks have completed the step and only save it, since a backup may take long."""
        computes = any(completed < self._step for completed in self._seen.values())
        return computes and self._step_s > 0 and self.seconds > max(STILL_S, STILL_STEPS * self._step_s)


def _late(ranks: Mapping[int, pb.RankProgress], world: int, step: int, backed_up: frozenset[int]) -> list[int]:
    """Return the ranks that did not complete and save the step, or else those that may complete another step.

    Requests arrive at different times, so a rank may have completed the step and still compute the next one. Once a
    rank waits at the end of a step, no other rank can complete the next step, and all of them complete this one.
    """
    unsafe = [at for at in range(world) if at not in ranks or not _is_safe(ranks[at], step, backed_up)]
    living = {at: rank for at, rank in ranks.items() if rank.alive}
    waits_at = min((rank.aligned for rank in living.values() if rank.aligned), default=None)
    return unsafe or [at for at, rank in living.items() if waits_at is None or rank.completed_steps < waits_at]


def _is_safe(rank: pb.RankProgress, step: int, backed_up: frozenset[int]) -> bool:
    """Return whether a rank has completed and saved the step. A rank in ``backed_up`` must also have a backup of the
    step, unless it has no peer. A rank that ended is not waited for.
    """
    if not rank.alive:
        return True
    saved = rank.saved
    if saved.own_step < 0:  # the rank keeps no checkpoints
        return rank.completed_steps >= step
    backup = rank.rank not in backed_up or saved.backup_none or saved.backup_step >= step
    return rank.completed_steps >= step and saved.own_step >= rank.completed_steps and backup
