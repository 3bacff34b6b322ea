"""Detects ranks that drift so far apart that their slots may have no step in common.

Ranks with collectives in every step are at most one step apart. If ranks synchronize only every 25 steps, fast ranks
are up to 25 steps ahead of slow ranks. Own slots hold only the last few steps and pinned steps, so there may be no
common step although every rank saves. Once drift is seen, machines are aligned
(``everstep/decisions/keep/align_backups.py``): all of them keep the same step until the next named step is complete.

Machines show their ranks at different times, and no two clocks are compared. So a rank counts as behind only compared
with the step that another rank had ``LATE_S`` earlier.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LATE_S = 0.5
"""The longest time from a machine's observation to its arrival at the watcher, seconds."""
SEEN_AGAIN_S = 1.0
"""Ranks drift if they are seen apart twice, with at least this many seconds in between. If they are seen apart only
once, one machine may have paused."""
RECALL_S = 60.0
"""Ranks no longer count as drifting when they were not seen apart for this many seconds."""
UNSAFE_SLOTS = 2
"""The number of a rank's slots whose step may soon be overwritten: the slot that is written, and the newest slot."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The progress of a rank, as its machine last showed it."""

    rank: int
    own_step: int
    """The newest step in the rank's own slots; -1: none."""
    completed_steps: int
    heard_ns: int
    """When the machine's message arrived, on the receiver's clock."""
    newest_slots: int = 0
    """The number of the rank's slots that have the newest steps, whatever is pinned; 0: not known. A rank may use fewer
    slots than its job wants, since memory is short, and pinned steps take slots."""


@dataclass(slots=True)
class DriftRule:
    """The drift of the ranks of one generation of a job.

    Args:
        slots: The number of slots of a rank that does not show how many of its slots have the newest steps.
    """

    slots: int
    _times: list[int] = field(default_factory=list)
    _newest: list[int] = field(default_factory=list)
    """The newest step in any rank's slots from each of these times on; both lists are in ascending order."""
    _seen: deque[tuple[int, int]] = field(default_factory=deque)
    """When ranks were seen apart, and by how many steps."""

    def observe(self, ranks: Iterable[RankPosition], now_ns: int) -> int:
        """Return by how many steps ranks drift apart; 0: their slots still have a common step. Call this often."""
        known = [rank for rank in ranks if rank.own_step >= 0]
        newest = max((rank.own_step for rank in known), default=-1)
        if newest > max(self._newest[-1:], default=-1):
            self._times.append(now_ns)
            self._newest.append(newest)
        old = max(bisect_right(self._times, now_ns - int(RECALL_S * 1e9)) - 1, 0)
        del self._times[:old], self._newest[:old]
        distances = (self._before(rank.heard_ns) - max(rank.own_step, rank.completed_steps) for rank in known)
        apart = max(distances, default=0)
        slots = min((rank.newest_slots or self.slots for rank in known), default=self.slots)
        if apart > slots - UNSAFE_SLOTS:
            self._seen.append((now_ns, apart))
        while self._seen and self._seen[0][0] < now_ns - RECALL_S * 1e9:
            self._seen.popleft()
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < SEEN_AGAIN_S * 1e9:
            return 0
        return max(steps for _, steps in self._seen)

    def _before(self, heard_ns: int) -> int:
        """Return the newest step of any rank ``LATE_S`` before a machine's message arrived."""
        index = bisect_right(self._times, heard_ns - int(LATE_S * 1e9)) - 1
        return self._newest[index] if index >= 0 else -1
