"""How long a job has not stepped, and how long a step takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.decisions.detect.facts import RankFacts

RUNS_FREE_STEPS = 3
"""So many steps ahead of another one, a rank does not wait for it: ranks that do are at most one ahead (ours)."""
LOOK_LIMIT_S = 5.0
"""Time between two looks counts as at most this much of a stall: who was stopped meanwhile, or suspended with the
whole machine, has seen nothing of it (ours)."""


@dataclass(slots=True)
class StepWatch:
    """The steps of all ranks of one generation, looked at again and again.

    Args:
        world_size: Ranks of the job.
    """

    world_size: int
    last_step: int = 0
    """The most steps that any rank has shown."""
    _all_stepped: bool = False
    _total: int = -1
    _looked_ns: int = 0
    _quiet_s: float = 0.0
    longest_s: float = 0.0
    """The longest time without a step that came to its end by a step; 0: not known yet."""
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    @property
    def total(self) -> int:
        """Steps of all ranks together; it changes with each that is seen."""
        return self._total

    @property
    def quiet_s(self) -> float:
        """How long no rank advanced, as far as it was watched, seconds; 0 before the first step."""
        return self._quiet_s if self._total > 0 else 0.0

    @property
    def typical_step_s(self) -> float:
        """Median time between two steps; 0: not known yet."""
        return median(self._step_times_s) if self._step_times_s else 0.0

    def observe(self, ranks: Sequence[RankFacts], now_ns: int, *, known_step: int = 0) -> None:
        """Look at all ranks. Call it often.

        Args:
            ranks: Those that were shown.
            now_ns: Time now.
            known_step: Where no rank was shown: the step that the job's workflow knows; 0: none.
        """
        if ranks and not self._steps_expected(ranks):
            self._forget()
            return
        counts = [rank.steps for rank in ranks] or [known_step]
        self.last_step = max(counts)
        self._look(sum(counts), now_ns)

    def _look(self, total: int, now_ns: int) -> None:
        self._quiet_s += min(max((now_ns - self._looked_ns) / 1e9, 0.0), LOOK_LIMIT_S)
        self._looked_ns = now_ns
        if total != self._total:
            if self._total > 0:
                self._step_times_s.append(self._quiet_s)
                self.longest_s = max(self.longest_s, self._quiet_s)
            self._total, self._quiet_s = total, 0.0

    def _steps_expected(self, ranks: Sequence[RankFacts]) -> bool:
        """Whether steps are to be expected: the ranks are past their first one, and in their loops still.

        How long the first step may take is for who confirms the launch to say.
        """
        if all(rank.left_loop for rank in ranks if rank.alive):
            return False
        if not self._all_stepped:
            if all(rank.stepped for rank in ranks):
                self._all_stepped = len(ranks) == self.world_size
            elif max((rank.steps_since for rank in ranks if rank.stepped), default=0) < RUNS_FREE_STEPS:
                return False
        return True

    def _forget(self) -> None:
        self._total, self._looked_ns, self._quiet_s = -1, 0, 0.0
        self._step_times_s.clear()
