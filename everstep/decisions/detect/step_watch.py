"""The time for which a job has not stepped, and the duration of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.decisions.detect.job_facts import RankFacts

RUNS_FREE_STEPS = 3
"""A rank that is this many steps ahead of another rank does not wait for it: ranks that wait are at most one ahead."""
LOOK_LIMIT_S = 5.0
"""Time between two looks counts as at most this much of a hang: who was stopped meanwhile, or suspended with the
whole machine, has seen nothing of it."""

TOLD_WITHIN_S = 2.0
"""A rank that steps all the time is seen within this many seconds. Steps that are reported together after a longer time
count as one step: a script may call several optimizers in a step, or the same optimizer often."""


@dataclass(slots=True)
class StepWatch:
    """The steps of all ranks of one generation, sampled again and again.

    Args:
        world_size: The number of ranks of the job.
    """

    world_size: int
    last_step: int = 0
    """The most steps that any rank has shown."""
    _all_stepped: bool = False
    _total: int = -1
    _shown: int = 0
    """The number of ranks that were shown."""
    _looked_ns: int = 0
    _newest: tuple[int, int] = (0, 0)
    """The most steps, and when they were completed; of step 0 it is not known."""
    _quiet_s: float = 0.0
    longest_s: float = 0.0
    """The longest time without a step that ended with a step, seconds; 0: not known yet."""
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def begun_anew(self) -> StepWatch:
        """A watch for the next generation of the same job: how long a step and a pause may be is known."""
        return StepWatch(self.world_size, longest_s=self.longest_s, _step_times_s=self._step_times_s.copy())

    @property
    def total(self) -> int:
        """Steps of all ranks together; it changes with each that is seen."""
        return self._total

    @property
    def quiet_s(self) -> float:
        """Return how long no rank advanced, as far as it was watched, seconds; 0 before the first step."""
        return self._quiet_s if self._total > 0 else 0.0

    @property
    def typical_step_s(self) -> float:
        """Median time of a step; 0: not known yet."""
        return median(self._step_times_s) if self._step_times_s else 0.0

    def observe(self, ranks: Sequence[RankFacts], now_ns: int, *, known_step: int = 0) -> None:
        """Add a sample of all ranks. Call this often.

        Args:
            ranks: The ranks that were shown.
            now_ns: The current time.
            known_step: If no rank was shown: the step that the job's workflow knows; 0: none.
        """
        if ranks and not self._steps_expected(ranks):
            self._forget()
            return
        newest = max(ranks, key=lambda rank: rank.steps, default=None)
        self.last_step = newest.steps if newest else known_step
        total = sum(rank.steps for rank in ranks) if newest else known_step
        last_ns = max((rank.stepped_ns for rank in ranks), default=0)
        same_ranks, self._shown = len(ranks) == self._shown, len(ranks)
        self._look(total, newest.stepped_ns if newest else 0, last_ns, now_ns, same_ranks=same_ranks)

    def _look(self, total: int, at_ns: int, last_ns: int, now_ns: int, *, same_ranks: bool) -> None:
        """Add the reported sum of all steps, the time of the newest step, and the time of the last step of any rank."""
        unseen_s = min(max((now_ns - self._looked_ns) / 1e9, 0.0), LOOK_LIMIT_S)
        self._quiet_s += unseen_s
        self._looked_ns = now_ns
        if total == self._total:
            return
        if self._total > 0 and same_ranks:  # the steps of a rank that is shown for the first time are no step now
            self.longest_s = max(self.longest_s, self._quiet_s)
            self._learn(at_ns or now_ns)
            # Steps are reported at intervals: the last step may be over for as long as the time since the last sample.
            self._quiet_s = min(max((now_ns - last_ns) / 1e9, 0.0), unseen_s) if last_ns else 0.0
        else:
            self._newest, self._quiet_s = (self.last_step, at_ns or now_ns), 0.0
        self._total = total

    def _learn(self, at_ns: int) -> None:
        """Learn the durations of steps: several may be reported at once, and each step by several machines."""
        steps, before_ns = self._newest
        if self.last_step <= steps:
            return
        took_s = (at_ns - before_ns) / 1e9
        if took_s > 0:
            self._step_times_s.append(took_s if took_s > TOLD_WITHIN_S else took_s / (self.last_step - steps))
        self._newest = (self.last_step, at_ns)

    def _steps_expected(self, ranks: Sequence[RankFacts]) -> bool:
        """Return whether steps are expected: the ranks are past their first step, and still in their loops.

        The confirmation of the launch limits the duration of the first step.
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
        self._total, self._looked_ns, self._quiet_s, self._newest = -1, 0, 0.0, (0, 0)
        self._step_times_s.clear()
