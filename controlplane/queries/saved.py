"""How far the copies of a job's state are behind its steps, from its agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from activities.watching.shown import stored
from agent.v1 import agent_pb2 as pb
from controlplane import text
from controlplane.problems import STEPS, apart_text, problems_of
from everstep.decisions.keep.disk_schedule import newest_of_all

PROBLEMS = 8
"""Problems that are shown; the others are counted."""


class SavedReport(BaseModel):
    """The newest step of which every rank seen has a copy, by where it lies; None: some rank has none."""

    own_step: int | None
    """In own memory: the newest that every rank holds at once; None: they drift apart, and have none in common."""
    own_newest: int | None = None
    """The newest save of the rank that is furthest behind; later than ``own_step`` only where ranks drift apart."""
    apart: int = 0
    """So many steps ranks drift apart, which is more than their slots hold; 0: they do not."""
    backup_step: int | None
    """At its peer."""
    backup_lag: int | None
    """Steps that the slowest rank's backup is behind its own memory; None: nothing is backed up."""
    disk_step: int | None
    disk_age_s: float | None
    """Age of the state in it, as the agents say; where some have later steps too, it may be older."""
    disk_wanted: int | None
    """Step that is going to be written to disk."""
    remote_step: int | None
    problems: list[str]
    """Why backups or disk checkpoints fail, by machine and rank."""


ShownRanks = Mapping[str, Iterable[pb.RankProgress]]
"""Machine → what its agent shows of its ranks."""


def saved_report(ranks: ShownRanks, *, before: ShownRanks | None = None) -> SavedReport | None:
    """What the newest generation's ranks have saved; None where no rank ever saved.

    Args:
        ranks: What the agents say.
        before: What they had said before they were asked again: see :func:`unsteady`.
    """
    everyone = [(machine, rank) for machine, shown in ranks.items() for rank in shown]
    generation = max((rank.generation for _, rank in everyone), default=0)
    known = [(machine, rank) for machine, rank in everyone if rank.generation == generation]
    saved = _newest(ranks)
    if not any(state.own_step >= 0 or state.disk_step >= 0 for state in saved):
        return None
    disk_step = _some(newest_of_all([stored(state) for state in saved]) or -1)
    backed_up = [-1 if state.backup_none else state.backup_step for state in saved]
    behind = [state.own_step - step for state, step in zip(saved, backed_up, strict=True) if step >= 0]
    newest = _common(state.own_step for state in saved)
    return SavedReport(
        own_step=newest if before and not _proven_apart(_newest(before), saved) else _held_by_all(saved),
        own_newest=newest,
        apart=max(state.apart for state in saved),
        backup_step=_common(backed_up),
        backup_lag=max(0, *behind) if behind else None,
        disk_step=disk_step,
        disk_age_s=(max(state.disk_age_s for state in saved) or None) if disk_step is not None else None,
        disk_wanted=_some(max(state.disk_wanted for state in saved)),
        remote_step=_common(state.remote_step for state in saved),
        problems=_problems(known),
    )


def unsteady(ranks: ShownRanks) -> bool:
    """Whether no step seems common: agents do not answer in one moment, so they have to be asked again."""
    saved = _newest(ranks)
    return _held_by_all(saved) is None and all(state.own_step >= 0 for state in saved)


def _newest(ranks: ShownRanks) -> list[pb.SavedState]:
    everyone = [rank for shown in ranks.values() for rank in shown]
    generation = max((rank.generation for rank in everyone), default=0)
    return [rank.saved for rank in everyone if rank.generation == generation]


def _held_by_all(saved: Sequence[pb.SavedState]) -> int | None:
    """The newest step that every rank has in its own slots; where agents do not say which, that of the last rank."""
    if not all(state.own_steps for state in saved):
        return _common(state.own_step for state in saved)
    return _some(max(set.intersection(*(set(state.own_steps) for state in saved)), default=-1)) if saved else None


def _proven_apart(before: Sequence[pb.SavedState], now: Sequence[pb.SavedState]) -> bool:
    """Whether ranks drift apart for certain: asked later, one is still before the oldest step that another held."""
    gone = max((min(state.own_steps, default=state.own_step) for state in before), default=-1)
    return any(state.own_step < gone for state in now)


def _common(steps: Iterable[int]) -> int | None:
    return _some(min(steps, default=-1))


def _some(step: int) -> int | None:
    return step if step >= 0 else None


def _problems(known: Iterable[tuple[str, pb.RankProgress]]) -> list[str]:
    """One line for each machine and problem, with the ranks that have it."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for machine, rank in known:
        for what, problem in problems_of(rank).items():
            if problem and what != STEPS:
                ranks.setdefault((what, machine, problem), []).append(rank.rank)
    return [
        f"{what} of rank {', '.join(map(str, sorted(having)))} on {machine}: {problem}"
        for (what, machine, problem), having in sorted(ranks.items())
    ]


def saved_lines(saved: SavedReport) -> list[tuple[str, str]]:
    """The facts for a person, in reading order."""
    lag = f" ({saved.backup_lag} behind)" if saved.backup_lag else ""
    own = f"step {saved.own_step}" if saved.own_step is not None else "no step of all ranks"
    if saved.own_newest is not None and saved.own_newest != saved.own_step:
        own += f" (the slowest rank is at {saved.own_newest})"
    parts = [f"{own} in own memory", f"{_shown(saved.backup_step)} at the peers{lag}"]
    age = f", {text.duration(saved.disk_age_s)} old" if saved.disk_age_s is not None else ""
    parts.append(f"{_shown(saved.disk_step)} on disk{age}")
    if saved.disk_wanted is not None:
        parts[-1] += f" (step {saved.disk_wanted} comes)"
    if saved.remote_step is not None:
        parts.append(f"{saved.remote_step} remote")
    facts = [("saved", "; ".join(parts))]
    facts += [("problem", apart_text(saved.apart))] if saved.apart else []
    facts += [("problem", line) for line in saved.problems[:PROBLEMS]]
    if len(saved.problems) > PROBLEMS:
        facts.append(("problem", f"… and {len(saved.problems) - PROBLEMS} more"))
    return facts


def saved_short(saved: SavedReport | None) -> str:
    """``120/119/105``: newest step in own memory, at the peers, on disk."""
    if saved is None:
        return text.DASH
    return "/".join(map(_shown, (saved.own_step, saved.backup_step, saved.disk_step)))


def _shown(step: int | None) -> str:
    return text.DASH if step is None else str(step)
