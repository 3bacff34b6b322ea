"""What one rank's machine showed of it last, as the watcher's rules take it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agent.v1 import agent_pb2 as pb
from everstep.decisions.checkpoints.align_backups import FREE as EACH_ALONE
from everstep.decisions.checkpoints.common_disk_step import StepsOnDisk
from everstep.decisions.checkpoints.disk_schedule import DiskProgress
from everstep.decisions.recover.confirm import has_stepped


def has_left_loop(rank: pb.RankProgress) -> bool:
    """Whether its training loop is over, at its end or by ``break``: what the rank does now are no steps."""
    return rank.finished or rank.milestones.loop_left > 0


@dataclass(frozen=True, slots=True)
class Shown:
    """What a machine showed of one of its ranks last."""

    machine: str
    now_ns: int
    """Clock of the machine."""
    heard_ns: int
    """Clock of the watcher."""
    rank: pb.RankProgress
    stored: StepsOnDisk
    """What it has on disk; one object for all ranks of a machine that have the same."""

    def ago_ns(self, age_s: float, at_ns: int) -> int:
        """When something was, by the clock of the watcher.

        Args:
            age_s: How long ago that is, as the agent says; 0: it does not.
            at_ns: When it was, by the machine's clock; 0: never.
        """
        told_ns = round(age_s * 1e9) or max(self.now_ns - at_ns, 0)
        return self.heard_ns - told_ns if at_ns else 0

    @property
    def steps(self) -> int:
        """Completed steps, or reports or calls of the optimizer where the script does not count steps."""
        return max(self.rank.completed_steps, self.rank.optimizer_steps, self.rank.reports)

    @property
    def stepped(self) -> bool:
        """Whether the process completed a step, as far as it shows any."""
        rank = self.rank
        return has_stepped(
            attached=rank.attached,
            finished=has_left_loop(rank),
            entered=rank.milestones.loop_entered > 0,
            first_step=rank.milestones.first_step > 0,
            optimizer_steps=rank.optimizer_steps,
            reports=rank.reports,
        )


def distinct(shown: Iterable[Shown]) -> list[StepsOnDisk]:
    """What ranks have on disk, each object once: a few for thousands of ranks."""
    return list({id(one.stored): one.stored for one in shown}.values())


def stored(saved: pb.SavedState) -> StepsOnDisk:
    """What a rank's machine says of its disk; an agent of an older version names the newest step only."""
    steps = saved.disk_steps or ([saved.disk_step] if saved.disk_step > 0 else [])
    return StepsOnDisk(frozenset(steps), saved.disk_passed, saved.disk_kept, saved.disk_settled)


def on_disk(shown: Shown, now_ns: int) -> DiskProgress:
    """The same with ages, as they are now; an agent of an older version says no age, but its clock does."""
    saved = shown.rank.saved
    since_s = max(now_ns - shown.heard_ns, 0) / 1e9
    age_s = saved.disk_age_s if saved.disk_steps else (shown.now_ns - saved.disk_ns) / 1e9
    return DiskProgress(
        rank=shown.rank.rank,
        completed_steps=shown.rank.completed_steps,
        disk_step=saved.disk_step,
        disk_age_s=max(age_s, 0.0) + since_s if saved.disk_step >= 0 else 0.0,
        lived_s=max((shown.now_ns - shown.rank.milestones.forked) / 1e9, 0.0) + since_s,
        wanted=saved.disk_wanted,
    )


def kept_elsewhere(saved: pb.SavedState) -> int:
    """The newest step that a rank's peer has; a rank without one is never behind with it, unless a step is named."""
    return saved.own_step if saved.backup_none and saved.backup_named == EACH_ALONE else saved.backup_step
