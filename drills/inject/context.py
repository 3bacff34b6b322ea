"""The context of a running drill: its job and cluster, and the waits and kills that injectors of faults need."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agent.v1 import agent_pb2 as pb
from controlplane.local import power
from drills.clusters.local import DrillCluster
from drills.inject.plan import Planned
from drills.observe import step_records
from drills.observe.observed import DrillObservations
from drills.observe.processes import RankCopies
from drills.observe.stored_copies import StoredCopies
from drills.spec.fault import STRIKE
from drills.spec.loss import Loss, Promise, best_step, promise_of
from drills.spec.request import DrillRequest
from everstep.errors import AgentError, ClusterError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.rank import drill_faults as faults

POLL_S = 0.05
"""Time between two checks of a condition that the injector waits for, seconds."""
BACK_LIMIT_S = 60.0
"""A killed part must be back within this time, seconds."""
QUIET_S = 6.0
"""Backups that did not change for this time count as final, seconds: a failed peer is tried again every 5 s."""
CATCH_UP_S = 2.0
"""Longest wait of a second fault for backups, seconds; the job makes about ten steps in this time."""
SETTLE_LIMIT_S = 20.0
"""Backups and disks of a job that waits at a step are complete within this time, seconds."""
INCIDENT_LIMIT_S = 240.0
"""An incident is over within this time, even with diagnostic tests or a vote on a slow machine, seconds."""


@dataclass
class DrillContext:
    """One run of one drill."""

    cluster: DrillCluster
    request: DrillRequest
    spec: JobSpec
    machines: list[Machine]
    """The machines of the job."""
    planned: Planned
    seen: DrillObservations = field(default_factory=DrillObservations)
    off: ExitStack = field(default_factory=ExitStack)
    """Holds the machines without power; closing it gives them power again."""

    def __post_init__(self) -> None:
        self.stored = StoredCopies(self.cluster.file, self.spec, self.machines)
        self.target = self.machines[self.request.opening.machine_index(self.spec)]

    @property
    def memory(self) -> Path:
        """The shared memory of the struck machine."""
        return self.cluster.file.shm / self.target.name

    @property
    def disk(self) -> Path:
        """The folder of the struck machine's checkpoints on disk."""
        return power.state_folder(self.cluster.file, self.target.name) / "checkpoints"

    # Waiting.

    async def reach(self, step: int, machines: list[Machine] | None = None) -> None:
        """Wait until all ranks of these machines, by default all of the job, have completed this many steps."""
        async with self.cluster.control.feed(self.spec.name, machines or self.machines, POLL_S) as feed:
            async for picture in feed.pictures():
                if picture.step is not None and picture.step >= step:
                    return

    async def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks on the struck machine, once they run."""
        wanted = self.spec.topology().ranks(self.machines.index(self.target))
        async with self.cluster.control.feed(self.spec.name, self.machines, POLL_S) as feed:
            async for picture in feed.pictures():
                if all(rank in picture.ranks for rank in wanted):
                    return [picture.ranks[rank].pid for rank in wanted]
        raise ClusterError(f"the ranks of {self.target.name} do not run")

    async def until(self, holds: Callable[[], bool], seconds: float, problem: str) -> None:
        """Wait until a condition holds.

        Raises:
            ClusterError: the condition does not hold in time; the message is "``problem`` within … s".
        """
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(holds):
            if time.monotonic() > deadline:
                raise ClusterError(f"{problem} within {seconds:.0f} s")
            await asyncio.sleep(POLL_S)

    async def incident_over(self) -> None:
        """Wait until an incident of the job is over.

        Raises:
            ClusterError: no incident is over within the time limit.
        """
        deadline = time.monotonic() + INCIDENT_LIMIT_S
        while time.monotonic() < deadline:
            with suppress(EverstepError):
                state = await self.cluster.control.state(self.spec.name)
                if any(incident.resolution for incident in state.incidents):
                    return
            await asyncio.sleep(10 * POLL_S)
        raise ClusterError(f"no incident was over within {INCIDENT_LIMIT_S:.0f} s")

    async def await_holds(self) -> int:
        """Wait until all ranks wait for the injector; returns the number of steps that they have completed."""
        holds = self.planned.holds
        while not all(self.fired(hold["id"]) for hold in holds):  # noqa: ASYNC110 - other processes write files
            await asyncio.sleep(POLL_S)
        return int(holds[0]["at_step"])

    async def await_saves(self, step: int, *, backups: bool = True, disk: int | None = None) -> None:
        """Wait until all saves of a step are complete.

        Args:
            step: Step at which the job waits.
            backups: Whether to wait for backups too. If some lack the step, wait until they no longer change: a rank
                that is behind skips every second step.
            disk: Newest step that must be on all disks; None: the disks do not matter.

        Raises:
            ClusterError: the saves are not complete within the time limit.
        """
        stored, ranks = self.stored, range(self.spec.topology().world_size)
        await self._all_have(ranks, step, stored.own_steps, "saved in memory")
        if backups:
            await self._backups_final([rank for rank in ranks if stored.backup(rank)], step)
        if disk:
            await self._all_have(ranks, disk, stored.disk_steps, "written to disk")

    async def _backups_final(self, ranks: Sequence[int], step: int) -> None:
        seen: dict[int, set[int]] = {}
        since = time.monotonic()

        def final() -> bool:
            nonlocal seen, since
            before, seen = seen, {rank: self.stored.backup_steps(rank) for rank in ranks}
            if seen != before:
                since = time.monotonic()
            return all(seen.values()) and (
                all(step in steps for steps in seen.values()) or time.monotonic() - since > QUIET_S
            )

        await self.until(final, SETTLE_LIMIT_S, "backups were not complete")

    async def _all_have(self, ranks: Sequence[int], step: int, steps_of: Callable[[int], set[int]], how: str) -> None:
        def missing() -> list[int]:
            return [rank for rank in ranks if step not in steps_of(rank)]

        try:
            await self.until(lambda: not missing(), SETTLE_LIMIT_S, f"step {step} was not {how}")
        except ClusterError as error:
            await self.listen(1.0)
            reports = f"; agents report: {'; '.join(sorted(self.seen.reported))}" if self.seen.reported else ""
            raise ClusterError(f"{error} by ranks {missing()}{reports}") from error

    # Marks.

    def fired(self, name: str) -> dict[str, object] | None:
        """Return the mark that an action happened; None: it has not."""
        return faults.fired(self.planned.plan, {"id": name})

    def mark(self, name: str, **details: object) -> None:
        """Write the mark that an action happened, at ``time_ns`` or now."""
        faults.claim(self.planned.plan, {"id": name}, **details)

    # Agents.

    async def power_on(self) -> None:
        """Give all machines power again, and wait for their agents."""
        self.off.close()
        for machine in self.machines:
            await self._await_agent(machine, lambda described: described.pid > 0)

    def agent(self, machine: Machine) -> int:
        """Return the pid of a machine's agent.

        Raises:
            ClusterError: the agent does not run.
        """
        pid = self.cluster.processes().get(f"agent-{machine.name}")
        if pid is None:
            raise ClusterError(f"the agent of {machine.name} does not run")
        return pid

    async def agent_back(self, machine: Machine, before: int) -> int | None:
        """Wait until an agent with another pid than ``before`` answers; returns the time, or None after the limit."""
        return await self._await_agent(machine, lambda described: described.pid not in (0, before))

    async def fork_server(self, machine: Machine) -> int:
        """Return the pid of the job's fork server on a machine; 0: there is none."""
        return _fork_server(await self.cluster.control.agents.get(machine.address).describe(), self.spec.name)

    async def fork_server_back(self, machine: Machine, before: int) -> int | None:
        """Wait until a fork server with another pid than ``before`` is ready; return the time, or None if too late."""
        job = self.spec.name
        return await self._await_agent(machine, lambda described: _fork_server(described, job) not in (0, before))

    async def processes_back(self, before: Mapping[str, int]) -> int | None:
        """Wait until processes of these names run with other pids; returns the time, or None after the limit."""
        deadline = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < deadline:
            now = await asyncio.to_thread(self.cluster.processes)
            if all(now.get(name) not in (None, pid) for name, pid in before.items()):
                return time.time_ns()
            await asyncio.sleep(POLL_S)
        return None

    async def _await_agent(self, machine: Machine, holds: Callable[[pb.DescribeReply], bool]) -> int | None:
        deadline = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < deadline:
            try:
                described = await self.cluster.control.agents.get(machine.address).describe(timeout_s=1.0)
                if holds(described):
                    return time.time_ns()
            except AgentError:
                pass
            await asyncio.sleep(POLL_S)
        return None

    async def listen(
        self, seconds: float, machines: list[Machine] | None = None, *, enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Collect the agents' reports about backups and disks for some seconds, or until ``enough`` returns True."""
        tasks = [asyncio.create_task(self._listen_to(machine)) for machine in machines or self.machines]
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not enough():  # noqa: ASYNC110 - the tasks collect them
                await asyncio.sleep(POLL_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen_to(self, machine: Machine) -> None:
        request = pb.ProgressRequest(job=self.spec.name, interval_s=0.1)
        async for reply in self.cluster.control.agents.get(machine.address).progress(request):
            for rank in reply.ranks:
                saved = rank.saved
                self.seen.reported |= {text for text in (saved.backup_problem, saved.disk_problem) if text}
                if saved.backup_step >= 0:
                    self.seen.lag = max(self.seen.lag or 0, saved.own_step - saved.backup_step)

    # The second fault.

    async def second_fault(self, *, exact: bool) -> None:
        """Inject the second fault, and record the steps that it may cost.

        Args:
            exact: Whether the job waits and all copies are known, so that the cost follows from the copies that are
                left.
        """
        loss = self.request.opening.loss(self.spec)
        if loss.ranks:
            self.seen.promise = self._promise(loss, exact=exact)
            await self._kill_ranks(loss)
        else:
            await asyncio.to_thread(self._cut_power, loss, exact)
        self.planned.let_go()  # the other ranks enter the next collective, and notice the loss there

    async def _kill_ranks(self, loss: Loss) -> None:
        async with self.cluster.control.feed(self.spec.name, self.machines, POLL_S) as feed:
            async for picture in feed.pictures():
                pids = [picture.ranks[rank].pid for rank in loss.ranks if rank in picture.ranks]
                if len(pids) == len(loss.ranks):
                    self.mark(STRIKE)
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    return

    def _cut_power(self, loss: Loss, exact: bool) -> None:
        names = [self.stored.machine(index) for index in loss.machines]
        cluster, job = self.cluster.file, self.spec.name
        promised = not exact and promise_of(self.spec, loss).steps is not None
        when = self._backups_caught_up(loss) if promised else lambda: True
        with ExitStack() as off:
            killed_ns = off.enter_context(power.powered_off(cluster, names, when=when))
            self.mark(STRIKE, time_ns=killed_ns)
            self.seen.promise = self._promise(loss, exact=exact)
            for name in names:
                records = step_records.rescue(job, power.state_folder(cluster, name), cluster.shm / name)
                power.empty_memory(cluster, name)
                if loss.disks:
                    power.empty_disk(cluster, name)
                    self.seen.emptied.append(name)
                    self.seen.records.join(records)
            if self.request.opening.stays_away:
                self.off.enter_context(off.pop_all())

    def _backups_caught_up(self, loss: Loss) -> Callable[[], bool]:
        """Return a check that backups have caught up with the steps, as the promise of their placement assumes.

        After ``CATCH_UP_S`` the check succeeds anyway, so that the strike happens.
        """
        deadline = math.inf

        def caught_up() -> bool:
            nonlocal deadline
            deadline = min(deadline, time.monotonic() + CATCH_UP_S)
            in_memory = self.stored.left(loss, disks=False)
            return best_step(in_memory) >= self.stored.newest() or time.monotonic() > deadline

        return caught_up

    def _promise(self, loss: Loss, *, exact: bool) -> Promise:
        """Return the largest number of steps that a strike may cost, by the placement's promise or by the copies that
        are left."""
        placed = promise_of(self.spec, loss)
        if placed.steps is not None and not exact:
            return placed
        best = best_step(self.stored.left(loss, self.seen.damaged))
        # If the job does not wait, a completed step may not be saved yet.
        lost = max(self.stored.newest() - best, 0) + (not exact)
        if best == 0:
            return Promise(lost, "no step is left of which every rank has an intact copy", begins_again=True)
        return Promise(lost, f"step {best} is the latest of which every rank has an intact copy left")


def copies_seen(copies: Collection[RankCopies], contexts: Sequence[DrillContext]) -> int:
    """Return the number of ranks that had two processes at once.

    Ranks on a machine whose link is down do not count: nothing can end them when the machine is replaced, and they wait
    for peers that are gone. ``Records.overlaps`` checks that they do not step.
    """
    away = {context.target.name for context in contexts if context.request.opening.unreachable}
    return sum(not away & set(pair.machines) for pair in copies)


def _fork_server(described: pb.DescribeReply, job: str) -> int:
    return next((entry.fork_server_pid for entry in described.jobs if entry.job == job), 0)
