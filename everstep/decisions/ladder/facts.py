"""What the ladder looks at, and what of earlier times counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.model.incident import Failure
from everstep.model.ladder import Rung, Tried
from everstep.model.recovery_policy import RecoveryPolicy


@dataclass(frozen=True, slots=True)
class LadderFacts:
    """Of a stopped job, the failure at hand included."""

    failure: Failure
    explained: bool = False
    """A machine is to blame, and is dealt with."""
    tried: tuple[Tried, ...] = ()
    """In this incident, since an operator resumed it last; the oldest first."""
    remembered: tuple[Tried, ...] = ()
    """In earlier incidents of the job."""
    of_script: bool = False
    """Looks at the ranks showed that the script itself has them wait for each other."""
    blamed: str = ""
    """Why the version that runs is to blame: it is young, and what failed can come from code. Empty: it is not."""
    recent: bool = False
    """The version that runs came not long ago (``rollback_error_h``)."""
    back_to: str = ""
    """The version that a rollback would bring; empty: there is none."""
    tests: tuple[str, ...] = ()
    """Diagnostic tests for this symptom; empty: there are none."""
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
    a machine that computes wrongly now and then brings about at any step (ours)."""
    if tried.symptom != failure.symptom:
        return False
    if failure.step >= 0 and (
        tried.step == failure.step or (tried.step >= 0 and not (failure.machine or tried.machine))
    ):
        return True
    return failure.machine != "" and tried.machine == failure.machine


def within_window(tried: Iterable[Tried], failure: Failure, policy: RecoveryPolicy) -> list[Tried]:
    """What was tried in the hours before a failure (``ladder_window_h``)."""
    began_ns = failure.time_ns - policy.ladder_window_h * 3600e9
    return [one for one in tried if one.time_ns >= began_ns]


def counted(facts: LadderFacts, policy: RecoveryPolicy) -> Counter[Rung]:
    """How often each rung was tried: in this incident, and for the same fault within the window before it."""
    remembered = within_window(facts.remembered, facts.failure, policy)
    before = [one for one in remembered if is_same_fault(one, facts.failure)]
    return Counter(one.rung for one in (*before, *facts.tried))


def kept(remembered: list[Tried], new: list[Tried], policy: RecoveryPolicy, most: int) -> list[Tried]:
    """What a job remembers after an incident: what can still count, the newest last.

    Args:
        remembered: Before it.
        new: What the incident tried.
        policy: The window.
        most: No more than these.
    """
    newest_ns = max((one.time_ns for one in new), default=0)
    began_ns = newest_ns - policy.ladder_window_h * 3600e9
    return [*(one for one in remembered if one.time_ns >= began_ns), *new][-most:]
