"""Confirm steps: watch a restarted generation until it steps again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import Field

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, now_ns
from activities.turns import ShareOfTime, in_turns
from everstep.base.backoff import Backoff
from everstep.decisions.act.recover.confirm import RankState, judge_confirmation, judge_timeout
from everstep.decisions.clocks import stream_shift_ns
from everstep.errors import AgentError
from everstep.model.job import PlacedJob
from everstep.model.launch import Confirmation, Launched, Showing
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient
    from agent.v1 import agent_pb2 as pb

SLOWEST_RANK_BYTES = 500_000_000
"""One rank is expected to restore its state from its own slot at least this fast, bytes per second."""

INTERVAL_S = 0.05
"""The time between two samples of the ranks by an agent, seconds. The ranks note their times themselves, so a shorter
interval would only take CPU time from ranks that start."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0
"""The first and the longest wait before a silent agent is called again, seconds."""


class ConfirmSteps(Activity[Confirmation]):
    """Watch a generation until every rank has completed a step, a rank has ended, or the time is up."""

    name = "Confirm steps"

    job: PlacedJob
    launched: Launched
    timeout_s: float
    """The longest wait, seconds."""
    state_bytes: int = 0
    """The size of the largest state that a rank restores before its first step, bytes. The time of this restore is
    added to the longest wait."""
    showing: Showing = Field(default_factory=Showing)
    """The way in which the script showed its steps in earlier generations."""
    known_alive: bool = False
    """The ranks are known to be alive, so only their steps are awaited."""
    silent_s: float = 0.0
    """A machine is not awaited any more once it is silent and no rank completes a step for this long, seconds; 0: all
    machines are awaited."""

    @property
    def restore_s(self) -> float:
        """The extra time for the rank with the largest state to restore it, seconds."""
        return round(self.state_bytes / SLOWEST_RANK_BYTES, 1)

    def line(self) -> str:
        known = "; all of them are alive" if self.known_alive else ""
        return f"generation {self.launched.generation}: every rank completes a step{known}"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.timeout_s + self.restore_s + 30))

    async def perform(self, tools: Tools, say: Say) -> Confirmation:
        """Follow the progress of every machine, and decide at each change.

        A silent agent is asked again until the time is up, because its ranks may still step. With ``silent_s``, the
        wait for it ends once it is silent and no rank of the job completes a step for that time.
        """
        heard = Heard([machine.name for machine in self.job.machines], self.silent_s)
        seen = Seen(self.launched.generation, self.job.spec.topology().world_size, heard)
        followers: list[asyncio.Task[None]] = []
        pace, bound_s = ShareOfTime(), self.timeout_s + self.restore_s
        deadline_ns = now_ns() + int(bound_s * 1e9)
        try:
            async for machine in in_turns(self.job.machines):
                followers.append(asyncio.create_task(self._follow(machine, tools.agents.get(machine.address), seen)))
            while now_ns() < deadline_ns:
                seen.changed.clear()
                pace.begin()
                verdict = self._judge(seen)
                pace.end()
                if verdict is not None:
                    return verdict
                await pace.rest()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await seen.changed.wait()
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
        return judge_timeout(
            self.launched.generation,
            list(seen.ranks.values()),
            world_size=seen.world_size,
            showing=self._showing_before(),
            bound_s=bound_s,
            now_ns=now_ns(),
        )

    async def _follow(self, machine: Machine, client: AgentClient, seen: Seen) -> None:
        """Note the progress of a machine's ranks until the task is cancelled."""
        from agent.v1 import agent_pb2 as pb

        request = pb.ProgressRequest(job=self.job.spec.name, interval_s=INTERVAL_S)
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            with contextlib.suppress(AgentError):
                async for reply in client.progress(request):
                    seen.note(machine.name, reply)
                    backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def _judge(self, seen: Seen) -> Confirmation | None:
        ranks = list(seen.ranks.values())
        if len(ranks) == seen.world_size and not seen.all_shown_ns:
            seen.all_shown_ns = now_ns()
        return judge_confirmation(
            self.launched.generation,
            ranks,
            world_size=seen.world_size,
            showing=self._showing_before(),
            now_ns=now_ns(),
            policy=self.job.spec.policy,
            emptied=sorted(seen.emptied),
            silent=seen.heard.silent(ranks),
            all_seen_ns=seen.all_shown_ns,
            left_ns=seen.left_ns,
            known_alive=self.known_alive,
        )

    def _showing_before(self) -> Showing:
        if self.launched.resume_step >= 0 and not self.showing.kind:
            return Showing(kind="steps")
        return self.showing


