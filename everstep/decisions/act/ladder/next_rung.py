"""Chooses the next rung from the rungs that were already tried, in this incident and earlier for the same fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from everstep.decisions.act.ladder.paths import EXPLAINED, KNOWN_CAUSES, LadderFacts, Path, path_of
from everstep.decisions.act.ladder.worth import COSTS, likely, saving_s, updated
from everstep.model.incident import Failure
from everstep.model.ladder import Rung, RungMode, TriedRung
from everstep.model.recovery_policy import RecoveryPolicy

DEFAULT_MODES = {Rung.DIAGNOSE: RungMode.ACT, Rung.ROLLBACK: RungMode.ACT, Rung.REPLAY: RungMode.ACT}
"""Rung that a policy can restrict → the mode of the rung if the policy sets none."""
SKIPPED_MODES = frozenset({RungMode.SHADOW, RungMode.OFF})


@dataclass(frozen=True, slots=True)
class NextRung:
    """The next rung, and the reason for it."""

    rung: Rung
    why: str
    path: str
    """Name of the row of the table (``PATHS``)."""
    skipped: tuple[str, ...] = ()
    """Earlier rungs of the path that were skipped, each with the reason."""
    asks: bool = False
    """An operator has to approve the rung first."""
    tried: bool = False
    """Some rung was tried before."""
    position: int = 0
    """The position of the rung in its path, from 0; past the end if no rung is left."""
    last: bool = False
    """No rung of the path is left to try."""
    restarts: int = 0
    """How often the job was launched again after the last rung of this path."""

    @property
    def text(self) -> str:
        """The choice as text for people."""
        return f"{self.why} ({'; '.join(self.skipped)})" if self.skipped else self.why

    @property
    def is_explained(self) -> bool:
        """Return whether the failure is blamed on a machine that is already handled."""
        return self.path == EXPLAINED


@dataclass(frozen=True, slots=True)
class Skip:
    """A condition under which a rung is skipped."""

    rung: Rung | None
    """The rung; None: every rung that a policy can restrict."""
    applies: Callable[[LadderFacts, RecoveryPolicy, Rung], bool]
    because: str
    """The reason, as a format of ``facts`` and ``mode``."""


SKIPS: tuple[Skip, ...] = (
    Skip(Rung.DIAGNOSE, lambda facts, policy, rung: not facts.tests, "there is nothing to test"),
    Skip(Rung.ROLLBACK, lambda facts, policy, rung: not facts.back_to, "there is no version to go back to"),
    Skip(
        Rung.ROLLBACK,
        lambda facts, policy, rung: facts.ran_well_h is not None and not is_at_one_step(facts, policy),
        "{facts.version} ran well for {facts.ran_well_h:.0f} h, and it fails at another step each time",
    ),
    Skip(Rung.REPLAY, lambda facts, policy, rung: bool(facts.no_replay), "{facts.no_replay}"),
    Skip(
        None,
        lambda facts, policy, rung: not is_worth_it(facts, rung),
        "it takes {cost_s:.0f} s and is expected to save {saving_s:.0f} s, since the job trained for "
        "{facts.gain_s:.0f} s before this failure, and a restart costs {facts.restart_s:.0f} s",
    ),
    Skip(None, lambda facts, policy, rung: mode_of(rung, policy) in SKIPPED_MODES, "its mode is {mode}"),
)
"""The conditions under which a rung is skipped; the first that applies is the reason."""


def mode_of(rung: Rung, policy: RecoveryPolicy) -> RungMode:
    """Return how far a rung may go; an unknown mode counts as ``approve``."""
    mode = policy.ladder.modes.get(rung, DEFAULT_MODES.get(rung, RungMode.ACT))
    return mode if mode.known else RungMode.APPROVE


def next_rung(facts: LadderFacts, policy: RecoveryPolicy) -> NextRung:
    """Return the first rung of the failure's path that was not tried yet and is not skipped.

    If no rung is left, the job is launched again. The restart rules decide how often (``recover/rules.py``).
    """
    path = path_of(facts)
    tried = counted(facts, policy, path.name)
    passed: Counter[Rung] = Counter()
    skipped: list[str] = []
    for position, rung in enumerate(path.rungs):
        passed[rung] += 1
        if tried[rung] >= passed[rung]:
            continue
        if skip := _skip(rung, facts, policy):
            why = skip.because.format(
                facts=facts, mode=mode_of(rung, policy), cost_s=_cost_s(facts, rung), saving_s=_saving_s(facts)
            )
            skipped.append(f"{rung}: {why}")
            continue
        asks = mode_of(rung, policy) is RungMode.APPROVE and rung not in facts.approved
        return NextRung(rung, _why(path, tried), path.name, tuple(skipped), asks, bool(tried), position)
    return NextRung(
        Rung.REATTEMPT,
        _why(path, tried, ", and nothing else is left to try"),
        path.name,
        tuple(skipped),
        tried=bool(tried),
        position=len(path.rungs),
        last=True,
        restarts=max(tried[Rung.REATTEMPT] - path.rungs.count(Rung.REATTEMPT), 0),
    )


def _skip(rung: Rung, facts: LadderFacts, policy: RecoveryPolicy) -> Skip | None:
    """Return the condition under which a rung is skipped; None: it is not skipped."""
    of_rung = (skip for skip in SKIPS if skip.rung is rung or (skip.rung is None and rung in DEFAULT_MODES))
    return next((skip for skip in of_rung if skip.applies(facts, policy, rung)), None)


def is_worth_it(facts: LadderFacts, rung: Rung) -> bool:
    """Return whether a rung is expected to save more time than it costs; True if that is not known."""
    if rung not in COSTS or facts.gain_s is None or not facts.restart_s:
        return True
    return _saving_s(facts) >= _cost_s(facts, rung)


def _cost_s(facts: LadderFacts, rung: Rung) -> float:
    return facts.measured_s.get(rung, COSTS.get(rung, 0.0))


def _saving_s(facts: LadderFacts) -> float:
    probability = updated(likely(facts.owner, facts.fault), facts.chance)
    return saving_s(probability, facts.gain_s or 0.0, facts.restart_s)


def _why(path: Path, tried: Counter[Rung], more: str = "") -> str:
    """Return a text such as ``the cause is not known; reattempt and diagnose did not help``."""
    names = [str(rung) for rung in Rung if tried[rung]]
    before = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"{path.when}; {before} did not help{more}" if before else path.when


# The attempts of earlier incidents that count.


def is_same_fault(tried: TriedRung, failure: Failure) -> bool:
    """Return whether an earlier attempt was made for the fault that caused the current failure.

    Both failures have the same symptom, and the same step or machine. The attempt also counts if both failures have a
    step and neither names a machine, since a machine that sometimes computes wrongly causes a NaN on all ranks, at any
    step.
    """
    if tried.symptom != failure.symptom:
        return False
    if failure.step >= 0 and (
        tried.step == failure.step or (tried.step >= 0 and not (failure.machine or tried.machine))
    ):
        return True
    return failure.machine != "" and tried.machine == failure.machine


def within_window(tried: Iterable[TriedRung], failure: Failure, policy: RecoveryPolicy) -> list[TriedRung]:
    """Return the rungs that were tried in the hours before a failure (``ladder.window_h``)."""
    began_ns = failure.time_ns - policy.ladder.window_h * 3600e9
    return [attempt for attempt in tried if attempt.time_ns >= began_ns]


def counting(facts: LadderFacts, policy: RecoveryPolicy) -> list[TriedRung]:
    """Return the attempts of earlier incidents that count for this failure.

    An attempt counts if its failure had the same symptom, and if that failure (a) is not solved, (b) is the same fault
    and lies in the window, or (c) is one of many failures in the window (``ladder.repeats``).
    """
    failure = facts.failure
    alike = [
        attempt
        for attempt in facts.remembered
        if attempt.symptom == failure.symptom and attempt.path not in KNOWN_CAUSES
    ]
    near = within_window(alike, failure, policy)
    many = 0 < policy.ladder.repeats <= 1 + len({attempt.generation for attempt in near})
    again = {id(attempt) for attempt in near if many or is_same_fault(attempt, failure)}
    return [attempt for attempt in alike if attempt.generation in facts.unsolved or id(attempt) in again]


def counted(facts: LadderFacts, policy: RecoveryPolicy, path: str = "") -> Counter[Rung]:
    """Count how often each rung was tried, in this incident and earlier for the same fault.

    Args:
        facts: The facts about the stopped job.
        policy: The policy with the window.
        path: The path of the failure. If its cause is known, only attempts on that path in this incident count, since
            attempts for faults of unknown cause show nothing about a known cause.
    """
    if path in KNOWN_CAUSES:
        return Counter(attempt.rung for attempt in facts.tried if attempt.path == path)
    return Counter(attempt.rung for attempt in (*counting(facts, policy), *_tried_for_unknown(facts)))


def _tried_for_unknown(facts: LadderFacts) -> list[TriedRung]:
    """Return the attempts of this incident, without those for faults whose cause is known."""
    return [attempt for attempt in facts.tried if attempt.path not in KNOWN_CAUSES]


def is_at_one_step(facts: LadderFacts, policy: RecoveryPolicy) -> bool:
    """Return whether the job failed before at this step, or failed before in this incident; True if the step is not
    known."""
    generation, step = facts.failure.generation, facts.failure.step
    here = any(attempt.generation != generation for attempt in _tried_for_unknown(facts))
    return step < 0 or here or any(attempt.step == step for attempt in counting(facts, policy))


def kept(
    remembered: list[TriedRung], new: list[TriedRung], policy: RecoveryPolicy, most: int, unsolved: Collection[int] = ()
) -> list[TriedRung]:
    """Return the attempts that a job remembers after an incident: those that can still count, the newest last.

    Args:
        remembered: Attempts before the incident.
        new: Attempts of the incident.
        policy: The policy with the window.
        most: The largest number of attempts to keep.
        unsolved: Generations whose failures are not solved.
    """
    newest_ns = max((attempt.time_ns for attempt in new), default=0)
    began_ns = newest_ns - policy.ladder.window_h * 3600e9
    before = [attempt for attempt in remembered if attempt.time_ns >= began_ns or attempt.generation in unsolved]
    return [attempt for attempt in (*before, *new) if attempt.path not in KNOWN_CAUSES][-most:]
