"""The detection of a job whose steps continue, but last longer than before.

Its own recent past says what is slow: most ranks find most of their last steps a quarter longer than those before
(``metric_watch``), twice in a row. So an occasional checkpoint or evaluation is not a decline, and a short noisy
neighbour is gone before it is reported. A rank that reports tokens is measured by its tokens: a step with more work is
not slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from everstep.decisions.detect.job_facts import JobFacts, RankFacts, RankPace, Rule
from everstep.decisions.detect.metric_watch import SLOW_FACTOR
from everstep.decisions.detect.step_watch import LOOK_LIMIT_S
from everstep.model.incident import Anomaly, Symptom

LOOKS = 2
"""The number of comparisons of a rank's pace, each of other steps, that have to be slower."""
MOST_RANKS = 0.5
"""The share of reporting ranks above which a decline is reported: ranks wait for each other."""
QUIET_STEPS = 10.0
"""The number of step times without a step after which the job hangs; another rule reports that."""


def is_slower(pace: RankPace) -> bool:
    """Return whether a rank became slower, beyond noise, and not because of more work in each step."""
    if pace.slow_looks < LOOKS or pace.typical_step_s <= 0:
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
    _looked_ns: int = 0

    def observe(self, ranks: Sequence[RankFacts], now_ns: int) -> None:
        """Look at all ranks. Call it often."""
        since_s = min(max((now_ns - self._looked_ns) / 1e9, 0.0), LOOK_LIMIT_S) if self._looked_ns else 0.0
        self._looked_ns = now_ns
        self.slower_s = self.slower_s + since_s if slower_ranks(ranks) else 0.0


def find_slow_steps(facts: JobFacts) -> Anomaly | None:
    """Return the decline once it has lasted; other rules report faults that end or block ranks."""
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
    finds="steps go on, and take longer than they did",
    threshold="most ranks find most of 64 steps in a row a quarter longer than those before, "
    "for {policy.slow.after_s:g} s; "
    "the slow machine is looked for while the job goes on",
    source="ByteRobust, section 5.1: MFU decline",
    find=find_slow_steps,
)
