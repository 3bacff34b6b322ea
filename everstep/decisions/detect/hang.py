"""The detection of hangs: no rank completes a step any more.

Samples of the ranks decide after how many seconds without a step the job counts as hung. A rank whose process is
stopped (state T) hangs the job at once. If all ranks are stopped, the job was paused on purpose, which is no hang.
Ranks are stopped and continued one after the other, so the rule waits until that is done.
"""

from __future__ import annotations

from everstep.base.text import listed
from everstep.decisions.blame.hang.progress import HangSign
from everstep.decisions.blame.hang.verdict import names_of
from everstep.decisions.detect.job_facts import JobFacts, Rule
from everstep.model.incident import Anomaly, Symptom

PAUSES = 1.5
"""A pause for an evaluation or a checkpoint lasts at most this many times the longest pause seen before."""
SAMPLES_APART_S = (1.0, 10.0)
"""The shortest and the longest time between two samples of a job that makes no steps, seconds."""
TWO_SAMPLES_S = 0.5
"""The time that two samples need, seconds; if they need longer, a hang is reported later."""
SAMPLE_AGAIN = 2.0
"""The ranks are sampled again when the time without a step is this many times the time at the last sample."""


def hang_unseen_s(facts: JobFacts) -> float:
    """Return after how many seconds without a step a job counts as hung if samples show nothing.

    It is the paper's ten minutes, or more if steps or pauses of this job were long.
    """
    policy = facts.spec.policy
    learnt = min(PAUSES * facts.longest_step_s, policy.hang.ceiling_s)
    return max(learnt, policy.hang.factor * facts.typical_step_s, policy.hang.floor_s)


def hang_seen_s(facts: JobFacts) -> float:
    """Return after how many seconds without a step a job counts as hung if samples show that all wait for idle ranks.

    It is never longer than :func:`hang_unseen_s`, and equal to it until the duration of a step is known, since the
    watcher may have begun to watch the job in a usual pause.
    """
    return _learnt_hang_seen_s(facts) if facts.typical_step_s > 0 else hang_unseen_s(facts)


def _learnt_hang_seen_s(facts: JobFacts) -> float:
    policy = facts.spec.policy
    learnt = max(
        policy.hang.idle_factor * facts.typical_step_s, PAUSES * facts.longest_step_s, policy.hang.idle_floor_s
    )
    return min(learnt, hang_unseen_s(facts))


def bound_s(facts: JobFacts) -> float:
    """Return after how many seconds without a step the job counts as hung, by the samples of its ranks."""
    if facts.hang_check is None:
        return hang_unseen_s(facts)
    match facts.hang_check.sign:
        case HangSign.NEVER:
            return min(least_stopped_s(facts), hang_seen_s(facts))
        case HangSign.QUIET:
            return hang_seen_s(facts)
        case HangSign.COMPUTES:
            return max(hang_unseen_s(facts), facts.spec.policy.hang.ceiling_s)
    return hang_unseen_s(facts)


def least_stopped_s(facts: JobFacts) -> float:
    """Return how long a rank has to be stopped, seconds. A shorter stop than a step costs less than a restart."""
    return max(facts.spec.policy.hang.stopped_s, facts.typical_step_s)


def apart_s(typical_step_s: float) -> float:
    """Return the time between two samples, seconds: the duration of a step, within bounds."""
    least, most = SAMPLES_APART_S
    return min(max(typical_step_s, least), most)


def first_sample_s(facts: JobFacts) -> float | None:
    """Return the seconds without a step after which the ranks are first sampled; None: they are not sampled.

    A second sample follows before the job counts as hung.
    """
    if facts.spec.policy.hang.trace_s <= 0:
        return None
    return max(_learnt_hang_seen_s(facts) - apart_s(facts.typical_step_s) - TWO_SAMPLES_S, 0.0)


RANKS_NAMED = 16
"""The largest number of ranks, and of machines, that an anomaly names."""


def find_hang(facts: JobFacts) -> Anomaly | None:
    """Return the hang once it has lasted long enough. If machines are silent, their ranks may step unseen."""
    if not facts.newest or facts.quiet_s <= bound_s(facts):
        return None
    headline = f"no rank completed a step for {facts.quiet_s:.0f} s, after step {facts.last_step}"
    machines: list[str] = list(facts.silent)
    ranks: list[int] = []
    if facts.silent:
        headline = f"no step was seen for {facts.quiet_s:.0f} s: the agent of {listed(facts.silent)} does not answer"
    elif facts.hang_check is not None and facts.hang_check.verdict.evicts:
        verdict = facts.hang_check.verdict
        ranks = list(verdict.ranks[:RANKS_NAMED])
        machines = list(names_of(verdict.machines, facts.machine_names))[:RANKS_NAMED]
        headline = f"{headline}: {verdict.reason}"
    return Anomaly(
        id=f"hang-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.HANG,
        headline=headline,
        ranks=ranks,
        machines=machines,
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


HANG = Rule(
    name="hang",
    finds="no rank completes a step any more",
    threshold="{policy.hang.idle_factor:g} median step times, at least {policy.hang.idle_floor_s:g} s, if samples show "
    "that all ranks wait for idle ranks; {policy.hang.factor:g} median step times, at least {policy.hang.floor_s:g} s, "
    "if samples show nothing; {policy.hang.ceiling_s:g} s if samples show that ranks compute",
    source="if samples show nothing: hang threshold of ByteRobust, section 4.1",
    find=find_hang,
)


CONTINUED_S = 2.0
"""Agents report within this time, seconds, that a rank was continued. After this time all ranks that were continued
together are known."""


def find_stopped_rank(facts: JobFacts) -> Anomaly | None:
    """Return one anomaly of all stopped ranks, unless all ranks are stopped or have just been continued."""
    least_s = least_stopped_s(facts)
    if not facts.newest or facts.quiet_s < least_s:
        return None
    alive = [rank for rank in facts.ranks if rank.alive]
    running = [rank for rank in alive if not rank.stopped_ns]
    if not running or any((facts.now_ns - rank.continued_ns) / 1e9 < CONTINUED_S for rank in running):
        return None
    stopped = [rank for rank in alive if rank.stopped_ns and (facts.now_ns - rank.stopped_ns) / 1e9 >= least_s]
    if not stopped:
        return None
    machines = sorted({rank.machine for rank in stopped})
    verb = "is" if len(stopped) == 1 else "are"
    return Anomaly(
        id=f"stopped-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.HANG,
        headline=f"rank {listed(sorted(rank.rank for rank in stopped), 4)} on {listed(machines, 4)} {verb} stopped "
        f"(state T), and no rank completed a step for {facts.quiet_s:.1f} s",
        ranks=sorted(rank.rank for rank in stopped)[:RANKS_NAMED],
        machines=machines[:RANKS_NAMED],
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


STOPPED_RANK = Rule(
    name="stopped-rank",
    finds="the process of a rank is stopped, and no rank completes a step",
    threshold="both for {policy.hang.stopped_s:g} s and for a median step time",
    find=find_stopped_rank,
)
