"""Replay on group: run a job's script on one group of its machines; the results of the groups are then compared.

A group is launched like a job, under its own name (``gpt~row-3``). It is ended when all of its ranks have done
their steps, a rank has failed, or the time is up. The activity can run twice: agents answer repeated commands with the
results that they have, so a second attempt continues with the running ranks.
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
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.activity import Activity, Bounds, twice
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.release_machines import ReleaseMachines
from activities.heartbeat import Say, request_id
from activities.turns import gathered
from everstep.base.backoff import Backoff
from everstep.base.text import listed
from everstep.decisions.blame.first_failure import first_failure, headline_of
from everstep.decisions.blame.replay.kept_runs import LETTERS, WHY, bounded, digest
from everstep.errors import AgentError, AgentUnreachable, EverstepError
from everstep.model.evidence import RankExit
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, RunEnd

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient, AgentClients
    from agent.v1 import agent_pb2 as pb

ROOM = timedelta(minutes=5)
"""The extra time of a trial, before and after its steps."""
INTERVAL_S = 0.1
"""The time between two samples of the ranks by an agent, seconds."""
SETTLE_S = 0.5
"""Once a rank has failed, the other ranks of its group have this long to report their failures, seconds."""
DYING_S = 60.0
"""The longest wait for the end of killed ranks of a replay, seconds."""
PATIENCE = 3.0
"""A group still steps if the time since its last step is at most this multiple of its longest step time."""
LEAST_STEPS = 3
"""The pace of a group is known after this many steps: three steps give two step times, and neither includes the
start."""
NAMED = 4
"""The largest number of ranks that a text names."""
_STATE = re.compile(r"^--- everstep: state after step \d+: (\w+)$", re.MULTILINE)


class ReplayOnGroup(Activity[GroupRun]):
    """Run a job's script on one group of its machines, while the job itself is stopped.

    The result is what the group computed, or how it failed. Nothing of the trial stays on the machines.
    """

    name = "Replay group"

    job: PlacedJob
    """The trial's job (``everstep.decisions.blame.replay.group_jobs.spec_of_group``), on the group's machines."""
    group: str
    """The name of the group."""
    repeat: int = 1
    """The number of this trial of the group, from 1."""
    steps: int = 10
    """The number of steps of a trial."""
    start_s: float
    """The time limit for the first step of all ranks, seconds."""
    limit_s: float = 300.0
    """The time limit for the remaining steps, seconds."""
    patience_s: float = 10.0
    """Silent agents are asked again for this long, seconds."""

    def line(self) -> str:
        names = listed([machine.name for machine in self.job.machines], 4)
        again = f", run {self.repeat}" if self.repeat > 1 else ""
        return f"{self.group}{again}: {names}, {self.job.spec.topology().text}"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.start_s + self.limit_s) + ROOM)

    async def perform(self, tools: Tools, say: Say) -> GroupRun:
        began = time.monotonic()
        try:
            run = await self._run(tools, say)
        except ApplicationError as error:
            run = self._unable(str(error))
        finally:
            if not _another_attempt_follows():
                await asyncio.shield(self._release(tools, say))
        return run.model_copy(update={"seconds": round(time.monotonic() - began, 3)})

    async def _run(self, tools: Tools, say: Say) -> GroupRun:
        from agent.state.rank_record import exit_of

        spec, machines = self.job.spec, self.job.machines
        say(f"{self.group}: fork servers on {len(machines)} machines")
        await PrepareMachines(job=self.job, patience_s=self.patience_s).perform(tools, say)
        launch = LaunchRanks(
            job=self.job, generation=self.repeat, resume_step=0, begins_run=True, patience_s=self.patience_s
        )
        await launch.perform(replace(tools, watcher=None), say)  # a replay opens no incident
        end, why = await Followed(tools.agents, self).until_over(say)
        stopped, silent = await self._stop(tools)
        if silent:
            return self._unable(f"{listed(silent, NAMED)} does not answer")
        forgotten = [machine for machine, reply in stopped.items() if reply.unknown or not reply.ranks]
        if forgotten and (end in {RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_STARTED} or len(forgotten) == len(machines)):
            return self._unable(
                f"{listed(forgotten, NAMED)} does not know the ranks of this trial: they were ended from outside"
            )
        kind = await self._kind(tools)
        if end is RunEnd.CRASHED:
            exits = [exit_of(machine, rank) for machine, reply in stopped.items() for rank in reply.ranks]
            why = _crash(exits) or why
        steps = await gathered(self._steps(tools, machine) for machine in machines)
        reports = [record for of_machine in steps for record in of_machine]
        if bad := not_finite(reports, spec.policy):
            end, why = RunEnd.NOT_FINITE, bad
        ranks = sorted((rank for reply in stopped.values() for rank in reply.ranks), key=lambda rank: rank.rank)
        run = GroupRun(
            group=self.group,
            machines=[machine.name for machine in machines],
            end=end,
            repeat=self.repeat,
            why=why,
            steps=max(0, min((rank.completed_steps for rank in ranks), default=0)),
            losses=loss_digests(reports),
            states=state_digests({rank.rank: rank.log_tail for rank in ranks}),
            kind=kind,
        )
        return bounded(run.model_copy(update={"shape": shape_of(run, len(reports))}))

    async def _stop(self, tools: Tools) -> tuple[dict[str, pb.StopReply], dict[str, AgentUnreachable]]:
        from activities.agents.call_all import on_all
        from agent.v1 import agent_pb2 as pb

        request = pb.StopRequest(
            request_id=request_id(),
            job=self.job.spec.name,
            generation=self.repeat,
            run=self.job.run,
            verify_bytes=0,
        )

        async def stop_machine(_machine: Machine, client: AgentClient) -> pb.StopReply:
            return await client.stop(request, timeout_s=20)

        return await on_all(
            tools.agents, self.job.machines, stop_machine, say=lambda _: None, patience_s=self.patience_s
        )

    async def _kind(self, tools: Tools) -> str:
        """Return the hardware of the machines: one description if all are equal, otherwise each machine's description,
        in order."""

        async def hardware(machine: Machine) -> str:
            try:
                if described := (await tools.agents.get(machine.address).describe()).hardware:
                    return described
            except EverstepError:
                pass
            return f"unknown hardware of {machine.name}"

        found = await gathered(map(hardware, self.job.machines))
        return found[0] if len(set(found)) == 1 else " + ".join(found)

    async def _steps(self, tools: Tools, machine: Machine) -> list[tuple[int, pb.StepRecord]]:
        from agent.v1 import agent_pb2 as pb

        request = pb.StepsRequest(job=self.job.spec.name, rank=-1, from_step=0)
        try:
            replies = [reply async for reply in tools.agents.get(machine.address).steps(request)]
        except EverstepError as error:
            raise ApplicationError(f"{machine.name} does not send its step records: {error}") from error
        return [
            (reply.rank, record) for reply in replies for record in reply.records if record.generation == self.repeat
        ]

    async def _release(self, tools: Tools, say: Say) -> None:
        """End the group on its machines. If that fails, the group is ended at the next launch or the end of the job."""
        with contextlib.suppress(ApplicationError):
            await ReleaseMachines(job=self.job, dying_s=DYING_S).perform(tools, say)

    def _unable(self, why: str) -> GroupRun:
        names = [machine.name for machine in self.job.machines]
        return GroupRun(group=self.group, machines=names, end=RunEnd.UNABLE, repeat=self.repeat, why=why[:WHY])


class Followed:
    """The ranks of a group while they run."""

    def __init__(self, agents: AgentClients, trial: ReplayOnGroup) -> None:
        self._agents, self._trial = agents, trial
        self._ranks: dict[int, pb.RankProgress] = {}
        self._changed = asyncio.Event()
        self._pace = GroupPace()

    async def until_over(self, say: Say) -> tuple[RunEnd, str]:
        """Wait until all ranks have done their steps, a rank has failed, or the time is up; returns the kind of the end
        and its reason.

        The first step has its own limit, because it includes the start, e.g. loading the program from a slow disk.
        """
        trial, start_s = self._trial, self._trial.start_s
        followers = [asyncio.create_task(self._follow(machine)) for machine in trial.job.machines]
        try:
            if not await self._within(start_s, self._started, say, "have begun"):
                return (
                    RunEnd.NOT_STARTED,
                    f"{self._late(self._started)} did not complete a first step within {start_s:g} s",
                )
            if not await self._within(trial.limit_s, self._finished, say, f"have done {trial.steps} steps"):
                within = f"within {trial.limit_s:g} s of the first"
                why = f"{self._late(self._finished)} did not do {trial.steps} steps {within}"
                if self._pace.is_stepping(time.monotonic()):
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

    async def _within(self, limit_s: float, reached: Callable[[], set[int]], say: Say, words: str) -> bool:
        """Wait until all ranks have reached a point, or a rank has failed; returns whether that was in time."""
        world = self._trial.job.spec.topology().world_size
        try:
            async with asyncio.timeout(limit_s):
                while len(reached()) < world and not self._failed:
                    say(f"{self._trial.group}: {len(reached())} of {world} ranks {words}")
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

    def _late(self, reached: Callable[[], set[int]]) -> str:
        return _named(set(range(self._trial.job.spec.topology().world_size)) - reached())

    async def _follow(self, machine: Machine) -> None:
        from agent.v1 import agent_pb2 as pb

        request, backoff = pb.ProgressRequest(job=self._trial.job.spec.name, interval_s=INTERVAL_S), Backoff(0.1, 1.0)
        while True:
            with contextlib.suppress(AgentError):
                async for reply in self._agents.get(machine.address).progress(request):
                    for rank in reply.ranks:
                        if rank.generation == self._trial.repeat:
                            self._ranks[rank.rank] = rank
                    if len(self._ranks) == self._trial.job.spec.topology().world_size:
                        slowest = min(one.completed_steps for one in self._ranks.values())
                        self._pace.note(slowest, time.monotonic())
                    self._changed.set()
            await asyncio.sleep(backoff.next_s())


class GroupPace:
    """The pace of the slowest rank of a group."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._steps = 0

    def note(self, steps: int, now: float) -> None:
        """Note how many steps are completed at the given time."""
        if steps > self._steps:
            self._steps = steps
            self._seen.append(now)

    def is_stepping(self, now: float) -> bool:
        """Return whether the last step is recent, compared with the longest step time; False before ``LEAST_STEPS``
        steps."""
        if len(self._seen) < LEAST_STEPS:
            return False
        longest = max(later - earlier for earlier, later in pairwise(self._seen))
        return now - self._seen[-1] <= PATIENCE * longest


