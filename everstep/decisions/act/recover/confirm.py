"""Confirms that the ranks of a launched generation make steps.

A script shows its steps as bodies of ``run.steps``, or else as reports or calls of the optimizer. A restart is
confirmed by the kind of steps that the script showed before. A script that has shown no steps yet counts as running,
but not as confirmed, once its ranks have lived for a while (ADR 0020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.decisions.detect.rank_ends import follow_s
from everstep.decisions.detect.step_watch import RUNS_FREE_STEPS
from everstep.model.launch import Confirmation, Showing
from everstep.model.ranks import NO_RANKS, Ranks
from everstep.model.recovery_policy import RecoveryPolicy

_ORDER = {"": 0, "calls": 1, "steps": 2}
"""Kind in which a script shows its steps → how certain it is. A kind that only a later release knows is the most
certain."""


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
    """Return whether a process completed a step, as far as it shows steps.

    Args:
        attached: The process joined.
        finished: The process ran its loop to the end, or left it.
        entered: The process is within ``run.steps``.
        first_step: The process completed a body of its loop, or called an optimizer before it joined.
        optimizer_steps: Calls of the optimizer.
        reports: Calls of ``run.report``.
        kind: The kind of the job's ``Showing``: with ``steps``, only loop bodies count.
    """
    if finished or first_step:
        return True
    if entered or kind == "steps":
        return False
    # A script that joined may call the optimizer once before its loop, to create the state that it then restores.
    return reports > 0 or optimizer_steps > (1 if attached else 0)


@dataclass(frozen=True, slots=True)
class RankState:
    """The progress of one rank of the generation. Times are nanoseconds of the wall clock; 0: not yet."""

    rank: int
    alive: bool
    attached: bool
    finished: bool
    completed_steps: int
    optimizer_steps: int
    code: int | None = None
    """The exit code; None while the process lives, or if it ended without one."""
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
        """Return whether the rank has no step left to do: it left its loop without an error."""
        return self.finished or (self.left_ns > 0 and (self.alive or self.code == 0))

    @property
    def shown(self) -> int:
        """Return the number of steps that this process showed: reports, calls of the optimizer, or the first step."""
        return max(self.optimizer_steps, self.reports, int(self.first_step_ns > 0))


def stepped_again(ranks: Iterable[RankState], showing: Showing) -> set[int]:
    """Return the ranks that made a step since their launch. A rank that never shows steps only has to live."""
    silent = {*showing.silent}
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


def showing_of(seen: Iterable[tuple[Ranks, bool, int]], before: Showing) -> Showing:
    """Return how a script shows its steps.

    Args:
        seen: Ranks that are alike: whether they were in ``run.steps``, and how many steps they showed (loop bodies,
            reports or calls of the optimizer); -1: not known.
        before: The earlier result. A less certain kind does not replace it, since the ranks may not have progressed far
            enough to show the more certain kind.
    """
    groups = list(seen)
    kind = "steps" if any(loop for _, loop, _ in groups) else "calls" if any(steps > 0 for *_, steps in groups) else ""
    if not kind or _ORDER[kind] < _ORDER.get(before.kind, len(_ORDER)):
        return before
    silent = NO_RANKS
    if max((steps for *_, steps in groups), default=-1) >= RUNS_FREE_STEPS:
        for ranks in (ranks for ranks, loop, steps in groups if not loop and steps == 0):
            silent |= ranks
    elif kind == before.kind:
        silent = before.silent
    return Showing(kind=kind, silent=silent)


def confirm_bound_s(first_step_s: float, policy: RecoveryPolicy) -> float:
    """Return how many seconds ranks have from their launch to a first step.

    Args:
        first_step_s: The longest time to a first step so far, seconds; 0: no launch of this job reached a step.
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
    all_seen_ns: int = 0,
    left_ns: Mapping[int, int] | None = None,
    known_alive: bool = False,
) -> Confirmation | None:
    """Judge a launch: it is confirmed, it failed, or it runs without confirmation; None: this is still open.

    Args:
        generation: The generation that was launched.
        ranks: The ranks as the agents show them.
        world_size: The number of ranks of the job; a launch of fewer ranks is never confirmed.
        showing: How the script showed its steps before.
        now_ns: The current time of the observer's clock.
        policy: The policy with ``confirm.alive_s``: how long ranks that show no steps must live to count as running.
        emptied: Machines that took part in the launch and lost their memory, and so their ranks.
        silent: Machines that are not waited for any more → seconds since they answered, or since any rank completed a
            step.
        all_seen_ns: When all ranks were first seen, by the same clock as ``now_ns``; 0: not yet.
        left_ns: Rank → when it was seen to have left with code 0, by the same clock.
        known_alive: The ranks of the generation are known to be alive: the launch is open until they step.
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
    all_ranks = f"all {world_size} ranks"
    if len(stepped) == len(ranks):
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"{all_ranks} completed a step",
            stepped_ns=max((state.first_step_ns for state in ranks), default=0) or now_ns,
            completed_steps=max((state.completed_steps for state in ranks), default=-1),
            parts=parts_of(ranks),
            showing=_shown_by(ranks, showing),
        )
    if not any(state.alive for state in ranks):
        # The script had no step left to do, and the job ends at once.
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"{all_ranks} stepped or left with code 0",
            stepped_ns=now_ns,
            showing=_shown_by(ranks, showing),
        )
    # A rank that joined will show steps. Whether other ranks will show steps is not known.
    expected = known_alive or showing.kind != "" or any(state.attached or not state.alive for state in ranks)
    lived_s = (now_ns - all_seen_ns) / 1e9 if all_seen_ns else 0.0
    if not expected and lived_s > policy.confirm.alive_s:
        return _unconfirmed(generation, f"{all_ranks} live for {lived_s:.0f} s; no step was shown", now_ns)
    return None


def _why_failed(
    waiting: Sequence[RankState],
    ranks: Sequence[RankState],
    emptied: Sequence[str],
    silent: Mapping[str, float],
    *,
    waited: bool,
) -> str:
    """Return why the launch has failed; empty: it has not failed.

    Args:
        waiting: The ranks that have not stepped.
        ranks: All ranks.
        emptied: Machines that lost their ranks.
        silent: Silent machines → seconds since their last answer.
        waited: The other ranks had enough time to follow a rank that left with code 0.
    """
    if emptied:
        return f"{listed(emptied)} lost its ranks before the first step"
    if silent:
        names, seconds = listed(sorted(silent)), min(silent.values())
        return f"no answer of {names} for {seconds:.0f} s, and no rank completes a step"
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
    """Judge a launch that was not confirmed in time: it hangs, or its script may never show steps.

    Args:
        generation: The generation that was launched.
        ranks: The ranks as the agents show them.
        world_size: The number of ranks of the job.
        showing: How the script showed its steps before.
        bound_s: The time that the ranks had, seconds.
        now_ns: The current time.
    """
    shown = stepped_again(ranks, showing)
    waiting = [state for state in ranks if state.rank not in shown]
    silent = sorted(set(range(world_size)) - shown)
    within = f"within {bound_s:.0f} s"
    # A rank in its loop has a step to do. A rank that joined and is not in a loop may only serve the steps of others.
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


def _shown_by(ranks: Iterable[RankState], before: Showing) -> Showing:
    alike: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for state in ranks:
        alike[state.entered_ns > 0, state.shown].append(state.rank)
    return showing_of(((Ranks.of(own), *how) for how, own in alike.items()), before)


def parts_of(ranks: Sequence[RankState]) -> dict[str, float]:
    """Return the parts of the time from the fork to the first step, seconds. Each part ends with the slowest rank."""
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
