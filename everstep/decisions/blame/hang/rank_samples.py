"""What samples show of each rank of a job. A rank without samples is not assumed to be healthy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
    order: tuple[tuple[str, int, bool], ...] = ()
    """The operations that the rank called last, the newest last: group, number, and whether it is a p2p operation."""


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
