"""What a watcher concludes from how the ranks of one generation end and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.decisions.detect.root_cause import first_failure, headline_of, headline_of_loss, symptom_of
from everstep.model.incident import Anomaly, RankExit, Symptom
from everstep.model.recovery_policy import RecoveryPolicy


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """One rank's end, as its agent observed it."""

    id: str
    """Id of the observation."""
    end: RankExit
    attached: bool
    """The script uses everstep."""
    finished: bool
    """Its training loop ran to the end."""
    heard_ns: int = 0
    """When the watcher heard of it, by its own clock."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All ranks left with success."""

    generation: int


def is_success(seen: ObservedExit) -> bool:
    """Whether a rank ended as it should: with code 0, as under torchrun."""
    if seen.end.code == 0:
        return True
    # The status is lost when the parent died first; the rank's own word is enough, and nothing less.
    return seen.end.code is None and not seen.end.signal and seen.finished


def judge_exits(
    generation: int,
    ends: Collection[ObservedExit],
    *,
    world_size: int,
    now_ns: int,
    policy: RecoveryPolicy,
    others_in_loop: bool | None = None,
) -> Anomaly | Finished | None:
    """Anomaly, success, or nothing to say yet.

    A rank that left with code 0 before the end of its loop has broken out of it
    with all the others, or has left them alone. The others tell: those that
    fail, or that stay in their loops, were left alone.

    Args:
        generation: The one that the ranks are of.
        ends: Those that ended so far.
        world_size: Ranks at full width.
        now_ns: Time now, by the watcher's clock.
        policy: How long the others may take to follow.
        others_in_loop: Whether a rank that lives is within ``run.steps``; False: all that live have left it;
            None: nobody knows.
    """
    if any(not is_success(seen) for seen in ends):
        # A rank that left early with success may be why the others failed.
        culprit = first_failure([seen.end for seen in ends if not (seen.finished and is_success(seen))])
        assert culprit is not None
        return _anomaly(generation, next(seen for seen in ends if seen.end is culprit))
    if len(ends) >= world_size:
        return Finished(generation)
    early = [seen for seen in ends if not seen.finished]
    if early and others_in_loop is not False:
        first = min(early, key=lambda seen: seen.heard_ns)
        if now_ns - first.heard_ns > follow_s(policy, others_in_loop=others_in_loop) * 1e9:
            return _anomaly(generation, first)
    return None


def follow_s(policy: RecoveryPolicy, *, others_in_loop: bool | None) -> float:
    """Seconds in which the others have to follow a rank that left with code 0.

    Of those without a loop of ours nobody knows whether they hang or have
    something left to do: they have as long as a stall.
    """
    return policy.exit_grace_s if others_in_loop else max(policy.exit_grace_s, policy.stall_floor_s)


def _anomaly(generation: int, seen: ObservedExit) -> Anomaly:
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


LOOK_LIMIT_S = 5.0
"""Time between two looks counts as at most this much of a stall: who was stopped meanwhile, or suspended with the
whole machine, has seen nothing of it (ours)."""


@dataclass(slots=True)
class StallRule:
    """Suspects a stall when no rank of a job advanced for too long.

    The limit is ``stall_factor`` median step times, at least ``stall_floor_s``.
    It is asked only about ranks that are past their first step.
    """

    policy: RecoveryPolicy
    _total: int = -1
    _looked_ns: int = 0
    _quiet_s: float = 0.0
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    @property
    def quiet_s(self) -> float:
        """How long no rank advanced, as far as it was watched, seconds."""
        return self._quiet_s

    def observe(self, total_steps: int, now_ns: int) -> float | None:
        """Take the sum of all ranks' steps; returns the stall in seconds when it is too long. Call it often."""
        self._quiet_s += min(max((now_ns - self._looked_ns) / 1e9, 0.0), LOOK_LIMIT_S)
        self._looked_ns = now_ns
        if total_steps != self._total:
            if self._total > 0:
                self._step_times_s.append(self._quiet_s)
            self._total, self._quiet_s = total_steps, 0.0
            return None
        if self._total <= 0:
            return None
        typical_s = median(self._step_times_s) if self._step_times_s else 0.0
        limit_s = max(self.policy.stall_factor * typical_s, self.policy.stall_floor_s)
        return self._quiet_s if self._quiet_s > limit_s else None


def loss_anomaly(
    generation: int, lost: Mapping[str, Sequence[int]], *, job: str, now_ns: int, quiet_s: float = 0.0
) -> Anomaly:
    """The anomaly of machines that answer again and know nothing of the job; ``lost`` has the ranks that they ran.

    Ranks elsewhere need not notice: collectives can wait for ten minutes, and when all machines are lost nobody is
    left to notice.
    """
    return Anomaly(
        id=f"lost-{job}-{generation}",
        generation=generation,
        symptom=Symptom.CRASH,
        headline=headline_of_loss(lost, None),
        ranks=sorted(rank for ranks in lost.values() for rank in ranks),
        machines=sorted(lost),
        seen_ns=now_ns,
        quiet_s=quiet_s,
    )


def stall_anomaly(
    generation: int, *, job: str, quiet_s: float, step: int, now_ns: int, silent: Sequence[str] = ()
) -> Anomaly:
    """The anomaly that a stall is reported as; ``silent`` machines may hide that ranks step."""
    headline = f"no rank completed a step for {quiet_s:.0f} s, after step {step}"
    if silent:
        headline = f"no step was seen for {quiet_s:.0f} s: the agent of {', '.join(silent[:8])} does not answer"
    return Anomaly(
        id=f"stall-{job}-{generation}",
        generation=generation,
        symptom=Symptom.STALL,
        headline=headline,
        machines=list(silent),
        seen_ns=now_ns,
        quiet_s=quiet_s,
    )
