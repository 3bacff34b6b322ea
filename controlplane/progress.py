"""The progress of a job's ranks, gathered from the agents of all its machines."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from controlplane.problems import Copying, copying_of
from everstep.errors import AgentError
from everstep.model.machine import Machine
from everstep.model.topology import Topology

RECONNECT_S = 0.2
RATE_WINDOW_S = 10.0
"""Length of the window over which speeds are averaged, seconds."""
QUIET_S, QUIET_STEPS = 10.0, 10
"""A job is quiet if it makes no step for this many seconds, or for this many times the length of a step if that is
longer."""


@dataclass(frozen=True, slots=True)
class RankView:
    """The state of one rank, as its agent reports it."""

    rank: int
    machine: str
    generation: int
    pid: int
    alive: bool
    attached: bool
    """Whether the rank's script uses everstep."""
    finished: bool
    """Whether the rank exited with success, or its training loop has ended."""
    completed_steps: int
    """Steps since the job's beginning; -1: not known."""
    optimizer_steps: int
    """Steps of the optimizer in this process."""
    loss: float
    """Loss in the newest report; NaN: there is no loss."""
    tokens: int
    """Number of tokens in all reports of its process."""
    stepped_ns: int = 0
    """Time of its last step, by the local clock, nanoseconds; 0: no step yet, or not known."""
    step_s: float = 0.0
    """Mean time of a step in this process, seconds; 0: not known."""

    @property
    def steps(self) -> int:
        """Steps that it has completed; -1: not known (yet)."""
        # Until a script joins the job, only calls of the optimizer show steps; without calls it may be restoring.
        return self.completed_steps if self.attached else self.optimizer_steps or -1


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of all ranks of a job."""

    time_ns: int
    ranks: Mapping[int, RankView]
    """The ranks of the newest generation."""
    silent: tuple[str, ...] = ()
    """Machines whose agent does not answer."""

    @property
    def generation(self) -> int:
        """The newest generation; 0: there is none yet."""
        return max((view.generation for view in self.ranks.values()), default=0)

    @property
    def step(self) -> int | None:
        """Steps that all known ranks have completed; None: not known.

        Ranks on silent machines do not count, since their data are old.
        """
        answering = [view for view in self.ranks.values() if view.machine not in self.silent]
        steps = min((view.steps for view in answering or self.ranks.values()), default=-1)
        return steps if steps >= 0 else None

    @property
    def loss(self) -> float | None:
        """Loss of the lowest rank that reports a loss: with pipeline parallelism only the last stage does."""
        losses = (view.loss for _, view in sorted(self.ranks.items()) if math.isfinite(view.loss))
        return next(losses, None)

    @property
    def alive(self) -> int:
        """Number of live ranks."""
        return sum(view.alive for view in self.ranks.values())

    @property
    def quiet_since_ns(self) -> int | None:
        """Time of the last step if the job is quiet, nanoseconds; None: its ranks step, or this is not known."""
        answering = [view for view in self.ranks.values() if view.machine not in self.silent and not view.finished]
        last = max((view.stepped_ns for view in answering), default=0)
        if not last or not all(view.step_s for view in answering if view.stepped_ns):
            return None  # after only one step, the length of a rank's steps is not known
        limit_s = max(QUIET_S, QUIET_STEPS * max(view.step_s for view in answering))
        return last if self.time_ns - last > limit_s * 1e9 else None

    def tokens(self, topology: Topology) -> int:
        """Number of tokens of the job in this generation; ranks of one model replica train on the same tokens."""
        replicas: dict[int, int] = {}
        for view in self.ranks.values():
            if view.rank < topology.world_size:
                replica = topology.coordinate(view.rank).dp
                replicas[replica] = max(replicas.get(replica, 0), view.tokens)
        return sum(replicas.values())


def views_of(machine: str, ranks: Iterable[pb.RankProgress], clock_ns: int = 0) -> list[RankView]:
    """The ranks in an agent's message; ``clock_ns``: local clock minus the machine's clock."""
    return [
        RankView(
            rank=rank.rank,
            machine=machine,
            generation=rank.generation,
            pid=rank.pid,
            alive=rank.alive,
            attached=rank.attached,
            finished=rank.finished or (rank.exit.kind == pb.Exit.CODE and rank.exit.value == 0),
            completed_steps=rank.completed_steps,
            optimizer_steps=rank.optimizer_steps,
            loss=rank.loss,
            tokens=rank.tokens,
            stepped_ns=rank.stepped_ns + clock_ns if rank.stepped_ns else 0,
            step_s=_step_s(rank),
        )
        for rank in ranks
    ]


def _step_s(rank: pb.RankProgress) -> float:
    steps = max(rank.reports, rank.optimizer_steps) - 1
    since = rank.stepped_ns - rank.milestones.first_step
    return since / 1e9 / steps if steps > 0 and since > 0 and rank.milestones.first_step else 0.0


def merge(views: Iterable[RankView], *, time_ns: int, silent: Sequence[str] = ()) -> JobProgress:
    """The progress of the newest generation, from the ranks of all machines."""
    views = list(views)
    newest = max((view.generation for view in views), default=0)
    return JobProgress(
        time_ns=time_ns,
        ranks={view.rank: view for view in views if view.generation == newest},
        silent=tuple(sorted(silent)),
    )


class ProgressFeed:
    """Reads the progress streams of a job's agents, and reopens a stream that breaks.

    Use it as an async context manager; ``current`` is the newest state.
    """

    def __init__(self, agents: AgentClients, job: str, machines: Sequence[Machine], *, interval_s: float = 0.2) -> None:
        self._agents = agents
        self._job = job
        self._machines = machines
        self._interval_s = interval_s
        self._ranks: dict[str, list[pb.RankProgress]] = {}
        self._clocks_ns: dict[str, int] = {}
        self._silent: set[str] = set()
        self._changed = asyncio.Event()
        self._streams: dict[Machine, asyncio.Task[None]] = {}
        self._ended: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.move_to(self._machines)
        return self

    def move_to(self, machines: Sequence[Machine]) -> None:
        """Follow the job on these machines from now on, since after an eviction the job has other machines."""
        for machine in self._streams.keys() - set(machines):
            stream = self._streams.pop(machine)
            stream.cancel()
            self._ended.append(stream)
            self._ranks.pop(machine.name, None)
            self._silent.discard(machine.name)
        for machine in machines:
            if machine not in self._streams:
                self._streams[machine] = asyncio.create_task(self._follow(machine))
        self._changed.set()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        streams = [*self._streams.values(), *self._ended]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    @property
    def current(self) -> JobProgress:
        """The newest progress."""
        views = [
            view
            for machine, ranks in self._ranks.items()
            for view in views_of(machine, ranks, self._clocks_ns[machine])
        ]
        return merge(views, time_ns=time.time_ns(), silent=tuple(self._silent))

    @property
    def copying(self) -> list[Copying]:
        """The progress of copies, from the last report of each machine."""
        return copying_of(self._ranks)

    async def pictures(self) -> AsyncIterator[JobProgress]:
        """The progress at every change, while the feed is open."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self.current

    async def _follow(self, machine: Machine) -> None:
        request = pb.ProgressRequest(job=self._job, interval_s=self._interval_s)
        while True:
            try:
                async for reply in self._agents.get(machine.address).progress(request):
                    self._silent.discard(machine.name)
                    if reply.ranks:  # after its end a job has no ranks: keep the last report
                        self._ranks[machine.name] = list(reply.ranks)
                        self._clocks_ns[machine.name] = time.time_ns() - reply.time_ns
                    self._changed.set()
            except AgentError:
                self._silent.add(machine.name)
                self._changed.set()
            await asyncio.sleep(RECONNECT_S)


@dataclass(slots=True)
class Rate:
    """Speed of a growing count, averaged over the last seconds; the average starts again if the count falls."""

    window_s: float = RATE_WINDOW_S
    _seen: deque[tuple[int, int]] = field(default_factory=deque)

    def add(self, count: int, time_ns: int) -> None:
        """Add a sample."""
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((time_ns, count))
        while len(self._seen) > 2 and time_ns - self._seen[1][0] >= self.window_s * 1e9:
            self._seen.popleft()

    @property
    def per_second(self) -> float | None:
        """Counts per second; None until there are two samples at different times."""
        if len(self._seen) < 2:
            return None
        (first_ns, first), (last_ns, last) = self._seen[0], self._seen[-1]
        return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else None
