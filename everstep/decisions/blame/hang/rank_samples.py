"""The samples of each rank of a job that hangs. A rank without samples is not assumed to be healthy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.decisions.blame.hang.stacks import LeafKind, ProcessRole, Signature

WORLD = "0"
"""Name of the group of all ranks in flight records."""


class PendingOperation(NamedTuple):
    """An operation that a rank has entered and that is not done."""

    group: str
    """Name of the process group, the same on all of its ranks."""
    number: int
    """The number of this operation among those of the group."""
    operation: str
    """``all_reduce``"""
    sizes: str = ""
    """Shapes of what goes in, where all ranks must have the same; else empty."""
    peer: int | None = None
    """The other rank of a p2p operation; None: the operation is a collective, or the rank is not known."""
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class CommunicationRecord:
    """How far a rank came in each of its process groups: from torch's flight recorder, or NCCL's RAS."""

    last: Mapping[str, int]
    """Group → number of the newest collective that the rank entered."""
    pending: tuple[PendingOperation, ...] = ()
    """The operations that the rank entered and did not finish, the oldest of each group."""
    order: tuple[tuple[str, int], ...] = ()
    """The newest collectives that it entered, the newest last: group and number."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """The samples of one rank."""

    trainer: Signature | None = None
    """The activity of the rank itself; None: its stack could not be read."""
    helpers: tuple[Signature, ...] = ()
    """The activity of the rank's other processes: data loaders, checkpoints, its launcher."""
    record: CommunicationRecord | None = None
    """None: it has none, or did not answer."""
    is_stopped: bool = False
    """The rank's process is stopped (state T): it does not respond."""
    is_unresponsive: bool = False
    """NCCL's RAS of the others gets no answer from its process."""

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the rank."""
        return self.trainer is not None or self.record is not None or self.is_stopped

    @property
    def doing(self) -> tuple[Signature, ...]:
        """What it does and which of its helpers are busy: what is compared between ranks."""
        if self.trainer is None:
            return ()
        calm = (LeafKind.IDLE, ProcessRole.LAUNCHER)
        busy = {helper for helper in self.helpers if helper.leaf.kind not in calm and helper.role not in calm}
        return (self.trainer, *sorted(busy, key=lambda one: (one.role, one.path))) if busy else (self.trainer,)


@dataclass(frozen=True, slots=True)
class JobSamples:
    """The samples of a job that does not step."""

    ranks: Mapping[int, RankSample]
    """Those of which something was looked for."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process group → its ranks, if the records show them."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Process group → what its script calls it, e.g. ``mesh_tp``."""
    moved: frozenset[int] | None = None
    """Ranks whose stacks or records changed between two samples; None: there was one sample only."""
    ras_ranks: int = 0
    """NCCL's RAS was asked what ranks did, and numbers so many; it may be asked at any time. 0: it was not."""
    is_hung: bool = False
    """It is known from elsewhere that the job does not step. One sample of stacks does not show it."""

    def of(self, rank: int) -> RankSample:
        """Return the samples of one rank."""
        return self.ranks.get(rank, NOTHING)


NOTHING = RankSample()
