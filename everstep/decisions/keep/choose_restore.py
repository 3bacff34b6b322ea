"""Chooses the step from which a job resumes, and the copies that have to be brought to its machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.errors import CheckpointError
from everstep.model.machine import Assignment
from everstep.model.state_copy import CopyToRestore, StateCopy, Tier
from everstep.model.topology import Topology
from everstep.slots.format import NEVER_USED


def readers(
    copies: Iterable[CopyToRestore], digests: Mapping[int, str], topology: Topology, *, disk_shared: bool = False
) -> dict[int, int]:
    """Return rank → the rank that reads the same tensors for it from shared storage.

    Ranks of a data-parallel group have equal tensors. So one rank of the group reads them from storage that all
    machines share, and the other ranks get the tensors from that rank (MegaScale). Tensors with equal digests are
    equal. A rank without a digest reads for itself. The result leaves out ranks that read for themselves.

    Args:
        copies: The copies to restore.
        digests: Rank → digest of its copy's tensors.
        topology: The topology of the job.
        disk_shared: All machines share the folder of disk checkpoints; False: each machine reads its own disk.
    """
    shared = {Tier.REMOTE, Tier.DISK} if disk_shared else {Tier.REMOTE}
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for copy in copies:
        digest = digests.get(copy.rank, "")
        if copy.tier in shared and digest:
            first = topology.first_along(copy.rank, topology.data_axes)
            alike[first, copy.tier, copy.completed_steps, digest].append(copy.rank)
    return {rank: first for ranks in alike.values() for first in [min(ranks)] for rank in ranks if rank != first}


NOTHING_HELD = -1
"""The step of a restart if no rank has a checkpoint: the script restores by itself, or starts from nothing."""

MEMORY = (Tier.OWN, Tier.BACKUP)
TIERS = {tier: position for position, tier in enumerate(Tier)}
"""Tier → its position in the order in which a restore prefers tiers."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The step from which a job resumes, with its copies and the reason."""

    step: int
    """The completed steps of the state to restore; 0: from the beginning; -1: no rank has a checkpoint."""
    reason: str
    copies: tuple[CopyToRestore, ...] = ()
    """The copies that have to be brought to their ranks' machines first, in order of ranks."""
    unverified: tuple[CopyToRestore, ...] = ()
    """Own slots that are already on the right machine, and whose contents were not compared with their checksums yet.
    They are verified before the launch, since ranks that resume overwrite other copies that could be chosen instead."""
    largest: int = 0
    """The size of the largest copy of the step, bytes; 0: not known."""
    folder: str = ""
    """The disk checkpoint that the ranks read by themselves, saved with any parallel sizes; empty: none."""

    @property
    def origin(self) -> str:
        """The origin of a restart, as text for people: ``from step 20``."""
        if self.folder:
            return f"from {self.folder}"
        return f"from step {self.step}" if self.step >= 0 else "from the script's own checkpoint"


