"""Whether a rank works: what its processes used up between two looks. One that computes for long is no hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

WORKS = 0.3
"""A rank that has, or waits for, so much of one CPU works; a shared one may give it little."""
IO_BYTES = 64 << 10
"""One that reads or writes so much between two looks does too."""


HELD = ("D", "t")
"""States of a process that the kernel holds up at both looks: it waits for a disk or a mount, as in one long write or
``fsync`` of a checkpoint, which uses up nothing; or a debugger holds it."""

SWITCHES = 20.0
"""So does one whose threads wait for something, and go on, so often in a second: it sends, receives or looks around."""


class UsedUp(NamedTuple):
    """What one process of a rank has used up since it began."""

    rank: int
    pid: int
    cpu_s: float
    waited_s: float
    """Time in which it could have run and had no CPU."""
    io_bytes: int
    """Read and written; -1: not known."""
    switches: int = 0
    """How often its threads waited for something and went on."""
    state: str = ""
    """Of its first thread, one letter; empty: not known."""


class RankWork(NamedTuple):
    """What the processes of one rank did between two looks."""

    share: float
    """Of one CPU that they had or waited for; 1 is a loop without end."""
    io_bytes: int
    switches: float = 0.0
    """A second."""
    is_held: bool = False
    """One of them waited in the kernel, or was held by a debugger, at both looks."""

    @property
    def works(self) -> bool:
        """Whether it does something."""
        return self.is_held or self.share >= WORKS or self.io_bytes >= IO_BYTES or self.switches >= SWITCHES


def work_of(first: Iterable[UsedUp], last: Iterable[UsedUp], seconds: float) -> Mapping[int, RankWork]:
    """What each rank did; those that were not seen twice are left out.

    Args:
        first: What its processes had used up at the first look.
        last: The same at the last one; ``pid`` is of one machine, and so of one rank.
        seconds: Between the two.
    """
    before = {(one.rank, one.pid): one for one in first}
    found: dict[int, RankWork] = {}
    for now in last:
        then = before.get((now.rank, now.pid))
        if then is None or seconds <= 0:
            continue
        share = (now.cpu_s - then.cpu_s + now.waited_s - then.waited_s) / seconds
        moved = now.io_bytes - then.io_bytes if min(now.io_bytes, then.io_bytes) >= 0 else 0
        so_far = found.get(now.rank, RankWork(0.0, 0))
        switches = so_far.switches + max(now.switches - then.switches, 0) / seconds
        is_held = so_far.is_held or (now.state in HELD and then.state in HELD)
        found[now.rank] = RankWork(so_far.share + max(share, 0.0), so_far.io_bytes + max(moved, 0), switches, is_held)
    return found
