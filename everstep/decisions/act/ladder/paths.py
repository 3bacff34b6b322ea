"""The table of paths says in which order rungs are tried for each kind of failure. The first row that fits counts.

ByteRobust (section 4.2, figure 5) tests the machines first. If all tests pass, it restarts the job as it is, then rolls
the code back, then replays. ADR 0044 (docs/adr) explains why some paths have another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.decisions.blame.classify.rule import MAYBE_HARDWARE, FaultClass
from everstep.model.finding import Owner
from everstep.model.incident import STILL_RUNNING, Failure, Symptom
from everstep.model.ladder import Rung, TriedRung

REATTEMPT, DIAGNOSE, ROLLBACK, REPLAY = Rung.REATTEMPT, Rung.DIAGNOSE, Rung.ROLLBACK, Rung.REPLAY
ELSEWHERE = frozenset({Owner.DATA, Owner.STORAGE, Owner.EXTERNAL, Owner.SCHEDULER})
"""Owners of faults for which neither a test of the machines nor other code helps."""
OF_HARDWARE = frozenset({Owner.MACHINE, Owner.NETWORK})
"""Owners of faults that only tests of the machines find; other code does not help."""


@dataclass(frozen=True, slots=True)
class LadderFacts:
    """The facts about a stopped job, including the current failure."""

    failure: Failure
    explained: bool = False
    """The failure is blamed on a machine that is already handled."""
    hinted: bool = False
    """An inspection suspects a machine, but not for sure."""
    tried: tuple[TriedRung, ...] = ()
    """Attempts of this incident since an operator last resumed it, the oldest first."""
    remembered: tuple[TriedRung, ...] = ()
    """Attempts of earlier incidents of the job."""
    of_script: bool = False
    """Samples of the ranks showed that the script itself makes them wait for each other."""
    blamed: bool = False
    """The running version is to blame: it is young, and code can cause the failure."""
    recent: bool = False
    """The running version was launched recently (``rollback.error_within_h``)."""
    version: str = ""
    """The running version; empty: it is not known."""
    ran_well_h: float | None = None
    """How many hours the running version ran without this fault; None: not long enough to clear the version."""
    back_to: str = ""
    """The version to which a rollback would go back; empty: there is none."""
    tests: tuple[str, ...] = ()
    """Diagnostic tests for this symptom; empty: there are none."""
    unsolved: frozenset[int] = field(default=frozenset())
    """Generations whose failures were not solved, in this incident or before it."""
    no_replay: str = ""
    """Why the job cannot be replayed; empty: it can be replayed."""
    diagnose_at_once: bool = False
    service: str = ""
    """The service that failed and that all machines share, e.g. ``remote storage``; empty: no such service is known."""
    gain_s: float | None = None
    """How long the job trained since its last failure, seconds; None: not known."""
    restart_s: float = 0.0
    """The time that a restart of the job costs, seconds; 0: not known."""
    chance: float = 1.0
    """The probability that the failure is at the same place as earlier failures only by chance."""
    measured_s: Mapping[Rung, float] = field(default_factory=dict)
    """Rung → how long it took the last time, seconds."""
    approved: frozenset[Rung] = field(default=frozenset())
    """Rungs that an operator approved."""

    @property
    def owner(self) -> str:
        """The owner of the fault that ended the first rank; empty: not known."""
        fault = self.failure.classification
        return "" if fault is None or fault.consequence else fault.owner

    @property
    def fault(self) -> str:
        """The class of the fault that ended the first rank; empty: not known."""
        fault = self.failure.classification
        return "" if fault is None or fault.consequence else fault.fault


@dataclass(frozen=True, slots=True)
class Path:
    """One row: a kind of failure, and its rungs in order."""

    name: str
    """The stable name of the path in reports."""
    when: str
    """The kind of failure, in one line."""
    rungs: tuple[Rung, ...]
    """The rungs in order; a rung that is named twice is tried twice. After the last rung the job is launched again as
    often as the policy allows."""
    source: str
    fits: Callable[[LadderFacts], bool]


def _update(facts: LadderFacts) -> bool:
    return facts.failure.symptom is Symptom.UPDATE


def _explained(facts: LadderFacts) -> bool:
    return facts.explained or facts.failure.symptom in STILL_RUNNING


def _new_code(facts: LadderFacts) -> bool:
    return not _not_finite(facts) and (facts.blamed or (_user_error(facts) and facts.recent))


NAN_OF_ONE_RANK = "nan-before-communication"
"""The reason code of a rank whose own gradients were not finite before the ranks exchanged theirs."""


def _user_error(facts: LadderFacts) -> bool:
    if _not_finite(facts):
        return False
    by_exit = facts.failure.symptom in {Symptom.EXCEPTION, Symptom.EARLY_EXIT} and facts.owner not in ELSEWHERE
    # GPUs and the network report their faults as exceptions, too.
    by_exit = by_exit and facts.owner not in OF_HARDWARE and facts.fault not in MAYBE_HARDWARE
    return (by_exit and not facts.hinted) or facts.owner == Owner.CODE or facts.of_script


def _elsewhere(facts: LadderFacts) -> bool:
    return facts.owner in ELSEWHERE or facts.service != ""


def _hardware(facts: LadderFacts) -> bool:
    return facts.owner in OF_HARDWARE


def _communication(facts: LadderFacts) -> bool:
    return facts.fault == FaultClass.NCCL_ERROR and facts.owner == Owner.UNKNOWN


def _not_finite(facts: LadderFacts) -> bool:
    fault = facts.failure.classification
    return facts.failure.symptom is Symptom.NOT_FINITE or (fault is not None and fault.reason == NAN_OF_ONE_RANK)


def _not_finite_in_new_code(facts: LadderFacts) -> bool:
    return _not_finite(facts) and facts.blamed


def _not_launched(facts: LadderFacts) -> bool:
    return facts.failure.symptom is Symptom.LAUNCH_FAILED


EXPLAINED = "explained"
"""Name of the path of failures that are blamed on a machine which is already handled."""
KNOWN_CAUSES = frozenset({"update", EXPLAINED, "elsewhere"})
"""Paths of failures whose cause is known, and is neither the code nor a machine that is still in the job. Attempts on
these paths show nothing about other failures."""
FIGURE = "ByteRobust, section 4.2 and figure 5"
PATHS: tuple[Path, ...] = (
    Path("update", "nothing failed: the job was stopped for other code", (REATTEMPT,), "", _update),
    Path(
        EXPLAINED,
        "a machine is to blame: it was lost, it left the job, or an inspection names it",
        (REATTEMPT,),
        f"{FIGURE}, step 1",
        _explained,
    ),
    Path(
        "elsewhere",
        "the data, the scheduler, or a service that all machines share is to blame",
        (REATTEMPT,),
        "",
        _elsewhere,
    ),
    Path(
        "hardware",
        "a machine, or the network between machines, is to blame",
        (DIAGNOSE, REATTEMPT, REPLAY),
        f"{FIGURE}, step 3",
        _hardware,
    ),
    Path(
        "communication",
        "NCCL failed, and neither a machine nor the code is known to be to blame",
        (DIAGNOSE, REATTEMPT, ROLLBACK, REPLAY),
        f"{FIGURE}, step 3",
        _communication,
    ),
    Path(
        "new-code",
        "the code is new, and the program itself failed or hangs",
        (ROLLBACK, REATTEMPT),
        f"{FIGURE}, step 2",
        _new_code,
    ),
    Path(
        "user-error",
        "the program itself failed or hangs",
        (REATTEMPT, ROLLBACK),
        f"{FIGURE}, step 2",
        _user_error,
    ),
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
        "the ranks did not reach a first step",
        (REATTEMPT, REATTEMPT, DIAGNOSE, ROLLBACK, REPLAY),
        "",
        _not_launched,
    ),
    Path(
        "unclear-at-once",
        "the cause is not known, and `diagnose.at_once` is set",
        (DIAGNOSE, REATTEMPT, ROLLBACK, REPLAY),
        FIGURE,
        lambda facts: facts.diagnose_at_once,
    ),
    Path(
        "unclear",
        "the cause is not known",
        (REATTEMPT, DIAGNOSE, REATTEMPT, ROLLBACK, REPLAY),
        FIGURE,
        lambda facts: True,
    ),
)
"""The paths in order. Every failure has a path, since the last row always fits."""


def path_of(facts: LadderFacts) -> Path:
    """Return the path of a failure."""
    return next(path for path in PATHS if path.fits(facts))
