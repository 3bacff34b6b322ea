"""Watching a restarted generation until it steps again."""

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
from everstep.errors import AgentError
from everstep.model.job import PlacedJob
from everstep.model.launch import Confirmation, Launched, Showing
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.v1 import agent_pb2 as pb

SLOWEST_RANK_BYTES = 500_000_000
"""Bytes a second of one rank that restores from its own slot: a slower one is given up."""

INTERVAL_S = 0.05
"""Between two looks of an agent at its ranks, seconds. The ranks note their times themselves: a shorter one would
only take CPU from ranks that start."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0
"""Between two calls of a silent agent, at first and at most, seconds."""


class ConfirmSteps(Activity[Confirmation]):
    """Watch until every rank of a generation completed a step, one of them ended, or the time is up."""

    name = "Confirm steps"

    job: PlacedJob
    launched: Launched
    timeout_s: float
    """How long, seconds."""
    state_bytes: int = 0
    """What the largest rank restores first, which takes more time."""
    showing: Showing = Field(default_factory=Showing)
    """How the script showed its steps before."""
    known_alive: bool = False
    """That the ranks live is known: it is their steps that are waited for."""
    silent_s: float = 0.0
    """A machine of which nothing is heard for so long, while no rank completes a step, is not waited for; 0: it is."""

    @property
    def restore_s(self) -> float:
        """How much more time the largest rank has, to restore its state."""
        return round(self.state_bytes / SLOWEST_RANK_BYTES, 1)

    def line(self) -> str:
        what = "completes a step; all of them live" if self.known_alive else "completes a step"
        return f"generation {self.launched.generation}: every rank {what}"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.timeout_s + self.restore_s + 30))

    async def perform(self, tools: Tools, say: Say) -> Confirmation:
        """Follow every machine's progress and judge it at each change.

        A silent agent is asked again until the time is up: its ranks may well be
        stepping. Where ``silent_s`` says so, that holds only as long as some rank of
        the job completes steps, or for so many seconds.
        """
        from activities.agents.clocks import fit_milestones
        from agent.v1 import agent_pb2 as pb

        agents, spec, machines = tools.agents, self.job.spec, self.job.machines
        world_size, generation, showing = spec.topology().world_size, self.launched.generation, self._showing_before()
        shown: dict[int, RankState] = {}
        all_shown_ns = 0
        left_ns: dict[int, int] = {}
        emptied: set[str] = set()
        heard = Heard([machine.name for machine in machines], self.silent_s)
        changed = asyncio.Event()

        async def follow(machine: Machine) -> None:
            request = pb.ProgressRequest(job=spec.name, interval_s=INTERVAL_S)
            backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
            while True:
                with contextlib.suppress(AgentError):
                    async for reply in agents.get(machine.address).progress(request):
                        heard.note(machine.name)
                        # It answered the launch; one that knows of an older generation only has lost it since.
                        if reply.generation < generation:
                            emptied.add(machine.name)
                        fit_milestones(reply, heard_ns=now_ns())
                        for rank in states_of(reply.ranks, generation):
                            shown[rank.rank] = rank
                            if rank.code == 0:
                                left_ns.setdefault(rank.rank, now_ns())
                        changed.set()
                        backoff.reset()
                await asyncio.sleep(backoff.next_s())

        followers: list[asyncio.Task[None]] = []
        pace = ShareOfTime()
        bound_s = self.timeout_s + self.restore_s
        deadline_ns = now_ns() + int(bound_s * 1e9)
        try:
            async for machine in in_turns(machines):
                followers.append(asyncio.create_task(follow(machine)))
            while now_ns() < deadline_ns:
                changed.clear()
                pace.begin()
                if len(shown) == world_size and not all_shown_ns:
                    all_shown_ns = now_ns()
                verdict = judge_confirmation(
                    generation,
                    list(shown.values()),
                    world_size=world_size,
                    showing=showing,
                    now_ns=now_ns(),
                    policy=spec.policy,
                    emptied=sorted(emptied),
                    silent=heard.silent(list(shown.values())),
                    whole_ns=all_shown_ns,
                    left_ns=left_ns,
                    known_alive=self.known_alive,
                )
                pace.end()
                if verdict is not None:
                    return verdict
                await pace.rest()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await changed.wait()
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
        return judge_timeout(
            generation, list(shown.values()), world_size=world_size, showing=showing, bound_s=bound_s, now_ns=now_ns()
        )

    def _showing_before(self) -> Showing:
        """How the script showed its steps before; one that resumes from a step had a loop to save it in."""
        if self.launched.resume_step >= 0 and not self.showing.kind:
            return Showing(kind="steps")
        return self.showing


class Heard:
    """When each machine was heard last, and any rank completed a step.

    Args:
        machines: Of the job.
        silent_s: A machine that says nothing for so long, while nobody steps, is silent, seconds; 0: none is.
    """

    def __init__(self, machines: Iterable[str], silent_s: float) -> None:
        self._limit_s = silent_s
        self._heard_s = dict.fromkeys(machines, time.monotonic())
        self._steps, self._stepped_s = -1, time.monotonic()

    def note(self, machine: str) -> None:
        """It said something."""
        self._heard_s[machine] = time.monotonic()

    def silent(self, ranks: Iterable[RankState]) -> dict[str, float]:
        """Machine of which nothing is heard any more → since when, or since any rank completed a step, seconds.

        None where all are silent, for then it may be we who are cut off.
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
    """The ranks of one generation, as the decision takes them."""
    from activities.agents.convert import code_of

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
