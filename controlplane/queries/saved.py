"""The newest saved steps of a job's state in each kind of storage, from its agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from activities.watching.shown import stored
from agent.v1 import agent_pb2 as pb
from controlplane import text
from controlplane.problems import STEPS, apart_text, problems_of
from everstep.decisions.keep.disk_schedule import newest_of_all

PROBLEMS = 8
"""At most this many problems are shown; the rest are counted."""


class SavesReport(BaseModel):
    """How often the ranks save their state in memory."""

    every: int
    """They save after every n-th step: the number of the rank that saves least often."""
    wanted: int
    """The number that the slowest rank needs, so that no step waits for a save."""
    waits: bool
    """Training waits for each save, while the ranks change the number."""
    number: int
    """Number of changes in this generation."""
    save_s: float
    """Time of a save of the slowest rank, seconds."""
    step_s: float
    """Time of a step of that rank without saves, seconds."""


class SavedReport(BaseModel):
    """For each kind of storage, the newest step of which every known rank has a copy; None: some rank has no copy."""

    own_step: int | None
    """The newest step that all ranks have in their own memory; None: ranks drift apart, without a common step."""
    own_newest: int | None = None
    """The newest step that the rank furthest behind has saved. It is newer than ``own_step`` only if ranks drift
    apart."""
    apart: int = 0
    """Number of steps between the rank furthest ahead and the rank furthest behind if it exceeds the slots of a rank;
    otherwise 0."""
    backup_step: int | None
    """The newest step of which all ranks have a backup."""
    backup_lag: int | None
    """Number of steps that the slowest backup is behind its rank's own memory; None: there are no backups."""
    disk_step: int | None
    disk_age_s: float | None
    """Greatest age of a rank's newest state on disk, seconds. ``disk_step``, which all ranks have, may be older."""
    disk_wanted: int | None
    """The next step that will be written to disk."""
    remote_step: int | None
    saves: SavesReport | None = None
    """How often the ranks save; None: no time of a save is known yet."""
    problems: list[str]
    """Why backups or disk checkpoints fail, by machine and rank."""


ShownRanks = Mapping[str, Iterable[pb.RankProgress]]
"""Machine → the progress of its ranks, from its agent."""


def saved_report(ranks: ShownRanks, *, before: ShownRanks | None = None) -> SavedReport | None:
    """The saved steps of the newest generation; None: no rank ever saved.

    Args:
        ranks: The answers of the agents.
        before: The earlier answers of the agents, if these were queried twice: see :func:`unsteady`.
    """
    pairs = [(machine, rank) for machine, shown in ranks.items() for rank in shown]
    generation = max((rank.generation for _, rank in pairs), default=0)
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
        saves=_saves([rank for _, rank in pairs if rank.generation == generation]),
        problems=_problems((machine, rank) for machine, rank in pairs if rank.generation == generation),
    )


def unsteady(ranks: ShownRanks) -> bool:
    """Whether ranks seem to have no common step. Agents answer at different times, so query them again to be sure."""
    saved = _newest(ranks)
    return _held_by_all(saved) is None and all(state.own_step >= 0 for state in saved)


def _newest(ranks: ShownRanks) -> list[pb.SavedState]:
    flat = [rank for shown in ranks.values() for rank in shown]
    generation = max((rank.generation for rank in flat), default=0)
    return [rank.saved for rank in flat if rank.generation == generation]


def _held_by_all(saved: Sequence[pb.SavedState]) -> int | None:
    """The newest step that every rank has in its own slots. If an agent lists no steps, it is the oldest of the ranks'
    newest steps."""
    if not all(state.own_steps for state in saved):
        return _common(state.own_step for state in saved)
    return _some(max(set.intersection(*(set(state.own_steps) for state in saved)), default=-1)) if saved else None


def _proven_apart(before: Sequence[pb.SavedState], now: Sequence[pb.SavedState]) -> bool:
    """Whether ranks certainly drift apart: some rank is now behind the oldest step that another rank had before."""
    oldest = max((min(state.own_steps, default=state.own_step) for state in before), default=-1)
    return any(state.own_step < oldest for state in now)


def _saves(ranks: Sequence[pb.RankProgress]) -> SavesReport | None:
    known = [rank.saves for rank in ranks if rank.saves.save_s and rank.saves.step_s]
    if not known:
        return None
    slowest = max(known, key=lambda saves: saves.save_s / saves.step_s)
    return SavesReport(
        every=max(saves.pace.every for saves in known),
        wanted=max(saves.wanted for saves in known),
        waits=any(saves.pace.waits for saves in known),
        number=max(saves.pace.number for saves in known),
        save_s=slowest.save_s,
        step_s=slowest.step_s,
    )


def _common(steps: Iterable[int]) -> int | None:
    return _some(min(steps, default=-1))


def _some(step: int) -> int | None:
    return step if step >= 0 else None


def _problems(pairs: Iterable[tuple[str, pb.RankProgress]]) -> list[str]:
    """One line for each machine and problem, with the ranks that have it."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for machine, rank in pairs:
        for what, problem in problems_of(rank).items():
            if problem and what != STEPS:
                ranks.setdefault((what, machine, problem), []).append(rank.rank)
    return [
        f"{what} of rank {', '.join(map(str, sorted(numbers)))} on {machine}: {problem}"
        for (what, machine, problem), numbers in sorted(ranks.items())
    ]


def saved_lines(saved: SavedReport) -> list[tuple[str, str]]:
    """The saved steps as text: pairs of a title and a line."""
    lag = f" ({saved.backup_lag} behind)" if saved.backup_lag else ""
    own = f"step {saved.own_step}" if saved.own_step is not None else "no common step of all ranks"
    if saved.own_newest is not None and saved.own_newest != saved.own_step:
        own += f" (the slowest rank is at {saved.own_newest})"
    parts = [f"{own} in own memory", f"{_shown(saved.backup_step)} at the peers{lag}"]
    age = f", {text.duration(saved.disk_age_s)} old" if saved.disk_age_s is not None else ""
    parts.append(f"{_shown(saved.disk_step)} on disk{age}")
    if saved.disk_wanted is not None:
        parts[-1] += f" (next: step {saved.disk_wanted})"
    if saved.remote_step is not None:
        parts.append(f"{saved.remote_step} remote")
    facts = [("saved", "; ".join(parts))]
    facts += [("saves", saves_text(saved.saves))] if saved.saves else []
    facts += [("problem", apart_text(saved.apart))] if saved.apart else []
    facts += [("problem", line) for line in saved.problems[:PROBLEMS]]
    if len(saved.problems) > PROBLEMS:
        facts.append(("problem", f"… and {len(saved.problems) - PROBLEMS} more"))
    return facts


def saves_text(saves: SavesReport) -> str:
    """How often the ranks save, e.g. ``every 4 steps (a save takes 1.9 s, a step 0.6 s)``."""
    every = "every step" if saves.every == 1 else f"every {saves.every} steps"
    waits = ", and training waits for them until all ranks have changed that" if saves.waits else ""
    return f"{every} (a save takes {_seconds(saves.save_s)}, a step {_seconds(saves.step_s)}){waits}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 0.1 else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def saved_short(saved: SavedReport | None) -> str:
    """The newest steps in own memory, at the peers, and on disk: ``120/119/105``."""
    if saved is None:
        return text.DASH
    return "/".join(map(_shown, (saved.own_step, saved.backup_step, saved.disk_step)))


def _shown(step: int | None) -> str:
    return text.DASH if step is None else str(step)
