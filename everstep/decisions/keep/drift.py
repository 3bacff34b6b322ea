"""The detection of ranks that drift so far apart that their slots have no step in common.

A rank with collectives in every step is at most a step ahead of another rank. If ranks synchronize more rarely, say
every 25 steps, fast ranks are ahead of slow ranks by up to 25 steps, and own slots hold only the last few steps: all
ranks may have no common step, although each of them saves. Once that is seen, machines are aligned
(``everstep/decisions/keep/align_backups.py``): then all of them keep the same step until the next step is whole.

Machines show their ranks at different times, and no two clocks are compared. A rank
counts as behind only against the step that another rank had ``LATE_S`` earlier.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LATE_S = 0.5
"""The longest time from a machine's observation to its arrival here, seconds."""
SEEN_AGAIN_S = 1.0
"""Ranks drift when they are seen apart twice, at least this many seconds apart: no machine paused meanwhile."""
RECALL_S = 60.0
"""Ranks drift until they were not seen apart for this many seconds."""
HELD_BACK = 2
"""The number of a file's slots that may be overwritten: the slot that is written, and the newest slot."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of a rank, as its machine showed it last."""

    rank: int
    own_step: int
    """Newest step in its own slots; -1: none."""
    completed_steps: int
    heard_ns: int
    """When the machine's message arrived, on the receiver's clock."""


@dataclass(slots=True)
class DriftRule:
    """The drift of the ranks of one generation of a job.

    Args:
        slots: The number of slots of each rank.
    """

    slots: int
    _times: list[int] = field(default_factory=list)
    _newest: list[int] = field(default_factory=list)
    """The newest step in any rank's slots from each of these times on; both lists grow."""
    _seen: deque[tuple[int, int]] = field(default_factory=deque)
    """When ranks were seen apart, and by how many steps."""

    def observe(self, ranks: Iterable[Standing], now_ns: int) -> int:
        """Return how many steps ranks were seen apart lately; 0: no more than their slots allow. Call this often."""
        known = [rank for rank in ranks if rank.own_step >= 0]
        newest = max((rank.own_step for rank in known), default=-1)
        if newest > max(self._newest[-1:], default=-1):
            self._times.append(now_ns)
            self._newest.append(newest)
        old = max(bisect_right(self._times, now_ns - int(RECALL_S * 1e9)) - 1, 0)
        del self._times[:old], self._newest[:old]
        distances = (self._before(rank.heard_ns) - max(rank.own_step, rank.completed_steps) for rank in known)
        apart = max(distances, default=0)
        if apart > self.slots - HELD_BACK:
            self._seen.append((now_ns, apart))
        while self._seen and self._seen[0][0] < now_ns - RECALL_S * 1e9:
            self._seen.popleft()
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < SEEN_AGAIN_S * 1e9:
            return 0
        return max(steps for _, steps in self._seen)

    def _before(self, heard_ns: int) -> int:
        """The newest step of anybody that was known some time before a machine was heard."""
        index = bisect_right(self._times, heard_ns - int(LATE_S * 1e9)) - 1
        return self._newest[index] if index >= 0 else -1
