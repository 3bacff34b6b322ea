"""Ranks that hang, so that the others wait for them; and a script that hangs on every machine."""

from __future__ import annotations

from collections.abc import Sequence

from drills.faults.fault import RankFault
from drills.spec.fault import WITH_EVICTION, OnRanks
from everstep.model.job import JobSpec
from everstep.model.topology import Topology


class Hang(OnRanks, RankFault):
    """A rank hangs and the other ranks wait for it; its machine leaves the job if there is a standby."""

    hangs = True
    may_hang = True

    @property
    def stages(self) -> Sequence[str]:
        """All ranks are traced before the stop."""
        return ("trace", *WITH_EVICTION)

    def leaving(self, spec: JobSpec) -> list[str]:
        """The machines of the ranks that hang."""
        return sorted({f"m{spec.topology().machine(rank)}" for rank in self.struck_ranks(spec)})


class StopRank(Hang):
    """A rank is stopped by a signal."""

    name = "stop-rank"
    summary = "SIGSTOP: the rank hangs and its peers wait"
    line = "SIGSTOP to {ranks}"
    action = "stop-rank"
    meets = "opening"


class Spin(Hang):
    """A loop holds Python's lock."""

    name = "spin"
    summary = "a loop without end holds Python's lock"
    line = "a loop without end in {ranks}"
    action = "spin"
    seldom = True


class Deadlock(Hang):
    """A lock is never released."""

    name = "deadlock"
    summary = "a lock is never released"
    line = "a deadlock in {ranks}"
    action = "deadlock"
    seldom = True


class SkipCollective(Hang):
    """A rank skips a collective, and the others wait in it."""

    name = "skip-collective"
    summary = "a collective is not entered"
    line = "{ranks} skips a collective"
    action = "skip-collective"
    seldom = True

    def standbys(self, topology: Topology) -> int:
        """Enough standbys for all machines of a pipeline: gloo records no point-to-point, so all may leave."""
        return topology.pp


class HangDataloader(Hang):
    """The process of a data loader hangs."""

    name = "hang-dataloader"
    summary = "the process of a data loader waits for ever"
    line = "the data loader of {ranks} waits for ever"
    action = "hang-dataloader"
    seldom = True


class WrongOrder(RankFault):
    """Ranks call collectives in a different order: the script is at fault, no machine is."""

    name = "wrong-order"
    summary = "odd ranks call two collectives in another order than even ones: the script's fault, and of no machine"
    line = "collectives in an order that works on no machine"
    action = "wrong-order"
    not_soaked = "all ranks act in it at once, which no second fault can strike between"

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        return list(range(spec.topology().world_size))
