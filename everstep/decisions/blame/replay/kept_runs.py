"""The stored trials of groups, so that a replay of thousands of machines and dozens of repeats stays small.

A trial of a group has a bounded size; of several trials with the same end the first is kept, with their number. The
conclusion from all of them (:func:`everstep.decisions.blame.replay.compare_groups.conclude`) is the same before and
after.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from everstep.model.replay import GroupRun, RunEnd

LETTERS = 16
"""Letters of each digest."""
DIGESTS = 64
"""The largest number of digests of a trial's losses, and of its states; beyond that, neighbours share a digest."""
IN_FULL = 4
"""The number of answers of one group whose digests are kept; further answers are compared as a whole only."""
WHY = 300
"""Letters of a reason."""


def digest(parts: Iterable[str]) -> str:
    """Return a digest of several texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:LETTERS]


def bounded(run: GroupRun) -> GroupRun:
    """A run with few digests; a run that is bounded already stays as it is."""
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
    """Combine digests to at most this many, and return how many each combines."""
    each = -(-len(digests) // DIGESTS) or 1
    if each == 1:
        return list(digests), 1
    return [digest(digests[start : start + each]) for start in range(0, len(digests), each)], each


def answer_of(run: GroupRun) -> str:
    """Return a digest of all that a group computed; empty: there is nothing to compare."""
    if run.answer or not (run.losses or run.states):
        return run.answer
    return digest(["losses", *run.losses, "states", *run.states])


def fold(runs: Iterable[GroupRun]) -> list[GroupRun]:
    """Keep one trial of each kind for each group: the first, with the number of all, the last repeat, and their
    seconds.

    Who is in a group the plan says. What a run computed that broke before its end is compared with nothing.
    """
    folded: dict[tuple[str, ...], GroupRun] = {}
    in_full = Counter[str]()
    for run in runs:
        ran = run.end is RunEnd.RAN
        answer = answer_of(run) if ran else ""
        key = (run.group, str(run.end), run.kind if ran else "", run.shape if ran else "", answer)
        if (known := folded.get(key)) is not None:
            more = {
                "count": known.count + run.count,
                "repeat": max(known.repeat, run.repeat),
                "seconds": round(known.seconds + run.seconds, 3),
            }
            folded[key] = known.model_copy(update=more)
            continue
        kept = ran and in_full[run.group] < IN_FULL
        in_full[run.group] += ran
        small = run if kept else run.model_copy(update={"losses": [], "states": []})
        folded[key] = small.model_copy(update={"machines": [], "answer": answer})
    return list(folded.values())
