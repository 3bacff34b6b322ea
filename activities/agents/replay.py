"""The activity that runs a job's script on one group of its machines, to compare what groups compute.

A group is launched as a job is, under a name of its own (``gpt~row-3``), and ended when all of its ranks have done
their steps, or one of them has failed. It can run twice: agents answer repeated commands with what they have, so
whoever takes over goes on with the ranks that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.agents.call_all import on_all
from activities.agents.convert import exit_of
from activities.agents.ranks import RankActivities
from activities.heartbeat import Say, heartbeating, request_id
from activities.messages import LaunchInput, PrepareInput, ReleaseInput, ReplayGroupInput
from activities.turns import gathered
from activities.versions.store import VersionStore
from agent.client import AgentClient, AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.base.backoff import Backoff
from everstep.base.text import listed
from everstep.decisions.blame.first_failure import first_failure, headline_of
from everstep.decisions.blame.replay.kept_runs import LETTERS, WHY, bounded, digest
from everstep.errors import AgentError, EverstepError
from everstep.model.evidence import RankExit
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, RunEnd

INTERVAL_S = 0.1
"""Between two looks of an agent at its ranks."""
SETTLE_S = 0.5
"""Once a rank has failed, the others of its group have so long to say that they did too."""
DYING_S = 60.0
"""Ranks of a replay that were killed have so long to be gone."""
PATIENCE = 3.0
"""A group still steps where the last one came within so many times the longest of those before it."""
LEAST_STEPS = 3
"""Seen of a group, so that there are two that can be told apart from its start."""
NAMED = 4
"""Ranks that a text names."""
_STATE = re.compile(r"^--- everstep: state after step \d+: (\w+)$", re.MULTILINE)


class ReplayActivities:
    """The activity that replays a job on a group."""

    def __init__(self, agents: AgentClients, store: VersionStore | None = None) -> None:
        self._agents = agents
        self._ranks = RankActivities(agents, None, store)  # no watcher is told: what a replay does opens no incident

    @activity.defn(name=messages.REPLAY_GROUP)
    async def replay_group(self, given: ReplayGroupInput) -> GroupRun:
        """Run the group's steps; what it computed, or how it broke. Nothing of it is left on the machines."""
        began = time.monotonic()
        async with heartbeating() as say:
            try:
                run = await self._run(given, say)
            except ApplicationError as error:
                run = _unable(given, str(error))
            finally:
                if not _superseded():
                    await asyncio.shield(self._release(given))
        return run.model_copy(update={"seconds": round(time.monotonic() - began, 3)})

    async def _run(self, given: ReplayGroupInput, say: Say) -> GroupRun:
        spec, machines, run = given.spec, given.machines, given.run
        say(f"{given.group}: fork servers on {len(machines)} machines")
        await self._ranks.prepare(PrepareInput(spec=spec, machines=machines, run=run, patience_s=given.patience_s))
        launch = LaunchInput(
            spec=spec,
            machines=machines,
            generation=given.repeat,
            resume_step=0,
            run=run,
            begins_run=True,
            patience_s=given.patience_s,
        )
        await self._ranks.launch(launch)
        end, why = await Followed(self._agents, given).until_over(say)
        stopped, silent = await self._stop(given)
        if silent:
            return _unable(given, f"{listed(silent, NAMED)} does not answer")
        forgotten = [machine for machine, reply in stopped.items() if reply.unknown or not reply.ranks]
        if forgotten and (end in {RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_STARTED} or len(forgotten) == len(machines)):
            return _unable(given, f"{listed(forgotten, NAMED)} knows nothing of its ranks any more: they were ended")
        kind = await self._kind(given)
        if end is RunEnd.CRASHED:
            exits = [exit_of(machine, rank) for machine, reply in stopped.items() for rank in reply.ranks]
            why = _crash(exits) or why
        steps = await gathered(self._steps(given, machine) for machine in machines)
        reports = [record for of_machine in steps for record in of_machine]
        if bad := not_finite(reports, spec.policy):
            end, why = RunEnd.NOT_FINITE, bad
        ranks = sorted((rank for reply in stopped.values() for rank in reply.ranks), key=lambda rank: rank.rank)
        found = GroupRun(
            group=given.group,
            machines=[machine.name for machine in machines],
            end=end,
            repeat=given.repeat,
            why=why,
            steps=max(0, min((rank.completed_steps for rank in ranks), default=0)),
            losses=loss_digests(reports),
            states=state_digests({rank.rank: rank.log_tail for rank in ranks}),
            kind=kind,
        )
        return bounded(found.model_copy(update={"shape": shape_of(found, len(reports))}))

    async def _stop(self, given: ReplayGroupInput) -> tuple[dict[str, pb.StopReply], list[str]]:
        request = pb.StopRequest(
            request_id=request_id(),
            job=given.spec.name,
            generation=given.repeat,
            run=given.run,
            verify_bytes=0,
        )

        async def stop_machine(_machine: Machine, client: AgentClient) -> pb.StopReply:
            return await client.stop(request, timeout_s=20)

        return await on_all(self._agents, given.machines, stop_machine, say=lambda _: None, patience_s=given.patience_s)

    async def _kind(self, given: ReplayGroupInput) -> str:
        """The hardware of the machines, in their order; alike, it is told once."""

        async def hardware(machine: Machine) -> str:
            try:
                if told := (await self._agents.get(machine.address).describe()).hardware:
                    return told
            except EverstepError:
                pass
            return f"unknown of {machine.name}"

        found = await gathered(map(hardware, given.machines))
        return found[0] if len(set(found)) == 1 else " + ".join(found)

    async def _steps(self, given: ReplayGroupInput, machine: Machine) -> list[tuple[int, pb.StepRecord]]:
        request = pb.StepsRequest(job=given.spec.name, rank=-1, from_step=0)
        try:
            replies = [reply async for reply in self._agents.get(machine.address).steps(request)]
        except EverstepError as error:
            raise ApplicationError(f"{machine.name} does not say its step records: {error}") from error
        return [
            (reply.rank, record) for reply in replies for record in reply.records if record.generation == given.repeat
        ]

    async def _release(self, given: ReplayGroupInput) -> None:
        """End what the group has on its machines; where that fails, the job's next launch does, or its end."""
        release = ReleaseInput(job=given.spec.name, machines=given.machines, run=given.run, dying_s=DYING_S)
        with contextlib.suppress(ApplicationError):
            await self._ranks.release(release)


