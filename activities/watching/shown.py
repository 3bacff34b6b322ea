"""The latest view of one rank, as its machine reported it, for the watcher's rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agent.v1 import agent_pb2 as pb
from everstep.decisions.act.recover.confirm import has_stepped
from everstep.decisions.detect.job_facts import RankFacts, RankPace, ReportedNumber
from everstep.decisions.keep.align_backups import NO_NAMED_STEP
from everstep.decisions.keep.disk_schedule import DiskProgress, StepsOnDisk


def has_left_loop(rank: pb.RankProgress) -> bool:
    """Return whether the rank has left its training loop, at its end or by ``break``; later activity is not a step."""
    return rank.finished or rank.milestones.loop_left > 0


@dataclass(slots=True)
class FirstShown:
    """The first view of a process; its steps are counted from this view."""

    completed_steps: int
    """The completed steps at the first view."""
    steps: int | None = None
    """The number of steps when the process was first seen to step; None: it has not stepped."""
    step_ns: int = 0
    """When the rank was first seen to have completed a step, by the watcher's clock; 0: not yet."""
    stopped_ns: int = 0
    """When the process was first seen to be stopped, by the watcher's clock; 0: it is not stopped."""
    continued_ns: int = 0
    """When the process continued after a stop; 0: never."""


class Shown:
    """The latest view of one rank.

    Args:
        machine: The name of the rank's machine.
        now_ns: The time on the machine's clock.
        heard_ns: The time on the watcher's clock.
        progress: The machine's report of the rank.
        stored: The steps on the machine's disk; one object for all ranks of a machine with equal steps.
        first: The first view of the same process; it is updated here.
        saved_before: The rank saved its state in this or an earlier generation.
    """

    __slots__ = ("facts", "heard_ns", "now_ns", "progress", "stored")

    def __init__(
        self,
        *,
        machine: str,
        now_ns: int,
        heard_ns: int,
        progress: pb.RankProgress,
        stored: StepsOnDisk,
        first: FirstShown,
        saved_before: bool,
    ) -> None:
        self.now_ns, self.heard_ns, self.progress, self.stored = now_ns, heard_ns, progress, stored
        milestones, left = progress.milestones, has_left_loop(progress)
        steps = max(progress.completed_steps, progress.optimizer_steps, progress.reports)
        stepped = has_stepped(
            attached=progress.attached,
            finished=left,
            entered=milestones.loop_entered > 0,
            first_step=milestones.first_step > 0,
            optimizer_steps=progress.optimizer_steps,
            reports=progress.reports,
        )
        if first.stopped_ns and not progress.stopped:
            first.continued_ns = heard_ns
        first.stopped_ns = (first.stopped_ns or heard_ns) if progress.stopped else 0
        if stepped and first.steps is None:
            first.steps = steps
        saved_step, saved_ns = self._saved(first, saved_before=saved_before)
        self.facts = RankFacts(
            rank=progress.rank,
            machine=machine,
            alive=progress.alive,
            completed_steps=progress.completed_steps,
            steps=steps,
            stepped=stepped,
            steps_since=steps - first.steps if stepped and first.steps is not None else 0,
            in_loop=milestones.loop_entered > 0 and not left,
            left_loop=left,
            saved_step=saved_step,
            saved_ns=saved_ns,
            first_step_ns=self._first_step_ns(first, milestones.first_step),
            heard_ns=heard_ns,
            stepped_ns=self._ago_ns(0.0, progress.stepped_ns),
            stopped_ns=first.stopped_ns,
            continued_ns=first.continued_ns,
            reported_step=progress.metrics.step if progress.HasField("metrics") else -1,
            loss=_number(progress.metrics.loss),
            grad_norm=_number(progress.metrics.grad_norm),
            pace=_pace(progress.metrics) if progress.metrics.step_s > 0 else None,
        )

    def _ago_ns(self, age_s: float, at_ns: int) -> int:
        """Return the time of an event on the watcher's clock.

        Args:
            age_s: The age of the event as the agent reports it, seconds; 0: it is not known.
            at_ns: The time of the event on the machine's clock; 0: it has not happened.
        """
        ago_ns = round(age_s * 1e9) or max(self.now_ns - at_ns, 0)
        return self.heard_ns - ago_ns if at_ns else 0

    def _saved(self, first: FirstShown, *, saved_before: bool) -> tuple[int | None, int]:
        """Return the step of the rank's newest save, and its time. A rank that saved only in an earlier generation
        counts from the step of its first view."""
        if not self.progress.HasField("saved"):
            return None, 0
        saved = self.progress.saved
        step = first.completed_steps if saved.own_step < 0 and saved_before else saved.own_step
        return step, self._ago_ns(saved.own_age_s, saved.own_ns)

    def _first_step_ns(self, first: FirstShown, at_ns: int) -> int:
        """Return when the process completed its first step, on the watcher's clock. This is never later than the time
        at which the step was first seen."""
        if not at_ns:
            return 0
        first.step_ns = first.step_ns or self.heard_ns
        return min(first.step_ns, self._ago_ns(0.0, at_ns))


def _number(series: pb.Series) -> ReportedNumber:
    return ReportedNumber(series.known, series.streak, series.since if series.streak else -1)


def _pace(metrics: pb.Metrics) -> RankPace:
    return RankPace(
        step_s=metrics.step_s,
        typical_step_s=metrics.typical_step_s,
        slow_since=metrics.slow_since,
        slow_comparisons=metrics.slow_looks,
        tokens_per_s=metrics.tokens_per_s,
        typical_tokens_per_s=metrics.typical_tokens_per_s,
    )


def distinct(shown: Iterable[Shown]) -> list[StepsOnDisk]:
    """Return the steps on disk of all ranks, each object once: thousands of ranks share a few objects."""
    return list({id(rank.stored): rank.stored for rank in shown}.values())


def stored(saved: pb.SavedState) -> StepsOnDisk:
    """Return the steps on the disk of a rank's machine."""
    return StepsOnDisk(frozenset(saved.disk_steps), saved.disk_passed, saved.disk_kept, saved.disk_settled)


def on_disk(shown: Shown, now_ns: int) -> DiskProgress:
    """Return the steps on the disk of a rank's machine, with ages as of now."""
    saved = shown.progress.saved
    since_s = max(now_ns - shown.heard_ns, 0) / 1e9
    return DiskProgress(
        rank=shown.progress.rank,
        completed_steps=shown.progress.completed_steps,
        disk_step=saved.disk_step,
        disk_age_s=max(saved.disk_age_s, 0.0) + since_s if saved.disk_step >= 0 else 0.0,
        lived_s=max((shown.now_ns - shown.progress.milestones.forked) / 1e9, 0.0) + since_s,
        wanted=saved.disk_wanted,
    )


def kept_elsewhere(saved: pb.SavedState) -> int:
    """Return the newest step of a rank that its peer keeps.

    A rank without a peer counts as up to date, unless a step is named.
    """
    return saved.own_step if saved.backup_none and saved.backup_named == NO_NAMED_STEP else saved.backup_step
