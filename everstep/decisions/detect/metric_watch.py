"""The training state in the reports of one rank: losses that are not finite, jumps, and the speed of its steps.

Each report has the same cost, however long the job runs. This module only records facts; the rules
decide about them.

ByteRobust (section 4.1) treats a loss or gradient norm that jumps by a factor of five, or is NaN, as an anomaly, and
does not state the reference: here the reference is the median of the rank's own last ``WINDOW`` values.
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
"""The number of values of the median; before that, no value is a jump."""
JUMP_FACTOR = 5.0
"""The multiple of the median that is a jump (ByteRobust, section 4.1)."""
JUMP_STEPS = 3
"""The number of values in a row that are a jump; a single value may be an outlier."""
PACE_STEPS = 32
"""The number of steps over which a speed is measured."""
PACES_KEPT = 32
"""The number of earlier speeds that the newest speed is compared with."""
PACES_KNOWN = 4
"""The number of earlier speeds below which no comparison is made."""
SLOW_FACTOR = 1.25
"""The factor by which steps have to be slower than earlier steps to be a decline."""


@dataclass(slots=True)
class Series:
    """One number of the reports: the loss, or the norm of the gradient."""

    not_finite: int = 0
    """Reports of this generation in which it was NaN or infinite."""
    streak: int = 0
    """The number of these reports in a row, up to the newest report."""
    since: int = -1
    """Step of the first of these; -1: the newest was finite."""
    jump_step: int = -1
    """The step at which the newest jump of this generation began; -1: there was none."""
    jump_steps: int = 0
    """The number of steps that the jump has lasted."""
    jump_ratio: float = 0.0
    """The largest value of the jump, in medians."""
    known: bool = False
    """A finite value was seen; without that, the script may not have the value at all."""
    _window: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)
    _high: list[tuple[int, float]] = field(default_factory=list)
    """Steps and values that may be the beginning of a jump."""

    @property
    def typical(self) -> float:
        """Median of the last values; NaN: not known yet."""
        return self._sorted[len(self._sorted) // 2] if len(self._sorted) == WINDOW else math.nan

    def begin(self) -> None:
        """Another generation: its own counts, the same past."""
        self.not_finite = self.streak = self.jump_steps = 0
        self.since = self.jump_step = -1
        self.jump_ratio = 0.0
        self._high.clear()

    def observe(self, step: int, value: float, *, given: bool) -> None:
        """Record the value of one report.

        Args:
            step: The step of the report.
            value: The value; NaN if the report has none.
            given: The script gave it.
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
        # Not among the values that it is measured against, or a jump would soon be no jump any more.
        self._high.append((step, value))
        if len(self._high) >= WINDOW:
            for _, high in self._high:  # it stays there: that is its level now
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
    """Mean time of a step."""
    most_s: float
    """Median time of a step."""
    tokens_per_s: float


@dataclass(slots=True)
class Pace:
    """The speed of a rank's steps, against its own past."""

    tokens_per_s: float = 0.0
    """Over the last steps; 0: not known, or the script gives no tokens."""
    step_s: float = 0.0
    """Mean time of the last steps; 0: not known."""
    slow_since: int = -1
    """Step from which on it is slower than it was; -1: it is not, as far as known."""
    slow_looks: int = 0
    """The number of samples in a row in which most of the steps were slower, not only their mean, as with a
    checkpoint."""
    looks: int = 0
    """The number of times that the last steps were compared with earlier steps, or kept for that."""
    _records: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))
    """Step, time in ns and tokens of the last reports."""
    _tokens: int = 0
    """The tokens of all but the oldest of these reports."""
    _since_look: int = 0
    _past: deque[PaceKept] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    _slow: list[PaceKept] = field(default_factory=list)
    """Since the decline at hand began."""

    @property
    def typical_step_s(self) -> float:
        """Median time of a step of this rank's past; 0: not known yet."""
        return self._typical([pace.step_s for pace in self._past])

    @property
    def typical_tokens_per_s(self) -> float:
        """Median speed of its past; 0: not known yet, or the script gives no tokens."""
        return self._typical([pace.tokens_per_s for pace in self._past])

    @staticmethod
    def _typical(past: Sequence[float]) -> float:
        return median(past) if len(past) >= PACES_KNOWN else 0.0

    def begin(self) -> None:
        """Another generation: the time between the two was no step."""
        self._records.clear()
        self._tokens = self._since_look = 0
        self.tokens_per_s = self.step_s = 0.0
        self.slow_since, self.slow_looks = -1, 0
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
            # A rank that reports every tenth step has made ten steps from one report to the next.
            steps = max(step - self._records[0][0], len(self._records) - 1)
            self.step_s, self.tokens_per_s = seconds / steps, self._tokens / seconds
        self._since_look += 1
        if len(self._records) > PACE_STEPS and self._since_look >= PACE_STEPS:
            self._since_look = 0
            self._look()

    def _look(self) -> None:
        """Compare the last steps with those before, once for each ``PACE_STEPS`` of them."""
        typical, most = self.typical_step_s, self._typical([pace.most_s for pace in self._past])
        kept = PaceKept(self.step_s, self._most_s(), self.tokens_per_s)
        is_slower = bool(typical) and kept.step_s > SLOW_FACTOR * typical
        most_are = is_slower and kept.most_s > SLOW_FACTOR * most
        since = self._records[0][0] if self.slow_since < 0 else self.slow_since
        self.slow_since, self.slow_looks = (since if is_slower else -1), (self.slow_looks + 1 if most_are else 0)
        self.looks += 1
        # Not among what it is measured against, or a decline would soon be none any more; unless it stays there.
        self._slow = [*self._slow, kept] if most_are else []
        if len(self._slow) == PACES_KEPT:
            self._past, self._slow = deque(self._slow, PACES_KEPT), []
        elif not most_are:
            self._past.append(kept)

    def _most_s(self) -> float:
        """Return the median time of one of the last steps."""
        return median(
            (time_ns - before_ns) / 1e9 / max(step - before, 1)
            for (before, before_ns, _), (step, time_ns, _) in pairwise(self._records)
        )


@dataclass(slots=True)
class MetricWatch:
    """The reports of one rank, in order. A job's next generation continues with the same watch."""

    loss: Series = field(default_factory=Series)
    grad_norm: Series = field(default_factory=Series)
    pace: Pace = field(default_factory=Pace)
    step: int = -1
    """The step of the newest report of this generation; -1: there is none."""

    def begin(self) -> None:
        """Another generation."""
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
