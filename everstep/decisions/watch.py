"""What a watcher concludes from how the ranks of one generation end and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

from everstep.decisions.first_failure import first_failure, headline_of, symptom_of
from everstep.incident import Anomaly, RankExit, Symptom
from everstep.policy import RecoveryPolicy


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's end, as its agent observed it."""

    id: str
    """Id of the observation."""
    end: RankExit
    attached: bool
    """The script uses everstep."""
    finished: bool
    """Its training loop ran to the end."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All ranks left with success."""

    generation: int


def is_success(seen: Seen) -> bool:
    """Whether a rank ended as it should: code 0, and to the end of its loop where it says so."""
    if seen.end.code == 0:
        return seen.finished or not seen.attached
    # The status is lost when the parent died first; the rank's own word is enough.
    return seen.end.code is None and not seen.end.signal and seen.finished


def judge_exits(
    generation: int, ends: Collection[Seen], *, world_size: int, now_ns: int, policy: RecoveryPolicy
) -> Anomaly | Finished | None:
    """Anomaly, success, or nothing to say yet."""
    failed = [seen for seen in ends if not is_success(seen)]
    if failed:
        # A rank that left early with success may be why the others failed.
        culprit = first_failure([seen.end for seen in ends if seen in failed or not seen.finished])
        assert culprit is not None
        return _anomaly(generation, next(seen for seen in ends if seen.end is culprit))
    if len(ends) >= world_size:
        return Finished(generation)
    early = [seen for seen in ends if not seen.finished]
    if early:
        first = min(early, key=lambda seen: seen.end.time_ns)
        if now_ns - first.end.time_ns > policy.exit_grace_s * 1e9:
            return _anomaly(generation, first)
    return None


def _anomaly(generation: int, seen: Seen) -> Anomaly:
    end = seen.end
    return Anomaly(
        id=seen.id,
        generation=generation,
        symptom=symptom_of(end),
        headline=headline_of(end),
        ranks=[end.rank],
        machines=[end.machine],
        seen_ns=end.time_ns,
    )


@dataclass(slots=True)
class StallRule:
    """Suspects a stall when no rank of a job advanced for too long.

    The limit is ``stall_factor`` median step times, at least ``stall_floor_s``;
    before the first step of a generation nothing is suspected.
    """

    policy: RecoveryPolicy
    _total: int = -1
    _advanced_ns: int = 0
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def observe(self, total_steps: int, now_ns: int) -> float | None:
        """Take the sum of all ranks' steps; returns the stall in seconds when it is too long."""
        if total_steps != self._total:
            if self._total > 0:
                self._step_times_s.append((now_ns - self._advanced_ns) / 1e9)
            self._total, self._advanced_ns = total_steps, now_ns
            return None
        if self._total <= 0:
            return None
        quiet_s = (now_ns - self._advanced_ns) / 1e9
        typical_s = median(self._step_times_s) if self._step_times_s else 0.0
        limit_s = max(self.policy.stall_factor * typical_s, self.policy.stall_floor_s)
        return quiet_s if quiet_s > limit_s else None


def stall_anomaly(generation: int, *, job: str, quiet_s: float, step: int, now_ns: int) -> Anomaly:
    """The anomaly that a stall is reported as."""
    return Anomaly(
        id=f"stall-{job}-{generation}",
        generation=generation,
        symptom=Symptom.STALL,
        headline=f"no rank completed a step for {quiet_s:.0f} s, after step {step}",
        seen_ns=now_ns,
    )
