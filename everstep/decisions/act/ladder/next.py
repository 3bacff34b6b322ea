"""Which rung of the ladder comes next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from everstep.decisions.act.ladder.facts import LadderFacts, counted, is_at_one_place
from everstep.decisions.act.ladder.paths import Path, path_of
from everstep.model.ladder import Rung, RungMode
from everstep.model.recovery_policy import RecoveryPolicy

DEFAULT_MODES = {Rung.DIAGNOSE: RungMode.ACT, Rung.ROLLBACK: RungMode.ACT, Rung.REPLAY: RungMode.ACT}
"""Rungs that a policy can hold back, and how far they go where it says nothing."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """What is done next."""

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
    place: int = 0
    """In its path, from 0; behind its end where nothing is left."""
    last: bool = False
    """Nothing else is left to try."""
    restarts: int = 0
    """How often the job was launched again since nothing else was left."""

    @property
    def text(self) -> str:
        """For people."""
        left_out = f" ({'; '.join(self.skipped)})" if self.skipped else ""
        return f"{self.why}{left_out}"


def mode_of(rung: Rung, policy: RecoveryPolicy) -> RungMode:
    """How far a rung may go; a word that this release does not know asks an operator."""
    mode = policy.ladder.modes.get(rung, DEFAULT_MODES.get(rung, RungMode.ACT))
    return mode if mode.known else RungMode.APPROVE


def next_rung(facts: LadderFacts, policy: RecoveryPolicy) -> LadderStep:
    """The first rung of the failure's path that was not tried yet, can be tried, and may be.

    Where none is left the job is reattempted; how often, the rules say that park it.
    """
    path = path_of(facts)
    tried = counted(facts, policy, path.name)
    passed: Counter[Rung] = Counter()
    skipped: list[str] = []
    for place, rung in enumerate(path.rungs):
        passed[rung] += 1
        if tried[rung] >= passed[rung]:
            continue
        if why_not := _why_not(rung, facts, policy):
            skipped.append(f"{rung}: {why_not}")
            continue
        asks = mode_of(rung, policy) is RungMode.APPROVE and rung not in facts.approved
        return LadderStep(rung, _why(rung, path, tried), path.name, tuple(skipped), asks, bool(tried), place)
    return LadderStep(
        Rung.REATTEMPT,
        _all(path, tried),
        path.name,
        tuple(skipped),
        tried=bool(tried),
        place=len(path.rungs),
        last=True,
        restarts=max(tried[Rung.REATTEMPT] - path.rungs.count(Rung.REATTEMPT), 0),
    )


def _why_not(rung: Rung, facts: LadderFacts, policy: RecoveryPolicy) -> str:
    """Why a rung cannot be tried, or may not; empty: it can."""
    lacks = ""
    if rung is Rung.DIAGNOSE and not facts.tests:
        lacks = "there is nothing to test"
    elif rung is Rung.ROLLBACK and not facts.back_to:
        lacks = "there is no version to go back to"
    elif rung is Rung.ROLLBACK and not is_at_one_place(facts, policy):
        lacks = facts.ran_well
    elif rung is Rung.REPLAY:
        lacks = facts.no_replay
    if lacks or rung not in DEFAULT_MODES:
        return lacks
    mode = mode_of(rung, policy)
    return f"its mode is {mode}" if mode in {RungMode.SHADOW, RungMode.OFF} else ""


def _why(rung: Rung, path: Path, tried: Counter[Rung]) -> str:
    before = _tried(tried)
    return f"{path.when}; {before} did not help" if before else path.when


def _all(path: Path, tried: Counter[Rung]) -> str:
    before = _tried(tried)
    return f"{path.when}; {before} did not help, and nothing else is left to try" if before else path.when


def _tried(tried: Counter[Rung]) -> str:
    """``reattempt, diagnose and reattempt``: in the order of the ladder, each once."""
    names = [str(rung) for rung in Rung if tried[rung]]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