def loss_digests(records: Iterable[tuple[int, pb.StepRecord]]) -> list[str]:
    """Return for each step, in order, a digest of all ranks' losses and gradient norms (all 64 bits)."""
    of_step: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for rank, record in records:
        of_step[record.step].append((rank, struct.pack("<ddI", record.loss, record.grad_norm, record.given)))
    return [digest(f"{rank}:{bits.hex()}" for rank, bits in sorted(found)) for _, found in sorted(of_step.items())]


def shape_of(run: GroupRun, reports: int) -> str:
    """Return the number of results of a trial, as text. Trials are compared only if these numbers are equal: a machine
    with a hung disk has fewer results, but computed nothing wrong."""
    of_ranks = f"states of {len(run.states)} ranks" if run.states else "no states"
    return f"{reports} reports of {len(run.losses)} steps, {of_ranks}"


def state_digests(logs: Mapping[int, str]) -> list[str]:
    """Return for each rank the digest of its state from its log; the result is empty if a rank logged none."""
    found = [_STATE.findall(log) for _, log in sorted(logs.items())]
    if not all(found):
        return []
    return [digests[-1][:LETTERS] for digests in found]


def not_finite(records: Iterable[tuple[int, pb.StepRecord]], policy: RecoveryPolicy) -> str:
    """Return which number was the first that stayed not finite for as many steps as the policy allows; empty: none did.

    The limit is needed because a GradScaler begins with some steps whose gradient norm is infinite, and skips these
    steps. That happens in every group.
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
    """Return how the rank that failed first ended; empty: it is not known."""
    first = first_failure(exits)
    return headline_of(first) if first else ""


def _another_attempt_follows() -> bool:
    """Return whether another attempt continues with the same ranks: this worker is drained, or the server gave up this
    attempt, e.g. after missing heartbeats."""
    details = activity.cancellation_details()
    return details is not None and not details.cancel_requested


def _named(ranks: Iterable[int]) -> str:
    return listed([f"rank {rank}" for rank in sorted(ranks)], NAMED)