def choose_restore(
    held: Iterable[StateCopy],
    assignment: Assignment[str],
    *,
    held_before: bool = False,
    at: int | None = None,
) -> Restore:
    """Choose the latest step that every rank can restore from any tier, and the nearest copy for each rank.

    ByteRobust resumes from the latest complete checkpoint, and does not state how ranks agree on it (section 6.3).

    Args:
        held: The copies of the job's own line (:mod:`everstep.decisions.keep.lineage`), also damaged ones, in any
            order.
        assignment: The machines, by name, that will run the job's ranks.
        held_before: The job has had checkpoints before: if there are none now, they are lost.
        at: The step to restore, if a person asked for one; None: the latest step.

    Raises:
        CheckpointError: Not every rank can restore step ``at``; the message names the steps that exist.
    """
    everything = sorted(held, key=_order)
    copies = nearest(everything, assignment)
    world_size = assignment.topology.world_size
    common = [step for step, ranks in copies.items() if len(ranks) == world_size]
    note = _damaged(everything)
    if at == 0:
        return Restore(0, "from the beginning, as requested")
    if at is not None:
        if at not in common:
            other = _of_other_runs(at, everything, copies)
            raise CheckpointError(_not_restorable(at, copies, common, world_size) + other + note)
        common = [at]
    if common:
        step = max(common)
        chosen = copies[step]
        wanted = "was requested, and" if at is not None else "is the latest step that"
        reason = f"step {step} {wanted} all {world_size} ranks can restore: {_sources(chosen, assignment)}"
        if at is None:
            reason += _cost(step, copies, chosen, world_size)
        in_order = [copy for _, copy in sorted(chosen.items())]
        move = tuple(copy_of(copy) for copy in in_order if not _in_place(copy, assignment))
        check = tuple(copy_of(copy) for copy in in_order if not copy.verified and _in_place(copy, assignment))
        return Restore(step, reason + note, move, check, max(copy.bytes for copy in in_order))
    if not everything and held_before:
        return Restore(0, "the checkpoints that the job had are lost")
    if not everything:
        return Restore(NOTHING_HELD, "no rank has a checkpoint")
    best = max(copies, key=lambda step: (len(copies[step]), step), default=None)
    if best is None:
        return Restore(0, f"no valid checkpoint{note}")
    missing = sorted(set(range(world_size)) - copies[best].keys())
    return Restore(0, f"no step has a copy of every rank: step {best} lacks rank {listed(missing)}{note}")


def nearest(held: Iterable[StateCopy], assignment: Assignment[str]) -> dict[int, dict[int, StateCopy]]:
    """Return step → rank → the valid copy that a restore would use; arguments as for :func:`choose_restore`.

    The order of preference is the rank's own memory on its machine, other memory, disk, remote storage. Among copies of
    equal preference, the copy on the rank's machine is used. All copies of a step are of one run: the run that has the
    step for most ranks, and among equal runs the latest.
    """
    by_step: dict[int, dict[str, dict[int, StateCopy]]] = defaultdict(lambda: defaultdict(dict))
    world_size = assignment.topology.world_size
    for copy in held:
        usable = copy.valid and copy.tier.known
        if not usable or not 0 <= copy.rank < world_size or copy.completed_steps < 1:
            continue
        ranks = by_step[copy.completed_steps][copy.run]
        before = ranks.get(copy.rank)
        if before is None or _preference(copy, assignment) < _preference(before, assignment):
            ranks[copy.rank] = copy
    return {step: max(runs.items(), key=lambda run: (len(run[1]), run[0]))[1] for step, runs in by_step.items()}


def _order(copy: StateCopy) -> tuple[int, int, str, str, str]:
    return copy.rank, copy.completed_steps, copy.tier, copy.machine, copy.reason


def _preference(copy: StateCopy, assignment: Assignment[str]) -> tuple[int, bool, int, str]:
    at_home = copy.machine == assignment.home(copy.rank)
    tier = TIERS[copy.tier]
    depth = 0 if copy.tier == Tier.OWN and at_home else 1 if copy.tier in MEMORY else tier
    return depth, not at_home, tier, copy.machine


def _in_place(copy: StateCopy, assignment: Assignment[str]) -> bool:
    """Return whether a copy is in its rank's own slots on the machine that will run the rank."""
    return copy.tier == Tier.OWN and copy.machine == assignment.home(copy.rank)


def copy_of(held: StateCopy) -> CopyToRestore:
    """Return the identity of a copy."""
    return CopyToRestore(
        rank=held.rank,
        completed_steps=held.completed_steps,
        tier=held.tier,
        machine=held.machine,
        saved_ns=held.saved_ns,
    )


