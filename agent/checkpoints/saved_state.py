"""This module records the newest copies of each rank's training state, and the reason if a copy is missing.

The sender and the disk writer update the records in their threads; the rpcs Progress and Describe read them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from agent.v1 import agent_pb2 as pb

NONE: dict[str, Any] = {"own_step": -1, "backup_step": -1, "disk_step": -1, "disk_wanted": -1, "remote_step": -1}


class SavedStates:
    """``pb.SavedState`` of each rank of one job on this machine; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[int, pb.SavedState] = {}
        self._disk_since: dict[int, float] = {}
        """Rank → when the state in ``disk_step`` was saved, seconds of the monotonic clock."""
        self._own_since: dict[int, float] = {}
        """Rank → when the state in ``own_step`` was saved, on the same clock."""

    def update(self, rank: int, **fields: Any) -> None:
        """Set fields of ``pb.SavedState``, e.g. ``update(3, disk_step=120, disk_problem="")``."""
        with self._lock:
            state = self._states.setdefault(rank, pb.SavedState(**NONE))
            for name, value in fields.items():
                if isinstance(value, list):
                    getattr(state, name)[:] = value
                else:
                    setattr(state, name, value)

    def own(self, rank: int, step: int, saved_ns: int) -> None:
        """Record a committed slot, unless a slot of the same or a later step was saved after it."""
        with self._lock:
            state = self._states.setdefault(rank, pb.SavedState(**NONE))
            if saved_ns >= state.own_ns or step > state.own_step:
                state.own_step, state.own_ns = step, saved_ns
                self._own_since[rank] = time.monotonic() - max(time.time_ns() - saved_ns, 0) / 1e9

    def on_disk(self, rank: int, step: int, age_s: float) -> None:
        """Record that a rank's state is on disk.

        Args:
            rank: Rank whose state was written.
            step: Completed steps of the state.
            age_s: Seconds since the state was saved; negative if the clock was set back in between.
        """
        with self._lock:
            self._disk_since[rank] = time.monotonic() - max(age_s, 0.0)
        self.update(rank, disk_step=step)

    def set_ages(self, ranks: Iterable[pb.RankProgress]) -> None:
        """Set the current ages of copies. ``of`` leaves ages out, because they change all the time."""
        now = time.monotonic()
        with self._lock:
            for rank in ranks:
                if rank.rank in self._disk_since:
                    rank.saved.disk_age_s = now - self._disk_since[rank.rank]
                if rank.rank in self._own_since:
                    rank.saved.own_age_s = now - self._own_since[rank.rank]

    def held(self, rank: int, steps: list[int], newest_slots: int) -> None:
        """Record all steps in a rank's own slots, and the number of slots that have the newest steps."""
        self.update(rank, own_steps=steps, newest_slots=newest_slots)

    def change(self, rank: int, how: Callable[[pb.SavedState], None]) -> None:
        """Change the state of a rank under the lock; ``how`` reads and changes the state, and must return at once."""
        with self._lock:
            how(self._states.setdefault(rank, pb.SavedState(**NONE)))

    def of(self, rank: int) -> pb.SavedState:
        """Return a copy of a rank's state."""
        found = pb.SavedState(**NONE)
        with self._lock:
            if rank in self._states:
                found.CopyFrom(self._states[rank])
        return found

    def clear(self) -> None:
        """Forget all states when a new generation begins: copies of later steps no longer count."""
        with self._lock:
            self._states.clear()
            self._disk_since.clear()
            self._own_since.clear()