class Followed:
    """Ranks of a group while they run."""

    def __init__(self, agents: AgentClients, given: ReplayGroupInput) -> None:
        self._agents, self._given = agents, given
        self._ranks: dict[int, pb.RankProgress] = {}
        self._changed = asyncio.Event()
        self._pace = GroupPace()

    async def until_over(self, say: Say) -> tuple[RunEnd, str]:
        """Wait until all ranks have done their steps, or one has failed, or the time is up; returns which, and why.

        A first step has its own time: what comes before it, e.g. reading the program from a slow disk, is no step.
        """
        given, start_s = self._given, self._given.start_s
        followers = [asyncio.create_task(self._follow(machine)) for machine in given.machines]
        try:
            if not await self._within(start_s, self._started, say, "have begun"):
                return (
                    RunEnd.NOT_STARTED,
                    f"{self._late(self._started)} did not come to a first step within {start_s:g} s",
                )
            if not await self._within(given.limit_s, self._finished, say, f"have done {given.steps} steps"):
                within = f"within {given.limit_s:g} s of the first"
                why = f"{self._late(self._finished)} did not do {given.steps} steps {within}"
                if self._pace.goes_on(time.monotonic()):
                    return RunEnd.SLOW, f"{why}, and still stepped"
                return RunEnd.HUNG, why
            if not self._failed:
                return RunEnd.RAN, ""
            await asyncio.sleep(SETTLE_S)
            return RunEnd.CRASHED, f"{_named(self._failed)} ended"
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    async def _within(self, limit_s: float, what: Callable[[], set[int]], say: Say, words: str) -> bool:
        """Wait until all ranks have come so far, or one has failed; whether that was in time."""
        world = self._given.spec.topology().world_size
        try:
            async with asyncio.timeout(limit_s):
                while len(what()) < world and not self._failed:
                    say(f"{self._given.group}: {len(what())} of {world} ranks {words}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def _failed(self) -> list[int]:
        return [rank.rank for rank in self._ranks.values() if not (rank.alive or rank.finished)]

    def _started(self) -> set[int]:
        return {rank.rank for rank in self._ranks.values() if rank.milestones.first_step > 0}

    def _finished(self) -> set[int]:
        return {rank.rank for rank in self._ranks.values() if rank.finished}

    def _late(self, what: Callable[[], set[int]]) -> str:
        return _named(set(range(self._given.spec.topology().world_size)) - what())

    async def _follow(self, machine: Machine) -> None:
        request, backoff = pb.ProgressRequest(job=self._given.spec.name, interval_s=INTERVAL_S), Backoff(0.1, 1.0)
        while True:
            with contextlib.suppress(AgentError):
                async for reply in self._agents.get(machine.address).progress(request):
                    for rank in reply.ranks:
                        if rank.generation == self._given.repeat:
                            self._ranks[rank.rank] = rank
                    if len(self._ranks) == self._given.spec.topology().world_size:
                        slowest = min(one.completed_steps for one in self._ranks.values())
                        self._pace.see(slowest, time.monotonic())
                    self._changed.set()
            await asyncio.sleep(backoff.next_s())


class GroupPace:
    """How steadily the slowest rank of a group does its steps."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._steps = 0

    def see(self, steps: int, now: float) -> None:
        """It has completed so many by now."""
        if steps > self._steps:
            self._steps = steps
            self._seen.append(now)

    def goes_on(self, now: float) -> bool:
        """Whether a step came lately, by what the longest of those before it took; of fewer than two nobody can say."""
        if len(self._seen) < LEAST_STEPS:
            return False
        longest = max(later - earlier for earlier, later in pairwise(self._seen))
        return now - self._seen[-1] <= PATIENCE * longest


def loss_digests(records: Iterable[tuple[int, pb.StepRecord]]) -> list[str]:
    """Of each step, in order, a digest of what all ranks reported of it: losses and norms, all 64 bits."""
    of_step: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for rank, record in records:
        of_step[record.step].append((rank, struct.pack("<ddI", record.loss, record.grad_norm, record.given)))
    return [digest(f"{rank}:{bits.hex()}" for rank, bits in sorted(found)) for _, found in sorted(of_step.items())]


def shape_of(run: GroupRun, reports: int) -> str:
    """How much a run says: a machine whose disk does not answer has kept less of it, and has computed nothing wrong."""
    of_ranks = f"states of {len(run.states)} ranks" if run.states else "no states"
    return f"{reports} reports of {len(run.losses)} steps, {of_ranks}"


def state_digests(logs: Mapping[int, str]) -> list[str]:
    """Of each rank the digest of its state that it wrote to its log; none where one of them wrote none."""
    found = [_STATE.findall(log) for _, log in sorted(logs.items())]
    if not all(found):
        return []
    return [digests[-1][:LETTERS] for digests in found]


def not_finite(records: Iterable[tuple[int, pb.StepRecord]], policy: RecoveryPolicy) -> str:
    """The first number that was not finite for as many reports in a row as is a fault of the job; empty: there is none.

    A GradScaler begins with steps whose gradient norm is infinite, and skips them, in every group.
    """
    limits = {"loss": policy.nan.loss_steps, "gradient norm": policy.nan.grad_norm_steps}
    streaks: dict[tuple[int, str], list[int]] = defaultdict(list)
    bad = []
    for rank, record in sorted(records, key=lambda one: (one[0], one[1].step)):
        for name, value, bit in (("loss", record.loss, 1), ("gradient norm", record.grad_norm, 2)):
            streak = streaks[rank, name]
            if not record.given & bit:
                continue
            if math.isfinite(value):
                streak.clear()
                continue
            streak.append(record.step)
            if len(streak) == limits[name]:
                bad.append((streak[0], rank, name))
    if not bad:
        return ""
    step, rank, name = min(bad)
    return f"the {name} of rank {rank} in step {step}"


def _crash(exits: list[RankExit]) -> str:
    """How the group broke: the end of the rank that failed first; empty: it is not known."""
    first = first_failure(exits)
    return headline_of(first) if first else ""


def _superseded() -> bool:
    """Whether the server gave this attempt up, e.g. because it was not heard of for a while: another one may follow the
    same ranks already."""
    details = activity.cancellation_details()
    return details is not None and (details.not_found or details.timed_out)


def _unable(given: ReplayGroupInput, why: str) -> GroupRun:
    names = [machine.name for machine in given.machines]
    return GroupRun(group=given.group, machines=names, end=RunEnd.UNABLE, repeat=given.repeat, why=why[:WHY])


def _named(ranks: Iterable[int]) -> str:
    return listed([f"rank {rank}" for rank in sorted(ranks)], NAMED)
