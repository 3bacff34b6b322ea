"""The detection of a job whose steps take longer than before.

A job is slow if most of its ranks are, compared with their own recent past: most of a rank's last steps took a quarter
longer than earlier steps (``metric_watch``), twice in a row. So an occasional checkpoint or evaluation is no decline,
and a short disturbance is over before it is reported. A rank that reports tokens is also compared by its tokens, since
a step with more work is not slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from everstep.decisions.detect.job_facts import JobFacts, RankFacts, RankPace, Rule
from everstep.decisions.detect.metric_watch import SLOW_FACTOR
from everstep.decisions.detect.step_watch import SAMPLE_GAP_S
from everstep.model.incident import Anomaly, Symptom

COMPARISONS = 2
"""A rank is slow once it was slower in this many comparisons in a row; each comparison has other steps."""
MOST_RANKS = 0.5
"""A decline is reported if more than this share of the reporting ranks is slow, since ranks wait for each other."""
QUIET_STEPS = 10.0
"""A job without a step for this many step times is not slow but may hang, which another rule reports."""


def is_slower(pace: RankPace) -> bool:
    """Return whether a rank became slower, and neither noise nor more work in each step is the reason."""
    if pace.slow_comparisons < COMPARISONS or pace.typical_step_s <= 0:
        return False
    return pace.typical_tokens_per_s <= 0 or pace.tokens_per_s * SLOW_FACTOR < pace.typical_tokens_per_s


def slower_ranks(ranks: Sequence[RankFacts]) -> list[RankPace]:
    """Return the paces of the ranks that became slower, if most reporting ranks did; else none."""
    paces = [rank.pace for rank in ranks if rank.pace is not None and rank.pace.typical_step_s > 0 and rank.alive]
    slower = [pace for pace in paces if is_slower(pace)]
    return slower if len(slower) > MOST_RANKS * len(paces) else []


@dataclass(slots=True)
class SlowWatch:
    """The time for which the ranks of one generation have been slower than before."""

    slower_s: float = 0.0
    _sampled_ns: int = 0

    def observe(self, ranks: Sequence[RankFacts], now_ns: int) -> None:
        """Add a sample of all ranks. Call this often."""
        since_s = min(max((now_ns - self._sampled_ns) / 1e9, 0.0), SAMPLE_GAP_S) if self._sampled_ns else 0.0
        self._sampled_ns = now_ns
        self.slower_s = self.slower_s + since_s if slower_ranks(ranks) else 0.0


def find_slow_steps(facts: JobFacts) -> Anomaly | None:
    """Return the decline once it has lasted long enough; other rules report faults that end or block ranks."""
    policy = facts.spec.policy
    if not facts.newest or facts.exits or facts.lost or not policy.slow.after_s or facts.slower_s < policy.slow.after_s:
        return None
    if not (slower := slower_ranks(facts.ranks)):
        return None
    now_s, before_s = median(pace.step_s for pace in slower), median(pace.typical_step_s for pace in slower)
    if facts.quiet_s > max(QUIET_STEPS * now_s, 1.0):
        return None
    since = min(pace.slow_since for pace in slower)
    return Anomaly(
        id=f"slow-{facts.spec.name}-{facts.generation}-{facts.last_step}",
        generation=facts.generation,
        symptom=Symptom.SLOW,
        headline=f"steps take {now_s:.3g} s since step {since}, {before_s:.3g} s before",
        seen_ns=facts.now_ns,
    )


SLOW_STEPS = Rule(
    name="slow-steps",
    finds="the steps of the job take longer than before",
    threshold="on most ranks, most of 64 steps in a row take a quarter longer than earlier steps, for "
    "{policy.slow.after_s:g} s; the slow machine is searched for while the job runs",
    source="ByteRobust, section 5.1: MFU decline",
    find=find_slow_steps,
)
