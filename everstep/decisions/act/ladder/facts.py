"""What the ladder looks at, and what of earlier times counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from everstep.model.incident import Failure
from everstep.model.ladder import Rung, Tried
from everstep.model.recovery_policy import RecoveryPolicy

EXPLAINS = frozenset({"update", "explained", "elsewhere"})
"""Paths of failures whose cause is known, and is neither the code nor a machine of the job: what was tried about them
says nothing of another failure."""


@dataclass(frozen=True, slots=True)
class LadderFacts:
    """Of a stopped job, the failure at hand included."""

    failure: Failure
    explained: bool = False
    """A machine is to blame, and is dealt with."""
    hinted: bool = False
    """An inspection names a machine, and not for sure."""
    tried: tuple[Tried, ...] = ()
    """In this incident, since an operator resumed it last; the oldest first."""
    remembered: tuple[Tried, ...] = ()
    """In earlier incidents of the job."""
    of_script: bool = False
    """Looks at the ranks showed that the script itself has them wait for each other."""
    blamed: str = ""
    """Why the version that runs is to blame: it is young, and what failed can come from code. Empty: it is not."""
    recent: bool = False
    """The version that runs came not long ago (``rollback.error_within_h``)."""
    back_to: str = ""
    """The version that a rollback would bring; empty: there is none."""
    tests: tuple[str, ...] = ()
    """Diagnostic tests for this symptom; empty: there are none."""
    unsolved: frozenset[int] = field(default=frozenset())
    """Generations whose failures were not solved, in this incident or before it."""
    ran_well: str = ""
    """Why the code is not to blame for what comes at another place each time; empty: nothing says so."""
    no_replay: str = ""
    """Why the job cannot be replayed; empty: it can."""
    diagnose_at_once: bool = False
    approved: frozenset[Rung] = field(default=frozenset())
    """Rungs that an operator let go on."""

    @property
    def owner(self) -> str:
        """Whose matter the end of the first rank is; empty: not known."""
        found = self.failure.classification
        return "" if found is None or found.consequence else found.owner


def is_same_fault(tried: Tried, failure: Failure) -> bool:
    """Whether something that was tried earlier was tried for what failed now: the symptom is the same, and so is the
    step or the machine; or it was seen of no machine in particular both times, as a NaN that all ranks have is, which
    a machine that computes wrongly now and then brings about at any step."""
    if tried.symptom != failure.symptom:
        return False
    if failure.step >= 0 and (
        tried.step == failure.step or (tried.step >= 0 and not (failure.machine or tried.machine))
    ):
        return True
    return failure.machine != "" and tried.machine == failure.machine


def within_window(tried: Iterable[Tried], failure: Failure, policy: RecoveryPolicy) -> list[Tried]:
    """What was tried in the hours before a failure (``ladder.window_h``)."""
    began_ns = failure.time_ns - policy.ladder.window_h * 3600e9
    return [one for one in tried if one.time_ns >= began_ns]


def counting(facts: LadderFacts, policy: RecoveryPolicy) -> list[Tried]:
    """What was tried before this incident, and counts: a failure with the same symptom was not solved by it; or it
    was, and this is the same fault again within the window, or one of many failures in it."""
    failure = facts.failure
    alike = [one for one in facts.remembered if one.symptom == failure.symptom and one.path not in EXPLAINS]
    near = within_window(alike, failure, policy)
    many = 0 < policy.ladder.repeats <= 1 + len({one.generation for one in near})
    again = {id(one) for one in near if many or is_same_fault(one, failure)}
    return [one for one in alike if one.generation in facts.unsolved or id(one) in again]


def counted(facts: LadderFacts, policy: RecoveryPolicy, path: str = "") -> Counter[Rung]:
    """How often each rung was tried: in this incident, and for the same fault before it.

    Args:
        facts: Of the stopped job.
        policy: The window.
        path: Of the failure. Where its cause is known, only what was tried on that path in this incident counts: faults
            that nobody explained say nothing of a machine that is gone.
    """
    if path in EXPLAINS:
        return Counter(one.rung for one in facts.tried if one.path == path)
    return Counter(one.rung for one in (*counting(facts, policy), *_tried_for_unknown(facts)))


def _tried_for_unknown(facts: LadderFacts) -> list[Tried]:
    """What was tried in this incident, but for faults whose cause is known."""
    return [one for one in facts.tried if one.path not in EXPLAINS]


def is_at_one_place(facts: LadderFacts, policy: RecoveryPolicy) -> bool:
    """Whether the job fails at the same step again, or did not come to one since; where steps are not known, it may."""
    generation, step = facts.failure.generation, facts.failure.step
    here = any(one.generation != generation for one in _tried_for_unknown(facts))
    return step < 0 or here or any(one.step == step for one in counting(facts, policy))


def kept(
    remembered: list[Tried], new: list[Tried], policy: RecoveryPolicy, most: int, unsolved: Collection[int] = ()
) -> list[Tried]:
    """What a job remembers after an incident: what can still count, the newest last.

    Args:
        remembered: Before it.
        new: What the incident tried.
        policy: The window.
        most: No more than these.
        unsolved: Generations whose failures are not solved.
    """
    newest_ns = max((one.time_ns for one in new), default=0)
    began_ns = newest_ns - policy.ladder.window_h * 3600e9
    before = [one for one in remembered if one.time_ns >= began_ns or one.generation in unsolved]
    return [one for one in (*before, *new) if one.path not in EXPLAINS][-most:]