class Seen:
    """The progress of a generation's ranks, as far as the agents have reported it.

    Args:
        generation: The generation that was launched.
        world_size: The number of ranks of the job.
        heard: Records which machines answer.
    """

    def __init__(self, generation: int, world_size: int, heard: Heard) -> None:
        self._generation = generation
        self.world_size = world_size
        self.heard = heard
        self.changed = asyncio.Event()
        """Set at each report of an agent."""
        self.ranks: dict[int, RankState] = {}
        self.all_shown_ns = 0
        """The time by which every rank of the job had been reported, nanoseconds of the wall clock; 0: not yet."""
        self.left_ns: dict[int, int] = {}
        """Rank → the time of the first report that it ended with code 0, nanoseconds of the wall clock."""
        self.emptied: set[str] = set()
        """Machines that have lost the generation."""

    def note(self, machine: str, reply: pb.ProgressReply) -> None:
        """Note what a machine's agent reports."""
        self.heard.note(machine)
        # The agent answered the launch of this generation. If it now knows only an older one, it has lost this one.
        if reply.generation < self._generation:
            self.emptied.add(machine)
        fit_milestones(reply, heard_ns=now_ns())
        for rank in states_of(reply.ranks, self._generation):
            self.ranks[rank.rank] = rank
            if rank.code == 0:
                self.left_ns.setdefault(rank.rank, now_ns())
        self.changed.set()


class Heard:
    """Notes when each machine answered last, and when any rank completed a step last.

    Args:
        machines: The names of the job's machines.
        silent_s: A machine is silent if it does not answer and no rank steps for this long, seconds; 0: no machine is
            ever silent.
    """

    def __init__(self, machines: Iterable[str], silent_s: float) -> None:
        self._limit_s = silent_s
        self._heard_s = dict.fromkeys(machines, time.monotonic())
        self._steps, self._stepped_s = -1, time.monotonic()

    def note(self, machine: str) -> None:
        """Note that a machine answered."""
        self._heard_s[machine] = time.monotonic()

    def silent(self, ranks: Iterable[RankState]) -> dict[str, float]:
        """Return silent machine → for how long it was silent while no rank completed a step, seconds.

        The result is empty when all machines are silent, because then the worker itself may be disconnected.
        """
        now_s = time.monotonic()
        steps = sum(state.completed_steps + state.shown for state in ranks)
        if steps != self._steps:
            self._steps, self._stepped_s = steps, now_s
        unheard = {name: now_s - at_s for name, at_s in self._heard_s.items() if now_s - at_s >= self._limit_s}
        quiet_s = now_s - self._stepped_s
        if not self._limit_s or quiet_s < self._limit_s or len(unheard) == len(self._heard_s):
            return {}
        return {name: min(since_s, quiet_s) for name, since_s in unheard.items()}


def states_of(ranks: Iterable[pb.RankProgress], generation: int) -> list[RankState]:
    """Return the states of a generation's ranks, for the decision."""
    from agent.state.rank_record import code_of

    return [
        RankState(
            rank=rank.rank,
            alive=rank.alive,
            attached=rank.attached,
            finished=rank.finished,
            completed_steps=rank.completed_steps,
            optimizer_steps=rank.optimizer_steps,
            code=code_of(rank.exit) if rank.HasField("exit") else None,
            forked_ns=rank.milestones.forked,
            script_ns=rank.milestones.script_entered,
            joined_ns=rank.milestones.joined,
            entered_ns=rank.milestones.loop_entered,
            restored_ns=rank.milestones.restored,
            first_step_ns=rank.milestones.first_step,
            left_ns=rank.milestones.loop_left,
            reports=rank.reports,
        )
        for rank in ranks
        if rank.generation == generation
    ]


def fit_milestones(reply: pb.ProgressReply, *, heard_ns: int) -> None:
    """Correct the times of the ranks' milestones for the difference of the clocks, so that ranks of different machines
    can be compared."""
    shift = stream_shift_ns(reply.time_ns, heard_ns)
    for rank in reply.ranks if shift else ():
        for mark, at_ns in rank.milestones.ListFields():
            setattr(rank.milestones, mark.name, at_ns + shift)
