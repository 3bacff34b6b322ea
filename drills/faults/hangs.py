"""Faults that make a rank hang while the other ranks wait for it, and a script that hangs on any machine."""

from __future__ import annotations

from typing import ClassVar

from drills.faults.fault import RankFault
from drills.spec.fault import WITH_EVICTION, OnRanks
from everstep.model.job import JobSpec
from everstep.model.topology import Topology


class Hang(OnRanks, RankFault):
    """A rank hangs; its machine leaves the job if there is a standby."""

    hangs = True
    may_hang = True
    stages: ClassVar = ("trace", *WITH_EVICTION)

    def leaving(self, spec: JobSpec) -> list[str]:
        """Return the machines of the ranks that hang."""
        return sorted({f"m{spec.topology().machine(rank)}" for rank in self.struck_ranks(spec)})


class StopRank(Hang):
    """A rank is stopped by SIGSTOP."""

    name = "stop-rank"
    summary = "SIGSTOP: the rank hangs and its peers wait"
    line = "SIGSTOP to {ranks}"
    action = "stop-rank"
    meets = "opening"


class Spin(Hang):
    """A rank runs an endless loop that holds Python's lock."""

    name = "spin"
    summary = "an endless loop holds Python's lock"
    line = "an endless loop in {ranks}"
    action = "spin"
    seldom = True


class Deadlock(Hang):
    """A rank waits for a lock that is never released."""

    name = "deadlock"
    summary = "a lock is never released"
    line = "a deadlock in {ranks}"
    action = "deadlock"
    seldom = True


class SkipCollective(Hang):
    """A rank skips a collective, and the other ranks wait in it."""

    name = "skip-collective"
    summary = "a rank does not enter a collective"
    line = "{ranks} skips a collective"
    action = "skip-collective"
    seldom = True

    def standbys(self, topology: Topology) -> int:
        """One standby for each machine of a pipeline: gloo records no point-to-point operations, so all of these
        machines may leave."""
        return topology.pp


class HangDataloader(Hang):
    """The process of a rank's data loader hangs."""

    name = "hang-dataloader"
    summary = "the process of a rank's data loader waits for ever"
    line = "the data loader of {ranks} waits for ever"
    action = "hang-dataloader"
    seldom = True


class WrongOrder(RankFault):
    """Ranks call collectives in different orders: the script is at fault, and no machine."""

    name = "wrong-order"
    summary = "odd ranks call two collectives in another order than even ranks: the script is at fault, and no machine"
    line = "collectives in an order that works on no machine"
    action = "wrong-order"
    not_soaked = "all ranks act at once, so no second fault can strike in between"

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        return list(range(spec.topology().world_size))
