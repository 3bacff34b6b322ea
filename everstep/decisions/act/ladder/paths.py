"""The order in which rungs are tried for each kind of failure: a table whose first row that fits decides.

ByteRobust (section 4.2, figure 5) tests the machines first, restarts the job as it is if all tests pass, then rolls the
code back, then replays. A row that differs from that order states it (docs/adr/0044).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.model.finding import Owner
from everstep.model.incident import STILL_RUNNING, Failure, Symptom
from everstep.model.ladder import Rung, TriedRung

REATTEMPT, DIAGNOSE, ROLLBACK, REPLAY = Rung.REATTEMPT, Rung.DIAGNOSE, Rung.ROLLBACK, Rung.REPLAY
ELSEWHERE = frozenset({Owner.DATA, Owner.STORAGE, Owner.SCHEDULER})
"""Owners of faults against which neither a test of a machine nor other code helps."""


@dataclass(frozen=True, slots=True)
class LadderFacts:
    """The facts about a stopped job, including the current failure."""

    failure: Failure
    explained: bool = False
    """A machine is to blame, and is dealt with."""
    hinted: bool = False
    """An inspection names a machine, and not for sure."""
    tried: tuple[TriedRung, ...] = ()
    """Attempts of this incident since an operator last resumed it, the oldest first."""
    remembered: tuple[TriedRung, ...] = ()
    """Attempts of earlier incidents of the job."""
    of_script: bool = False
    """Samples of the ranks showed that the script itself has them wait for each other."""
    blamed: bool = False
    """The running version is to blame: it is young, and code can cause the failure."""
    recent: bool = False
    """The running version was launched recently (``rollback.error_within_h``)."""
    version: str = ""
    """The running version; empty: it is not known."""
    ran_well_h: float | None = None
    """How many hours the running version ran without this fault; None: not long enough to clear it."""
    back_to: str = ""
    """The version that a rollback would bring; empty: there is none."""
    tests: tuple[str, ...] = ()
    """Diagnostic tests for this symptom; empty: there are none."""
    unsolved: frozenset[int] = field(default=frozenset())
    """Generations whose failures were not solved, in this incident or before it."""
    no_replay: str = ""
    """Why the job cannot be replayed; empty: it can."""
    diagnose_at_once: bool = False
    approved: frozenset[Rung] = field(default=frozenset())
    """Rungs that an operator let go on."""

    @property
    def owner(self) -> str:
        """The owner of the fault that ended the first rank; empty: not known."""
        found = self.failure.classification
        return "" if found is None or found.consequence else found.owner


@dataclass(frozen=True, slots=True)
class Path:
    """One row: a kind of failure, and its rungs in order."""

    name: str
    """The stable name of the path in reports."""
    when: str
    rungs: tuple[Rung, ...]
    """The rungs in order; a rung that is named twice is tried twice. After the last rung the job is reattempted as
    often as the policy allows."""
    source: str
    fits: Callable[[LadderFacts], bool]


def _update(facts: LadderFacts) -> bool:
    return facts.failure.symptom is Symptom.UPDATE


def _explained(facts: LadderFacts) -> bool:
    return facts.explained or facts.failure.symptom in STILL_RUNNING


def _new_code(facts: LadderFacts) -> bool:
    return not _not_finite(facts) and (facts.blamed or (_user_error(facts) and facts.recent))


def _user_error(facts: LadderFacts) -> bool:
    by_exit = facts.failure.symptom in {Symptom.USER_ERROR, Symptom.EARLY_EXIT} and facts.owner not in ELSEWHERE
    return (by_exit and not facts.hinted) or facts.owner == Owner.CODE or facts.of_script


def _elsewhere(facts: LadderFacts) -> bool:
    return facts.owner in ELSEWHERE


def _not_finite(facts: LadderFacts) -> bool:
    return facts.failure.symptom is Symptom.NOT_FINITE


def _not_finite_in_new_code(facts: LadderFacts) -> bool:
    return _not_finite(facts) and facts.blamed


def _not_launched(facts: LadderFacts) -> bool:
    return facts.failure.symptom is Symptom.LAUNCH_FAILED


def _at_once(facts: LadderFacts) -> bool:
    return facts.diagnose_at_once


def _else(facts: LadderFacts) -> bool:
    return True


EXPLAINED = "explained"
"""Name of the path of failures of which a machine is to blame that is dealt with."""
KNOWN_CAUSES = frozenset({"update", EXPLAINED, "elsewhere"})
"""Paths of failures whose cause is known, and is neither the code nor a machine of the job: what was tried for them
shows nothing about another failure."""
FIGURE = "ByteRobust, section 4.2 and figure 5"
PATHS: tuple[Path, ...] = (
    Path("update", "nothing failed: other code is to run", (REATTEMPT,), "", _update),
    Path(
        EXPLAINED,
        "a machine is to blame: it is gone, it left, or an inspection names it",
        (REATTEMPT,),
        f"{FIGURE}, step 1",
        _explained,
    ),
    Path(
        "new-code",
        "the code is new, and the program itself failed, or hangs by itself",
        (ROLLBACK, REATTEMPT),
        f"{FIGURE}, step 2",
        _new_code,
    ),
    Path(
        "user-error",
        "the program itself failed, or hangs by itself",
        (REATTEMPT, ROLLBACK),
        f"{FIGURE}, step 2",
        _user_error,
    ),
    Path("elsewhere", "data, shared storage or the scheduler are to blame", (REATTEMPT,), "", _elsewhere),
    Path(
        "not-finite-new-code",
        "the loss is not finite, and the code is new",
        (DIAGNOSE, ROLLBACK, REATTEMPT, REPLAY),
        FIGURE,
        _not_finite_in_new_code,
    ),
    Path("not-finite", "the loss is not finite", (DIAGNOSE, REATTEMPT, ROLLBACK, REPLAY), FIGURE, _not_finite),
    Path(
        "not-launched",
        "the ranks did not come to a step",
        (REATTEMPT, REATTEMPT, DIAGNOSE, ROLLBACK, REPLAY),
        "",
        _not_launched,
    ),
    Path(
        "unclear-at-once",
        "nothing says for sure what failed, and `diagnose.at_once` is set",
        (DIAGNOSE, REATTEMPT, ROLLBACK, REPLAY),
        FIGURE,
        _at_once,
    ),
    Path(
        "unclear",
        "nothing says for sure what failed",
        (REATTEMPT, DIAGNOSE, REATTEMPT, ROLLBACK, REPLAY),
        FIGURE,
        _else,
    ),
)
"""The paths in order. Every failure has a path, since the last row always fits."""


def path_of(facts: LadderFacts) -> Path:
    """The path of a failure."""
    return next(path for path in PATHS if path.fits(facts))
