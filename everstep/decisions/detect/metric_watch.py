"""The facts in the reports of one rank: losses that are not finite, jumps of the loss, and the speed of the steps.

The cost of a report does not grow with the length of the job. The detection rules decide about the facts.

ByteRobust (section 4.1) treats a loss or gradient norm that is NaN, or that jumps by a factor of five, as an anomaly.
It does not state to what a jump is compared. Here it is the median of the rank's own last ``WINDOW`` values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from everstep.rank.step_reports import GRAD_NORM, LOSS, StepRecord

WINDOW = 64
"""The number of values of the median; with fewer values nothing is a jump."""
JUMP_FACTOR = 5.0
"""A value that is this many times the median counts as a jump (ByteRobust, section 4.1)."""
JUMP_STEPS = 3
"""This many high values in a row count as a jump; a single one may be an outlier."""
PACE_STEPS = 32
"""The number of steps over which a speed is measured."""
PACES_KEPT = 32
"""The number of earlier speeds with which the newest speed is compared."""
PACES_KNOWN = 4
"""The number of earlier speeds that a comparison needs."""
SLOW_FACTOR = 1.25
"""Steps that take this many times as long as earlier steps are a decline."""


@dataclass(slots=True)
class Series:
    """The reported values of one number: of the loss, or of the norm of the gradient."""

    not_finite: int = 0
    """The number of reports of this generation in which the value was NaN or infinite."""
    streak: int = 0
    """The number of such reports in a row, up to the newest report."""
    since: int = -1
    """The step of the first report of this streak; -1: the newest value was finite."""
    jump_step: int = -1
    """The step at which the newest jump of this generation began; -1: there was none."""
    jump_steps: int = 0
    """The number of steps that the jump has lasted."""
    jump_ratio: float = 0.0
    """The largest value of the jump, as a multiple of the median."""
    known: bool = False
    """A finite value was seen; otherwise the script may not have such a value."""
    _window: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)
    _high: list[tuple[int, float]] = field(default_factory=list)
    """The steps and values with which a jump may have begun."""

    @property
    def typical(self) -> float:
        """The median of the last values; NaN: not known yet."""
        return self._sorted[len(self._sorted) // 2] if len(self._sorted) == WINDOW else math.nan

    def begin(self) -> None:
        """Begin a new generation: reset the counts, and keep the earlier values."""
        self.not_finite = self.streak = self.jump_steps = 0
        self.since = self.jump_step = -1
        self.jump_ratio = 0.0
        self._high.clear()

    def observe(self, step: int, value: float, *, given: bool) -> None:
        """Record the value of one report.

        Args:
            step: The step of the report.
            value: The value; NaN if the report has none.
            given: Whether the script reported a value.
        """
        if math.isfinite(value):
            self.known = True
            self.streak, self.since = 0, -1
            self._measure(step, value)
        elif given and self.known:
            self.not_finite += 1
            self.streak += 1
            self.since = step if self.streak == 1 else self.since

    def _measure(self, step: int, value: float) -> None:
        typical = self.typical
        if not (typical > 0 and value >= JUMP_FACTOR * typical):
            self._high.clear()
            self._keep(value)
            return
        # A high value is not added to the values of the median, which would otherwise soon be as high.
        self._high.append((step, value))
        if len(self._high) >= WINDOW:
            for _, high in self._high:  # the values stayed high, so they are the usual values from now on
                self._keep(high)
            self._high.clear()
        elif len(self._high) >= JUMP_STEPS:
            if self.jump_step != self._high[0][0]:
                self.jump_step, self.jump_ratio = self._high[0][0], 0.0
            self.jump_steps = len(self._high)
            self.jump_ratio = max(self.jump_ratio, *(high / typical for _, high in self._high[-JUMP_STEPS:]))

    def _keep(self, value: float) -> None:
        self._window.append(value)
        insort(self._sorted, value)
        if len(self._window) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]


class PaceKept(NamedTuple):
    """The speed of some steps in a row."""

    step_s: float
    """The mean time of a step."""
    median_s: float
    """The median time of a step."""
    tokens_per_s: float


@dataclass(slots=True)
class Pace:
    """The speed of a rank's steps, compared with its own past."""

    tokens_per_s: float = 0.0
    """The speed of the last steps; 0: not known, or the script reports no tokens."""
    step_s: float = 0.0
    """The mean time of the last steps; 0: not known."""
    slow_since: int = -1
    """The step from which on the rank is slower than before; -1: it is not slower, or that is not known."""
    slow_comparisons: int = 0
    """The number of comparisons in a row in which most of the steps were slower, and not only their mean."""
    comparisons: int = 0
    """The number of comparisons of the last steps with earlier steps."""
    _records: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))
    """Step, time in nanoseconds and tokens of the last reports."""
    _tokens: int = 0
    """The tokens of all these reports except the oldest."""
    _not_compared: int = 0
    """The number of reports since the last comparison."""
    _past: deque[PaceKept] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    _slow: list[PaceKept] = field(default_factory=list)
    """The speeds since the current decline began."""

    @property
    def typical_step_s(self) -> float:
        """The median time of an earlier step; 0: not known yet."""
        return self._typical([pace.step_s for pace in self._past])

    @property
    def typical_tokens_per_s(self) -> float:
        """The median of the earlier speeds; 0: not known yet, or the script reports no tokens."""
        return self._typical([pace.tokens_per_s for pace in self._past])

    @staticmethod
    def _typical(past: Sequence[float]) -> float:
        return median(past) if len(past) >= PACES_KNOWN else 0.0

    def begin(self) -> None:
        """Begin a new generation: the time between the generations is no step."""
        self._records.clear()
        self._tokens = self._not_compared = 0
        self.tokens_per_s = self.step_s = 0.0
        self.slow_since, self.slow_comparisons = -1, 0
        self._slow.clear()

    def observe(self, step: int, time_ns: int, tokens: int) -> None:
        """Record one report."""
        if self._records:
            self._tokens += tokens
        if len(self._records) > PACE_STEPS:
            self._tokens -= self._records[1][2]
        self._records.append((step, time_ns, tokens))
        seconds = (time_ns - self._records[0][1]) / 1e9
        if len(self._records) > 1 and seconds > 0:
            # A rank that reports every tenth step makes ten steps between two reports.
            steps = max(step - self._records[0][0], len(self._records) - 1)
            self.step_s, self.tokens_per_s = seconds / steps, self._tokens / seconds
        self._not_compared += 1
        if len(self._records) > PACE_STEPS and self._not_compared >= PACE_STEPS:
            self._not_compared = 0
            self._compare()

    def _compare(self) -> None:
        """Compare the last ``PACE_STEPS`` steps with earlier steps."""
        typical_s, median_s = self.typical_step_s, self._typical([pace.median_s for pace in self._past])
        pace = PaceKept(self.step_s, self._median_s(), self.tokens_per_s)
        is_slower = bool(typical_s) and pace.step_s > SLOW_FACTOR * typical_s
        most_are = is_slower and pace.median_s > SLOW_FACTOR * median_s
        since = self._records[0][0] if self.slow_since < 0 else self.slow_since
        self.slow_since = since if is_slower else -1
        self.slow_comparisons = self.slow_comparisons + 1 if most_are else 0
        self.comparisons += 1
        # Slow steps are not added to the past, since they would soon count as usual. If they stay slow, they
        # replace the past.
        self._slow = [*self._slow, pace] if most_are else []
        if len(self._slow) == PACES_KEPT:
            self._past, self._slow = deque(self._slow, PACES_KEPT), []
        elif not most_are:
            self._past.append(pace)

    def _median_s(self) -> float:
        return median(
            (time_ns - before_ns) / 1e9 / max(step - before, 1)
            for (before, before_ns, _), (step, time_ns, _) in pairwise(self._records)
        )


@dataclass(slots=True)
class MetricWatch:
    """The facts in the reports of one rank, also of the next generations of its job."""

    loss: Series = field(default_factory=Series)
    grad_norm: Series = field(default_factory=Series)
    pace: Pace = field(default_factory=Pace)
    step: int = -1
    """The step of the newest report of this generation; -1: there is none."""

    def begin(self) -> None:
        """Begin a new generation."""
        self.step = -1
        self.loss.begin()
        self.grad_norm.begin()
        self.pace.begin()

    def observe(self, record: StepRecord) -> None:
        """Record one report."""
        self.step = record.step
        self.loss.observe(record.step, record.loss, given=bool(record.given & LOSS))
        self.grad_norm.observe(record.step, record.grad_norm, given=bool(record.given & GRAD_NORM))
        self.pace.observe(record.step, record.time_ns, record.tokens)
