"""The confirmation that a launched generation makes steps.

A restart is confirmed by the kind of steps that its script showed before: bodies of ``run.steps``, else reports or
calls of the optimizer. A script that has shown none yet counts as running, but not as confirmed, once it lived for a
while (ADR 0020).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.decisions.detect.rank_ends import follow_s
from everstep.decisions.detect.step_watch import RUNS_FREE_STEPS
from everstep.model.launch import Confirmation, Showing
from everstep.model.recovery_policy import RecoveryPolicy

_ORDER = {"": 0, "calls": 1, "steps": 2}
"""How a script shows its steps, from the least certain to the most; a kind of another release is kept."""


def has_stepped(
    *,
    attached: bool,
    finished: bool,
    entered: bool,
    first_step: bool,
    optimizer_steps: int,
    reports: int,
    kind: str = "",
) -> bool:
    """Return whether a process completed a step, if it shows steps at all.

    Args:
        attached: The process joined.
        finished: Its loop ran to the end, or it left it.
        entered: The process is within ``run.steps``.
        first_step: It completed a body of the loop, or called an optimizer before it joined, if ever it does.
        optimizer_steps: Calls of the optimizer.
        reports: Calls of ``run.report``.
        kind: The kind of the job's ``Showing``: with ``steps``, only loop bodies count.
    """
    if finished or first_step:
        return True
    if entered or kind == "steps":
        return False
    # Before its loop a script may call the optimizer once, so that it has a state to load into.
    return reports > 0 or optimizer_steps > (1 if attached else 0)


@dataclass(frozen=True, slots=True)
class RankState:
    """The progress of one rank of the generation; times in nanoseconds of the wall clock, 0: not yet."""

    rank: int
    alive: bool
    attached: bool
    finished: bool
    completed_steps: int
    optimizer_steps: int
    code: int | None = None
    """Exit code; None while it is alive, or when it ended otherwise."""
    forked_ns: int = 0
    script_ns: int = 0
    joined_ns: int = 0
    restored_ns: int = 0
    first_step_ns: int = 0
    entered_ns: int = 0
    left_ns: int = 0
    """When the rank left its loop before the end, e.g. by ``break``."""
    reports: int = 0

    @property
    def over(self) -> bool:
        """Whether the rank has no step left to do: it left its loop without an error."""
        return self.finished or (self.left_ns > 0 and (self.alive or self.code == 0))

    @property
    def shown(self) -> int:
        """Steps that this process showed: loop bodies, reports or calls of the optimizer."""
        return max(self.optimizer_steps, self.reports, int(self.first_step_ns > 0))


def stepped_again(ranks: Iterable[RankState], showing: Showing) -> set[int]:
    """Return the ranks that made steps again as their script did before; a rank that never showed steps only has to
    live."""
    silent = set(showing.silent)
    return {
        state.rank
        for state in ranks
        if (state.alive and state.rank in silent)
        or has_stepped(
            attached=state.attached,
            finished=state.over,
            entered=state.entered_ns > 0,
            first_step=state.first_step_ns > 0,
            optimizer_steps=state.optimizer_steps,
            reports=state.reports,
            kind=showing.kind,
        )
    }


def showing_of(seen: Iterable[tuple[int, bool, int]], known: Showing) -> Showing:
    """Return how a script shows its steps.

    Args:
        seen: For each rank: its number, whether it was in ``run.steps``, and how many steps it showed (loop bodies,
            reports or calls of the optimizer); -1: not known.
        known: The kind that was seen earlier. A less certain kind is ignored: the ranks may not have progressed so far.
    """
    ranks = list(seen)
    kind = "steps" if any(loop for _, loop, _ in ranks) else "calls" if any(steps > 0 for *_, steps in ranks) else ""
    if not kind or _ORDER[kind] < _ORDER.get(known.kind, len(_ORDER)):
        return known
    if max((steps for *_, steps in ranks), default=-1) >= RUNS_FREE_STEPS:
        silent = [rank for rank, loop, steps in ranks if not loop and steps == 0]
    else:
        silent = known.silent if kind == known.kind else []
    return Showing(kind=kind, silent=silent)


def confirm_bound_s(first_step_s: float, policy: RecoveryPolicy) -> float:
    """Return how many seconds ranks have from their launch to a first step.

    Args:
        first_step_s: The longest time to a first step before, seconds; 0: no start of this job reached a step.
        policy: The bounds.
    """
    if first_step_s <= 0:
        return max(policy.confirm.start_timeout_s, policy.confirm.timeout_s)
    return max(policy.confirm.factor * first_step_s, policy.confirm.timeout_s)


def judge_confirmation(
    generation: int,
    ranks: Sequence[RankState],
    *,
    world_size: int,
    showing: Showing,
    now_ns: int,
    policy: RecoveryPolicy,
    emptied: Sequence[str] = (),
    silent: Mapping[str, float] | None = None,
    whole_ns: int = 0,
    left_ns: Mapping[int, int] | None = None,
    known_alive: bool = False,
) -> Confirmation | None:
    """Judge a launch: confirmed, failed, running though not confirmed, or None while it is open.

    Args:
        generation: The generation that was launched.
        ranks: The ranks as the agents show them.
        world_size: Ranks at full width; fewer are never confirmed.
        showing: How the script showed its steps before.
        now_ns: The current time of the observer's clock.
        policy: How long a script that shows nothing must live to be taken to run.
        emptied: Machines that took part in the launch and have no memory of it: they and their ranks were lost.
        silent: Machines that are not waited for any more → seconds since anything was heard of them, or a step was
            completed by any rank.
        whole_ns: When all ranks were seen first, by the same clock as ``now_ns``; 0: not yet.
        left_ns: Rank → when it was seen to have left with code 0, by the same clock.
        known_alive: The generation is known to live: wait for its steps.
    """
    stepped = stepped_again(ranks, showing)
    since_ns = min((seen_ns for rank, seen_ns in (left_ns or {}).items() if rank not in stepped), default=now_ns)
    in_loop = any(state.alive and state.entered_ns and not state.over for state in ranks)
    waited = now_ns - since_ns > follow_s(policy, others_in_loop=in_loop) * 1e9
    waiting = [state for state in ranks if state.rank not in stepped]
    if failed := _why_failed(waiting, ranks, emptied, silent or {}, waited=waited):
        return Confirmation(generation=generation, ok=False, reason=failed, emptied=list(emptied))
    if len(ranks) < world_size:
        return None
    every = f"all {world_size} ranks"
    if len(stepped) == len(ranks):
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"{every} completed a step",
            stepped_ns=max((state.first_step_ns for state in ranks), default=0) or now_ns,
            completed_steps=max((state.completed_steps for state in ranks), default=-1),
            parts=parts_of(ranks),
            showing=_shown_by(ranks, showing),
        )
    if not any(state.alive for state in ranks):
        # A script that was nearly done: it had no step left, and the end of the job follows at once.
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"{every} stepped or left with code 0",
            stepped_ns=now_ns,
            showing=_shown_by(ranks, showing),
        )
    # A rank that joined is going to show steps. For other ranks this is not known.
    expected = known_alive or showing.kind != "" or any(state.attached or not state.alive for state in ranks)
    lived_s = (now_ns - whole_ns) / 1e9 if whole_ns else 0.0
    if not expected and lived_s > policy.confirm.alive_s:
        return _unconfirmed(generation, f"{every} live for {lived_s:.0f} s; no step was shown", now_ns)
    return None


def _why_failed(
    waiting: Sequence[RankState],
    ranks: Sequence[RankState],
    emptied: Sequence[str],
    silent: Mapping[str, float],
    *,
    waited: bool,
) -> str:
    """Return why the launch failed already; empty: it did not.

    Args:
        waiting: The ranks that have not stepped.
        ranks: All of them.
        emptied: Machines that lost their ranks.
        silent: Silent machines → seconds since their last answer.
        waited: Long enough for others to follow a rank that left with code 0.
    """
    if emptied:
        return f"{listed(emptied)} came back empty before the first step"
    if silent:
        verb = "says" if len(silent) == 1 else "say"
        return f"{listed(sorted(silent))} {verb} nothing for {min(silent.values()):.0f} s, and no rank completes a step"
    if ended := sorted(state.rank for state in waiting if not state.alive and state.code != 0):
        return f"rank {listed(ended)} ended before the first step"
    left = sorted(state.rank for state in waiting if not state.alive)
    if left and waited and any(state.alive for state in ranks):
        return f"rank {listed(left)} left with code 0 before the first step"
    return ""


def judge_timeout(
    generation: int,
    ranks: Sequence[RankState],
    *,
    world_size: int,
    showing: Showing,
    bound_s: float,
    now_ns: int,
) -> Confirmation:
    """Judge a launch whose time is up: a hang, or a script that may show no steps at all.

    Args:
        generation: The generation that was launched.
        ranks: What the agents showed of it.
        world_size: Ranks at full width.
        showing: How the script showed its steps before.
        bound_s: Seconds that the ranks had.
        now_ns: Time now.
    """
    shown = stepped_again(ranks, showing)
    waiting = [state for state in ranks if state.rank not in shown]
    silent = sorted(set(range(world_size)) - shown)
    within = f"within {bound_s:.0f} s"
    # A rank in the loop has a step to do. A rank that joined and is not in the loop may serve that step of other ranks.
    due = any(state.entered_ns > 0 for state in waiting) or (not shown and any(state.attached for state in waiting))
    if showing.kind or due or len(ranks) < world_size:
        return Confirmation(
            generation=generation,
            ok=False,
            timed_out=True,
            reason=f"rank {listed(silent)} completed no step {within}",
        )
    unconfirmed = _unconfirmed(generation, f"rank {listed(silent)} showed no step {within}", now_ns)
    return unconfirmed.model_copy(update={"showing": _shown_by(ranks, showing)})


def _unconfirmed(generation: int, reason: str, now_ns: int) -> Confirmation:
    return Confirmation(generation=generation, ok=True, confirmed=False, reason=reason, stepped_ns=now_ns)


def _shown_by(ranks: Iterable[RankState], known: Showing) -> Showing:
    return showing_of(((state.rank, state.entered_ns > 0, state.shown) for state in ranks), known)


def parts_of(ranks: Sequence[RankState]) -> dict[str, float]:
    """Return the time from fork to first step by part, in seconds; at each milestone the slowest rank counts."""
    marks = [
        ("start", max((rank.script_ns for rank in ranks), default=0)),
        ("import", max((rank.joined_ns for rank in ranks), default=0)),
        ("rendezvous", max((rank.entered_ns for rank in ranks), default=0)),
        ("restore", max((rank.restored_ns for rank in ranks), default=0)),
        ("next step", max((rank.first_step_ns for rank in ranks), default=0)),
    ]
    before = max((rank.forked_ns for rank in ranks), default=0)
    parts: dict[str, float] = {}
    for name, at in marks:
        if before and at:
            parts[name] = round(max(at - before, 0) / 1e9, 4)
            before = max(at, before)
    return parts
