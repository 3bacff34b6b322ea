"""The rules of one job about when copies of its state go to disk and to peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from activities.watching.shown import Shown, distinct, kept_elsewhere, on_disk
from agent.reporting.paced_saves import paced
from everstep.decisions.keep.align_backups import Aligned, AlignRule, Backed
from everstep.decisions.keep.disk_schedule import Agreed, PersistRule, agree, newest_of_all
from everstep.decisions.keep.drift import DriftRule, RankPosition
from everstep.decisions.keep.save_pace import Paced, PaceOrder, order_pace
from everstep.model.job import JobSpec


@dataclass(slots=True)
class CopyRules:
    """The rules and their state, separate for each generation of the job.

    The argument ``shown`` of the methods has the latest views of the ranks of one generation.
    """

    spec: JobSpec
    _persist: dict[int, PersistRule] = field(default_factory=dict)
    _align: dict[int, AlignRule] = field(default_factory=dict)
    _drift: dict[int, DriftRule] = field(default_factory=dict)

    def forget_before(self, generation: int) -> None:
        """Drop the rules of all generations before a number."""
        for rules in (self._persist, self._align, self._drift):
            for old in [number for number in rules if number < generation]:
                del rules[old]

    def persist(self, generation: int, shown: Sequence[Shown], now_ns: int) -> int | None:
        """Return the step that all machines should now write to disk; None: no step."""
        rule = self._persist.get(generation)
        if rule is None:
            before = self._persist.get(max(self._persist, default=-1))
            rule = self._persist[generation] = before.next() if before else PersistRule(self.spec.checkpoint)
        living = _living(shown)
        if len(living) < self.spec.topology().world_size:
            return None  # the other ranks' disks are not known
        newest_on_all = newest_of_all(distinct(living))
        progress = [on_disk(shown_rank, now_ns) for shown_rank in living]
        return rule.observe(progress, newest_on_all, now_ns, distance=_distance(living))

    def on_disks(self, shown: Sequence[Shown]) -> Agreed:
        """Return which steps are on the disks of all machines."""
        if len(shown) < self.spec.topology().world_size:
            return Agreed()
        disks = distinct(shown)
        return agree(disks, len(disks))

    def align(self, generation: int, shown: Sequence[Shown], now_ns: int) -> Aligned | None:
        """Return which backups all machines should make; None: there is no change."""
        policy, living = self.spec.checkpoint, _living(shown)
        apart = self._apart(generation, living, now_ns)
        rule = self._align.setdefault(generation, AlignRule(self.spec.topology().world_size, policy.backup_every_steps))
        backed = [_backed(shown_rank) for shown_rank in living]
        return rule.observe(backed, now_ns, apart=apart, distance=_distance(living))

    def pace_saves(self, shown: Sequence[Shown]) -> PaceOrder | None:
        """Return the message about the pace of saves for all machines; None: there is no change."""
        policy, saves = self.spec.checkpoint, _paced(_living(shown))
        if policy.save_every_steps:
            return None
        return order_pace(saves, self.spec.topology().world_size, policy.most_distance)

    def _apart(self, generation: int, living: Sequence[Shown], now_ns: int) -> int:
        """Return by how many steps ranks drift apart; 0: their slots allow the distance."""
        standing = [
            RankPosition(
                rank=shown_rank.progress.rank,
                own_step=shown_rank.progress.saved.own_step,
                completed_steps=shown_rank.progress.completed_steps,
                heard_ns=shown_rank.heard_ns,
                newest_slots=shown_rank.progress.saved.newest_slots,
            )
            for shown_rank in living
        ]
        return self._drift.setdefault(generation, DriftRule(self.spec.checkpoint.slots)).observe(standing, now_ns)


def _living(shown: Sequence[Shown]) -> list[Shown]:
    return [shown_rank for shown_rank in shown if shown_rank.progress.alive and shown_rank.progress.HasField("saved")]


def _distance(shown: Sequence[Shown]) -> int:
    """Return the largest distance between saves that a rank has or is asked to have, in steps."""
    return max((rank.asked.every for rank in _paced(shown)), default=1)


def _paced(shown: Sequence[Shown]) -> list[Paced]:
    return [saves for shown_rank in shown if (saves := paced(shown_rank.progress))]


def _backed(shown: Shown) -> Backed:
    saved = shown.progress.saved
    return Backed(
        rank=shown.progress.rank,
        own_step=saved.own_step,
        backup_step=kept_elsewhere(saved),
        named=saved.backup_named,
        whole=saved.backup_whole,
        calm=saved.backup_calm,
        failing=saved.backup_problem != "",
        apart=saved.apart,
    )
