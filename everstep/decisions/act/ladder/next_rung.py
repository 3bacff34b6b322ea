"""The choice of the next rung, from the rungs that were tried for a failure, now and for the same fault before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from everstep.decisions.act.ladder.paths import EXPLAINED, KNOWN_CAUSES, LadderFacts, Path, path_of
from everstep.model.incident import Failure
from everstep.model.ladder import Rung, RungMode, TriedRung
from everstep.model.recovery_policy import RecoveryPolicy

DEFAULT_MODES = {Rung.DIAGNOSE: RungMode.ACT, Rung.ROLLBACK: RungMode.ACT, Rung.REPLAY: RungMode.ACT}
"""Rungs that a policy can restrict, and how far they go if the policy has no mode for them."""
HELD_BACK = frozenset({RungMode.SHADOW, RungMode.OFF})


@dataclass(frozen=True, slots=True)
class NextRung:
    """The next rung, and why."""

    rung: Rung
    why: str
    path: str
    """Name of the row of the table (``PATHS``)."""
    skipped: tuple[str, ...] = ()
    """Rungs whose turn it was before it, and why they were left out."""
    asks: bool = False
    """An operator has to approve it first."""
    tried: bool = False
    """Something was tried before."""
    position: int = 0
    """The position of the rung in its path, from 0; past the end if no rung is left."""
    last: bool = False
    """Nothing else is left to try."""
    restarts: int = 0
    """How often the job was launched again since no other rung was left."""

    @property
    def text(self) -> str:
        """The choice as text for people."""
        left_out = f" ({'; '.join(self.skipped)})" if self.skipped else ""
        return f"{self.why}{left_out}"

    @property
    def is_explained(self) -> bool:
        """Return whether a machine is to blame that is already handled."""
        return self.path == EXPLAINED


@dataclass(frozen=True, slots=True)
class Skip:
    """A reason for which a rung is left out."""

    rung: Rung | None
    """None: any that a policy can hold back."""
    applies: Callable[[LadderFacts, RecoveryPolicy, Rung], bool]
    because: str
    """A format of ``facts`` and ``mode``."""


SKIPS: tuple[Skip, ...] = (
    Skip(Rung.DIAGNOSE, lambda facts, policy, rung: not facts.tests, "there is nothing to test"),
    Skip(Rung.ROLLBACK, lambda facts, policy, rung: not facts.back_to, "there is no version to go back to"),
    Skip(
        Rung.ROLLBACK,
        lambda facts, policy, rung: facts.ran_well_h is not None and not is_at_one_step(facts, policy),
        "{facts.version} ran well for {facts.ran_well_h:.0f} h, and it fails at another step each time",
    ),
    Skip(Rung.REPLAY, lambda facts, policy, rung: bool(facts.no_replay), "{facts.no_replay}"),
    Skip(None, lambda facts, policy, rung: mode_of(rung, policy) in HELD_BACK, "its mode is {mode}"),
)
"""The reasons to skip a rung; the first that applies is shown."""


def mode_of(rung: Rung, policy: RecoveryPolicy) -> RungMode:
    """Return how far a rung may go; an unknown mode asks an operator."""
    mode = policy.ladder.modes.get(rung, DEFAULT_MODES.get(rung, RungMode.ACT))
    return mode if mode.known else RungMode.APPROVE


def next_rung(facts: LadderFacts, policy: RecoveryPolicy) -> NextRung:
    """The first rung of the failure's path that was not tried yet, can be tried, and may be.

    If no rung is left, the job is launched again; the rules that park a job decide how often.
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
            skipped.append(f"{rung}: {skip.because.format(facts=facts, mode=mode_of(rung, policy))}")
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
    """Why a rung is left out; None: it is not."""
    of_rung = (skip for skip in SKIPS if skip.rung is rung or (skip.rung is None and rung in DEFAULT_MODES))
    return next((skip for skip in of_rung if skip.applies(facts, policy, rung)), None)


def _why(path: Path, tried: Counter[Rung], more: str = "") -> str:
    """Return a text such as ``nothing says for sure what failed; reattempt and diagnose did not help``."""
    names = [str(rung) for rung in Rung if tried[rung]]
    before = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"{path.when}; {before} did not help{more}" if before else path.when


# What of earlier times counts.


def is_same_fault(tried: TriedRung, failure: Failure) -> bool:
    """Return whether an earlier attempt was made for the current failure.

    Both have the same symptom, and the same step or machine. The attempt also counts if no particular machine showed
    either failure: a machine that computes wrongly now and then causes a NaN on all ranks, at any step.
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
    """Attempts of earlier incidents that count for this failure.

    An attempt counts if it was for a failure with the same symptom, and (a) that failure is unsolved, or (b) it lies in
    the window, and it is the same fault, or there are many failures in the window.
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
    """Count how often each rung was tried: in this incident, and for the same fault before it.

    Args:
        facts: The facts about the stopped job.
        policy: The policy with the window.
        path: The path of the failure. If its cause is known, only attempts on that path in this incident count: faults
        of
            unknown cause show nothing about a machine that is gone.
    """
    if path in KNOWN_CAUSES:
        return Counter(attempt.rung for attempt in facts.tried if attempt.path == path)
    return Counter(attempt.rung for attempt in (*counting(facts, policy), *_tried_for_unknown(facts)))


def _tried_for_unknown(facts: LadderFacts) -> list[TriedRung]:
    """Attempts of this incident, except those for faults whose cause is known."""
    return [attempt for attempt in facts.tried if attempt.path not in KNOWN_CAUSES]


def is_at_one_step(facts: LadderFacts, policy: RecoveryPolicy) -> bool:
    """Return whether the job failed at the same step again, or again in this incident; True if steps are not known."""
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
    newest_ns = max((one.time_ns for one in new), default=0)
    began_ns = newest_ns - policy.ladder.window_h * 3600e9
    before = [attempt for attempt in remembered if attempt.time_ns >= began_ns or attempt.generation in unsolved]
    return [one for one in (*before, *new) if one.path not in KNOWN_CAUSES][-most:]
