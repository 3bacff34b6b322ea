"""The newest copies of each rank's state, and why there is none where there should be one.

Sender and writer tell it from their threads; progress and status read it.
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
        """Rank → when the state in ``disk_step`` was saved, on the clock that is never set."""
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
        """A slot was committed; what was committed before it does not count, whatever the clock did meanwhile."""
        with self._lock:
            state = self._states.setdefault(rank, pb.SavedState(**NONE))
            if saved_ns >= state.own_ns or step > state.own_step:
                state.own_step, state.own_ns = step, saved_ns
                self._own_since[rank] = time.monotonic() - max(time.time_ns() - saved_ns, 0) / 1e9

    def on_disk(self, rank: int, step: int, age_s: float) -> None:
        """A rank's state is on disk.

        Args:
            rank: Whose.
            step: Completed steps.
            age_s: How long ago it was saved; negative where the clock was set back meanwhile.
        """
        with self._lock:
            self._disk_since[rank] = time.monotonic() - max(age_s, 0.0)
        self.update(rank, disk_step=step)

    def set_ages(self, ranks: Iterable[pb.RankProgress]) -> None:
        """Say how old copies are now. Apart from ``of``: an age is no news, and changes all the time."""
        now = time.monotonic()
        with self._lock:
            for rank in ranks:
                if rank.rank in self._disk_since:
                    rank.saved.disk_age_s = now - self._disk_since[rank.rank]
                if rank.rank in self._own_since:
                    rank.saved.own_age_s = now - self._own_since[rank.rank]

    def held(self, rank: int, steps: list[int]) -> None:
        """All that a rank's own slots hold."""
        with self._lock:
            self._states.setdefault(rank, pb.SavedState(**NONE)).own_steps[:] = steps

    def change(self, rank: int, how: Callable[[pb.SavedState], None]) -> None:
        """Decide on what is known of a rank, and note it, before anything else changes; ``how`` returns at once."""
        with self._lock:
            how(self._states.setdefault(rank, pb.SavedState(**NONE)))

    def of(self, rank: int) -> pb.SavedState:
        """A copy of what is known of a rank."""
        found = pb.SavedState(**NONE)
        with self._lock:
            if rank in self._states:
                found.CopyFrom(self._states[rank])
        return found

    def clear(self) -> None:
        """Forget everything: a new generation begins, and copies of later steps count no more."""
        with self._lock:
            self._states.clear()
            self._disk_since.clear()
            self._own_since.clear()
