"""Shortens the trials of groups for storage, so that a replay of thousands of machines stays small.

A stored trial has a limited size. If several trials of a group have the same result, only the first is kept, with the
number of these trials. The conclusion (:func:`everstep.decisions.blame.replay.compare_groups.conclude`) stays the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from everstep.model.replay import GroupRun, RunEnd

LETTERS = 16
"""The number of letters of a digest."""
DIGESTS = 64
"""The largest number of digests for a trial's losses, and for its states. If there are more, neighbouring digests are
combined."""
IN_FULL = 4
"""For each group, this many different answers keep all their digests. Every further answer keeps only one digest."""
WHY = 300
"""The largest number of letters of a reason."""


def digest(parts: Iterable[str]) -> str:
    """Return a digest of several texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:LETTERS]


def bounded(run: GroupRun) -> GroupRun:
    """Return a trial with at most ``DIGESTS`` digests of each kind."""
    losses, steps_each = _shared(run.losses)
    states, ranks_each = _shared(run.states)
    return run.model_copy(
        update={
            "losses": losses,
            "states": states,
            "steps_each": run.steps_each * steps_each,
            "ranks_each": run.ranks_each * ranks_each,
            "why": run.why[:WHY],
        }
    )


def _shared(digests: Sequence[str]) -> tuple[list[str], int]:
    """Combine neighbouring digests to at most ``DIGESTS``; also return how many digests each of them combines."""
    each = -(-len(digests) // DIGESTS) or 1
    if each == 1:
        return list(digests), 1
    return [digest(digests[start : start + each]) for start in range(0, len(digests), each)], each


def answer_of(run: GroupRun) -> str:
    """Return one digest of all that a group computed; empty if there is nothing to compare."""
    if run.answer or not (run.losses or run.states):
        return run.answer
    return digest(["losses", *run.losses, "states", *run.states])


def fold(runs: Iterable[GroupRun]) -> list[GroupRun]:
    """Combine the trials of a group with the same result.

    The first trial is kept. It gets the number of trials, the number of the last repeat, and the sum of their seconds.
    Names of machines are dropped, since the plan has them. The digests of a trial that broke are dropped too: they are
    not compared.
    """
    folded: dict[tuple[str, ...], GroupRun] = {}
    in_full = Counter[str]()
    for run in runs:
        ran = run.end is RunEnd.RAN
        answer = answer_of(run) if ran else ""
        key = (run.group, str(run.end), run.kind if ran else "", run.shape if ran else "", answer)
        if (first := folded.get(key)) is not None:
            more = {
                "count": first.count + run.count,
                "repeat": max(first.repeat, run.repeat),
                "seconds": round(first.seconds + run.seconds, 3),
            }
            folded[key] = first.model_copy(update=more)
            continue
        keeps_digests = ran and in_full[run.group] < IN_FULL
        in_full[run.group] += ran
        small = run if keeps_digests else run.model_copy(update={"losses": [], "states": []})
        folded[key] = small.model_copy(update={"machines": [], "answer": answer})
    return list(folded.values())