def _sources(chosen: Mapping[int, StateCopy], assignment: Assignment[str]) -> str:
    """Return the sources of the copies as text, e.g. ``4 from their own memory, 4 from backups (m0, m3)``."""
    by_source: dict[tuple[Tier, bool], list[StateCopy]] = defaultdict(list)
    for _, copy in sorted(chosen.items()):
        by_source[copy.tier, _in_place(copy, assignment)].append(copy)
    names = {
        (Tier.OWN, True): "their own memory",
        (Tier.OWN, False): "memory elsewhere",
        (Tier.BACKUP, False): "backups",
        (Tier.DISK, False): "disk",
        (Tier.REMOTE, False): "remote storage",
    }
    parts = []
    for source, name in names.items():
        if copies := by_source.get(source):
            machines = sorted({copy.machine for copy in copies})
            shown = "" if source[1] or source[0] == Tier.REMOTE else f" ({listed(machines)})"
            count = f"all {len(copies)}" if len(copies) == len(chosen) > 1 else str(len(copies))
            parts.append(f"{count} from {name}{shown}")
    return ", ".join(parts)


def _cost(
    step: int, copies: Mapping[int, Mapping[int, StateCopy]], chosen: Mapping[int, StateCopy], world_size: int
) -> str:
    """Return why memory is not enough, and how much older the step is than the newest copy; empty: memory is enough."""
    if all(copy.tier in MEMORY for copy in chosen.values()):
        return ""
    newest = max(copies)
    in_memory = {s: {rank for rank, copy in ranks.items() if copy.tier in MEMORY} for s, ranks in copies.items()}
    lost_ranks = sorted(set(range(world_size)) - set().union(*in_memory.values()))
    if len(lost_ranks) == world_size:
        why = "no rank's memory is left"
    elif lost_ranks:
        ranks = "rank" if len(lost_ranks) == 1 else "ranks"
        why = f"owner and peer of {ranks} {listed(lost_ranks)} were lost together"
    else:
        best = max(in_memory, key=lambda s: (len(in_memory[s]), s))
        why = f"memory lacks rank {listed(sorted(set(range(world_size)) - in_memory[best]))} at step {best}"
    lost = newest - step
    older = f"{lost} step{'' if lost == 1 else 's'} older than the newest copy (step {newest})" if lost else "not older"
    return f"; {older}: {why}"


def _not_restorable(
    at: int, copies: Mapping[int, Mapping[int, StateCopy]], common: Sequence[int], world_size: int
) -> str:
    steps = listed(sorted(common, reverse=True))
    exist = f"there are steps {steps}" if common else "no step can be restored by all of them"
    missing = sorted(set(range(world_size)) - copies.get(at, {}).keys())
    some = f"rank {listed(missing)} lacks it" if len(missing) == 1 else f"ranks {listed(missing)} lack it"
    lacks = "no rank has it" if len(missing) == world_size else some
    return f"step {at} cannot be restored by all {world_size} ranks: {lacks}; {exist}"


def _of_other_runs(at: int, everything: Sequence[StateCopy], copies: Mapping[int, Mapping[int, StateCopy]]) -> str:
    """Describe the ranks that have a step only from another run of the job's name; empty: there are none."""
    valid = {copy.rank: copy for copy in everything if copy.valid and copy.completed_steps == at}
    others = [copy for rank, copy in sorted(valid.items()) if rank not in copies.get(at, {})]
    if not others:
        return ""
    ranks = listed([f"rank {copy.rank} on {copy.machine}" for copy in others])
    return f"; {ranks} has it only of another run of that name"


def _damaged(everything: Sequence[StateCopy]) -> str:
    """Return a few damaged copies, and locations that could not be listed, as text."""
    damaged = [copy for copy in everything if not copy.valid and copy.reason != NEVER_USED and not copy.unlisted]
    texts = []
    for copy in damaged[:3]:
        tier = "" if copy.tier == Tier.OWN else f" ({copy.tier})"
        texts.append(f"; rank {copy.rank} on {copy.machine}{tier}: {copy.reason}")
    return "".join([*texts, *(f"; {copy.reason}" for copy in everything if copy.unlisted)][:4])
