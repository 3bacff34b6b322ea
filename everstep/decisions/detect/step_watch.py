"""The watch over the steps of a job: how long no rank has stepped, and how long a step takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.decisions.detect.job_facts import RankFacts

RUNS_FREE_STEPS = 3
"""A rank that is this many steps ahead of another rank does not wait for it. A rank that waits is at most one step
ahead."""
SAMPLE_GAP_S = 5.0
"""The time between two samples counts at most this much, seconds, since the watcher itself may have been stopped, or
suspended with its machine."""

SEEN_WITHIN_S = 2.0
"""A step is seen at most this many seconds after its end. Steps that are first seen together after a longer time count
as one step: they are calls of several optimizers, or of one optimizer many times."""


@dataclass(slots=True)
class StepWatch:
    """The steps of all ranks of one generation, by many samples.

    Args:
        world_size: The number of ranks of the job.
    """

    world_size: int
    last_step: int = 0
    """The largest number of steps of any rank."""
    _all_stepped: bool = False
    _total: int = -1
    _shown: int = 0
    """The number of ranks in the last sample."""
    _sampled_ns: int = 0
    _newest: tuple[int, int] = (0, 0)
    """The largest number of steps, and when it was reached; (0, 0): not known."""
    _quiet_s: float = 0.0
    longest_s: float = 0.0
    """The longest time between two steps, seconds; 0: not known yet."""
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def next_generation(self) -> StepWatch:
        """Return a watch for the next generation of the job, which knows the durations of steps and pauses."""
        return StepWatch(self.world_size, longest_s=self.longest_s, _step_times_s=self._step_times_s.copy())

    def learn_pause(self) -> None:
        """Learn a pause that ended with a restart and not with a step. Without this, the same pause would be taken for
        a hang each time."""
        self.longest_s = max(self.longest_s, self.quiet_s)

    @property
    def total(self) -> int:
        """The sum of the steps of all ranks; it changes with each new step."""
        return self._total

    @property
    def quiet_s(self) -> float:
        """How long no rank has stepped while the watcher watched, seconds; 0 before the first step."""
        return self._quiet_s if self._total > 0 else 0.0

    @property
    def typical_step_s(self) -> float:
        """The median time of a step, seconds; 0: not known yet."""
        return median(self._step_times_s) if self._step_times_s else 0.0

    def observe(self, ranks: Sequence[RankFacts], now_ns: int, *, known_step: int = 0) -> None:
        """Add a sample of all ranks. Call this often.

        Args:
            ranks: The ranks that were shown.
            now_ns: The current time.
            known_step: The step that the job's workflow knows, used if no rank was shown; 0: none.
        """
        if ranks and not self._steps_expected(ranks):
            self._reset()
            return
        newest = max(ranks, key=lambda rank: rank.steps, default=None)
        self.last_step = newest.steps if newest else known_step
        total = sum(rank.steps for rank in ranks) if newest else known_step
        last_ns = max((rank.stepped_ns for rank in ranks), default=0)
        same_ranks, self._shown = len(ranks) == self._shown, len(ranks)
        self._add(total, newest.stepped_ns if newest else 0, last_ns, now_ns, same_ranks=same_ranks)

    def _add(self, total: int, at_ns: int, last_ns: int, now_ns: int, *, same_ranks: bool) -> None:
        """Add the sum of all steps, the time of the newest step, and the time of the last step of any rank."""
        unseen_s = min(max((now_ns - self._sampled_ns) / 1e9, 0.0), SAMPLE_GAP_S)
        self._quiet_s += unseen_s
        self._sampled_ns = now_ns
        if total == self._total:
            return
        if self._total > 0 and same_ranks:  # a rank that is shown for the first time changes the sum without a step
            self.longest_s = max(self.longest_s, self._quiet_s)
            self._learn(at_ns or now_ns)
            # The last step may have ended at any time since the last sample.
            self._quiet_s = min(max((now_ns - last_ns) / 1e9, 0.0), unseen_s) if last_ns else 0.0
        else:
            self._newest, self._quiet_s = (self.last_step, at_ns or now_ns), 0.0
        self._total = total

    def _learn(self, at_ns: int) -> None:
        """Learn the duration of a step. Several steps may be seen at once, and several machines show each step."""
        steps, before_ns = self._newest
        if self.last_step <= steps:
            return
        took_s = (at_ns - before_ns) / 1e9
        if took_s > 0:
            self._step_times_s.append(took_s if took_s > SEEN_WITHIN_S else took_s / (self.last_step - steps))
        self._newest = (self.last_step, at_ns)

    def _steps_expected(self, ranks: Sequence[RankFacts]) -> bool:
        """Return whether steps are expected: the ranks are past their first step, and have not left their loops.

        The confirmation of the launch limits the time until the first step.
        """
        if all(rank.left_loop for rank in ranks if rank.alive):
            return False
        if not self._all_stepped:
            if all(rank.stepped for rank in ranks):
                self._all_stepped = len(ranks) == self.world_size
            elif max((rank.steps_since for rank in ranks if rank.stepped), default=0) < RUNS_FREE_STEPS:
                return False
        return True

    def _reset(self) -> None:
        self._total, self._sampled_ns, self._quiet_s, self._newest = -1, 0, 0.0, (0, 0)
        self._step_times_s.clear()
