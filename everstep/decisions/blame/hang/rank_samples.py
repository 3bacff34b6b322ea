"""What samples show of each rank of a job, reduced to what a judgement needs.

A rank without samples is not assumed to be healthy. The samples of several machines are merged (``merged``), in any
order and in any steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from everstep.decisions.blame.hang.stacks import LeafKind, ProcessRole, Signature

WORLD = "0"
"""The name of the group of all ranks in flight records."""


class PendingOperation(NamedTuple):
    """An operation that a rank has entered and not finished."""

    group: str
    """The name of the process group, the same on all of its ranks."""
    number: int
    """The number of the operation among the operations of its group."""
    operation: str
    """``all_reduce``"""
    sizes: str = ""
    """The shapes of the inputs if all ranks must have the same shapes; otherwise empty."""
    peer: int | None = None
    """The other rank of a p2p operation; None if the operation is a collective, or the rank is not known."""
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class CommunicationRecord:
    """The collectives that a rank has entered in each process group, from torch's flight recorder or NCCL's RAS."""

    last: Mapping[str, int]
    """Group → number of the newest collective that the rank entered. A collective that waits on the GPU for older
    operations of the same rank is not entered."""
    pending: tuple[PendingOperation, ...] = ()
    """The operations that the rank is inside."""
    order: tuple[tuple[int, int, bool], ...] = ()
    """The operations that the rank called last, the newest last: the index of the group in ``called``, the number, and
    whether it is a p2p operation. So ranks with different groups have the same order if they called the same."""
    called: tuple[str, ...] = ()
    """The groups in ``order``, the first one that was called first."""


class Position(NamedTuple):
    """Where a rank is in its code and in its collectives. It differs between two samples if the rank progressed."""

    code: tuple[int, ...] = ()
    """Digests of the lines at which the main thread and the threads of autograd are; empty: not known."""
    record: tuple[int, int] | None = None
    """The newest operation in the rank's flight record, and the newest one that is over; None: there is no record."""
    launched: Mapping[str, int] | None = None
    """Group → number of collectives that the rank launched, from NCCL's RAS; None: RAS was not asked."""

    def differs(self, other: Position) -> bool:
        """Return whether two positions differ in a part that both have."""
        return any(first and last and first != last for first, last in zip(self, other, strict=True))


NOWHERE = Position()
"""The position of a rank of which nothing is known."""


class ProcessSample(NamedTuple):
    """What a sample shows of one process of a rank, except for its stacks."""

    pid: int
    cpu_s: float
    """The CPU time of the process since it began, seconds."""
    waited_s: float
    """The time in which the process was ready to run and had no CPU, seconds."""
    io_bytes: int
    """The number of bytes read and written; -1 if not known."""
    switches: int = 0
    """The number of times that a thread of the process waited and resumed."""
    state: str = ""
    """The state of the process's first thread, one letter; empty if not known."""
    problem: str = ""
    """Why its stacks are not known; empty: they are."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """What samples show of one rank."""

    trainer: Signature | None = None
    """The activity of the rank itself; None: its stack could not be read."""
    helpers: tuple[Signature, ...] = ()
    """The activity of the rank's other processes: data loaders, checkpoints, its launcher."""
    record: CommunicationRecord | None = None
    """None: the rank has no record, or did not answer."""
    is_stopped: bool = False
    """The rank's process is stopped (state T)."""
    blocked_in: str = ""
    """What the rank's first thread waits for in the kernel (a ``BlockedIn``); empty: not known."""
    is_unresponsive: bool = False
    """The rank's process does not answer NCCL's RAS."""
    sleeps: bool = False
    """The rank's process sleeps (state S)."""
    position: Position = NOWHERE
    processes: tuple[ProcessSample, ...] = ()
    """The processes of the rank; empty: not known."""

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the rank."""
        return self.trainer is not None or self.record is not None or self.is_stopped

    @property
    def waits_outside(self) -> bool:
        """Whether the rank waits for something outside of the job: an answer, a program, or the end of a sleep.

        A function of the script that is blocked like this waits on purpose. A wait for other ranks does not look so.
        """
        if self.trainer is None:
            return False
        kind = self.trainer.leaf.kind
        return kind is LeafKind.OUTSIDE or (kind is LeafKind.OTHER and bool(self.blocked_in))

    @property
    def activity(self) -> tuple[Signature, ...]:
        """The activity of the rank and of its busy helpers, which is compared between ranks; empty if not known."""
        if self.trainer is None:
            return ()
        busy = {
            helper
            for helper in self.helpers
            if helper.leaf.kind is not LeafKind.IDLE and helper.role is not ProcessRole.LAUNCHER
        }
        return self.trainer, *sorted(busy, key=lambda helper: (helper.role, helper.path))


@dataclass(frozen=True, slots=True)
class JobSamples:
    """What samples show of a job that does not step."""

    ranks: Mapping[int, RankSample]
    """The ranks that were sampled."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process group → its ranks, if the records show them."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Process group → its name in the script, e.g. ``mesh_tp``."""
    moved: frozenset[int] | None = None
    """Ranks whose stacks or records changed between two samples; None if there was only one sample."""
    ras_ranks: int = 0
    """The number of ranks that NCCL's RAS knows; 0 if RAS was not asked. RAS may be asked at any time."""
    is_hung: bool = False
    """Another source shows that the job does not step; one sample of stacks cannot show it."""

    unread: tuple[str, ...] = ()
    """For each file of the last sample that could not be read: which, why, and what to do."""

    def of(self, rank: int) -> RankSample:
        """Return what samples show of one rank."""
        return self.ranks.get(rank, NOTHING)


NOTHING = RankSample()


def merged(parts: Iterable[JobSamples]) -> JobSamples:
    """Return one sample of a job from samples of its parts, e.g. of its machines.

    The order of the parts has no effect, and parts may be merged in several steps. If two parts differ about a rank or
    a group, one of them counts; which one does not depend on the order either.

    Args:
        parts: Parts of one sample, so that their ``moved`` is None.
    """
    ranks: dict[int, RankSample] = {}
    groups: dict[str, tuple[int, ...]] = {}
    labels: dict[str, str] = {}
    unread: set[str] = set()
    ras_ranks, is_hung = 0, False
    for part in parts:
        _add(ranks, part.ranks)
        _add(groups, part.groups)
        _add(labels, part.labels)
        unread.update(part.unread)
        ras_ranks, is_hung = max(ras_ranks, part.ras_ranks), is_hung or part.is_hung
    return JobSamples(
        dict(sorted(ranks.items())),
        groups,
        labels,
        ras_ranks=ras_ranks,
        is_hung=is_hung,
        unread=tuple(sorted(unread)),
    )


def _add(known: dict[Any, Any], more: Mapping[Any, Any]) -> None:
    for key, value in more.items():
        other = known.setdefault(key, value)
        if other is not value and other != value:
            known[key] = max(other, value, key=repr)


def compared(first: JobSamples, last: JobSamples) -> JobSamples:
    """Return the last of two samples of a job, with the ranks that progressed since the first sample.

    The record of the first sample counts for a rank whose record the last sample does not have.
    """
    ranks = {}
    for rank, sample in last.ranks.items():
        earlier = first.of(rank).record if sample.record is None else None
        ranks[rank] = replace(sample, record=earlier) if earlier else sample
    moved = (rank for rank, sample in ranks.items() if sample.position.differs(first.of(rank).position))
    return replace(
        last,
        ranks=ranks,
        groups={**first.groups, **last.groups},
        labels={**first.labels, **last.labels},
        moved=frozenset(moved),
    )
