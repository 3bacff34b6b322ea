"""The choice of the step from which a job resumes, and of the copies that have to be brought for it."""

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
    """Rank → the rank that reads its tensors from the storage for it; ranks that read for themselves are left out.

    Ranks of a data-parallel group hold equal tensors, so that storage which all machines share need not send them once
    for each: one rank of the group reads, and the other ranks get the tensors from that rank (MegaScale). Tensors with
    equal digests are equal; a rank without a digest reads for itself.

    Args:
        copies: The copies to restore.
        digests: Rank → digest of its copy's tensors.
        topology: The topology of the job.
        disk_shared: The folder of disk checkpoints is shared too; else each machine reads its own disk.
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
"""No rank holds a checkpoint: the script starts as it does by itself."""

MEMORY = (Tier.OWN, Tier.BACKUP)
TIERS = {tier: place for place, tier in enumerate(Tier)}
"""Place of each in the order in which a restore prefers them."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The agreed step and why."""

    step: int
    """Completed steps of the state to restore; 0: from the beginning; -1: nothing is held."""
    reason: str
    copies: tuple[CopyToRestore, ...] = ()
    """Copies that have to be brought to the machines first, in order of ranks: all copies outside a
    rank's own slots."""
    unverified: tuple[CopyToRestore, ...] = ()
    """Own slots that are already on the right machine, and whose contents were not compared with their checksums yet.
    That is done before a launch, because ranks that resume overwrite the remaining choices."""
    largest: int = 0
    """Bytes of the largest of the copies, of any rank; 0: not known."""
    folder: str = ""
    """Checkpoint on disk that the ranks read by themselves, saved with any parallel sizes; empty: none."""

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
    """Pick the latest step that every rank can restore from any tier, and for each rank the nearest copy.

    ByteRobust takes the latest checkpoint that completed and does not say how
    ranks agree on it (section 6.3); the common step is our rule.

    Args:
        held: What the machines hold, damaged copies included, in any order; of the job's own line of steps only
            (:mod:`everstep.decisions.keep.lineage`).
        assignment: Which machines, by name, are going to run the job's ranks.
        held_before: The job has restored such a checkpoint before, so that holding none means that they are lost.
        at: Exactly this step: a rollback on purpose.

    Raises:
        CheckpointError: not every rank can restore step ``at``; says which steps exist.
    """
    everything = sorted(held, key=_order)
    copies = nearest(everything, assignment)
    world_size = assignment.topology.world_size
    common = [step for step, ranks in copies.items() if len(ranks) == world_size]
    note = _damaged(everything)
    if at == 0:
        return Restore(0, "from the beginning, as asked")
    if at is not None:
        if at not in common:
            other = _of_other_runs(at, everything, copies)
            raise CheckpointError(_not_there(at, copies, common, world_size) + other + note)
        common = [at]
    if common:
        step = max(common)
        chosen = copies[step]
        wanted = "is the one asked for, which" if at is not None else "is the latest that"
        reason = f"step {step} {wanted} all {world_size} ranks can restore: {_sources(chosen, assignment)}"
        if at is None:
            reason += _cost(step, copies, chosen, world_size)
        move = _to_move(chosen, assignment)
        check = tuple(
            copy_of(copy) for _, copy in sorted(chosen.items()) if not copy.verified and _in_place(copy, assignment)
        )
        largest = max(copy.bytes for copy in chosen.values())
        return Restore(step, reason + note, move, check, largest)
    if not everything:
        return _nothing(held_before)
    best = max(copies, key=lambda step: (len(copies[step]), step), default=None)
    if best is None:
        return Restore(0, f"no valid checkpoint{note}")
    missing = sorted(set(range(world_size)) - copies[best].keys())
    return Restore(0, f"no step is held by all ranks: step {best} lacks rank {listed(missing)}{note}")


def nearest(held: Iterable[StateCopy], assignment: Assignment[str]) -> dict[int, dict[int, StateCopy]]:
    """Return step → rank → the valid copy that a restore would use; arguments as for :func:`choose_restore`.

    A rank's own memory on its machine comes first, then other memory, disk and remote storage; among equal copies the
    copy on the rank's machine comes first. All copies of a step belong to one run: the run that has the step for most
    ranks; among equal runs the latest.
    """
    found: dict[int, dict[str, dict[int, StateCopy]]] = defaultdict(lambda: defaultdict(dict))
    world_size = assignment.topology.world_size
    for copy in held:
        usable = copy.valid and copy.tier.known
        if not usable or not 0 <= copy.rank < world_size or copy.completed_steps < 1:
            continue
        ranks = found[copy.completed_steps][copy.run]
        before = ranks.get(copy.rank)
        if before is None or _preference(copy, assignment) < _preference(before, assignment):
            ranks[copy.rank] = copy
    return {step: max(runs.items(), key=lambda run: (len(run[1]), run[0]))[1] for step, runs in found.items()}


def _order(copy: StateCopy) -> tuple[int, int, str, str, str]:
    return copy.rank, copy.completed_steps, copy.tier, copy.machine, copy.reason


def _preference(copy: StateCopy, assignment: Assignment[str]) -> tuple[int, bool, int, str]:
    here = copy.machine == assignment.home(copy.rank)
    tier = TIERS[copy.tier]
    depth = 0 if copy.tier == Tier.OWN and here else 1 if copy.tier in MEMORY else tier
    return depth, not here, tier, copy.machine


def _to_move(chosen: Mapping[int, StateCopy], assignment: Assignment[str]) -> tuple[CopyToRestore, ...]:
    return tuple(copy_of(copy) for _, copy in sorted(chosen.items()) if not _in_place(copy, assignment))


def _in_place(copy: StateCopy, assignment: Assignment[str]) -> bool:
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
    """``4 from their own memory, 4 from backups (m0, m3)``."""
    by_tier: dict[str, list[StateCopy]] = defaultdict(list)
    for rank, copy in sorted(chosen.items()):
        at_home = copy.machine == assignment.home(rank)
        by_tier[Tier.OWN if copy.tier == Tier.OWN and at_home else f"{copy.tier} "].append(copy)
    names = {
        Tier.OWN: "their own memory",
        f"{Tier.OWN} ": "memory elsewhere",
        f"{Tier.BACKUP} ": "backups",
        f"{Tier.DISK} ": "disk",
        f"{Tier.REMOTE} ": "remote storage",
    }
    parts = []
    for kind, name in names.items():
        if copies := by_tier.get(kind):
            where = dict.fromkeys(copy.machine for copy in copies)
            shown = "" if kind in {Tier.OWN, f"{Tier.REMOTE} "} else f" ({listed(sorted(where))})"
            count = f"all {len(copies)}" if len(copies) == len(chosen) > 1 else str(len(copies))
            parts.append(f"{count} from {name}{shown}")
    return ", ".join(parts)


def _cost(
    step: int, copies: Mapping[int, Mapping[int, StateCopy]], chosen: Mapping[int, StateCopy], world_size: int
) -> str:
    """Describe the loss of a tier below memory against the newest copy of any rank, and why memory is not enough."""
    if all(copy.tier in MEMORY for copy in chosen.values()):
        return ""
    newest = max(copies)
    in_memory = {s: {rank for rank, copy in ranks.items() if copy.tier in MEMORY} for s, ranks in copies.items()}
    gone = sorted(set(range(world_size)) - set().union(*in_memory.values()))
    if len(gone) == world_size:
        why = "no rank's memory is left"
    elif gone:
        ranks = "rank" if len(gone) == 1 else "ranks"
        why = f"owner and peer of {ranks} {listed(gone)} were lost together"
    else:
        best = max(in_memory, key=lambda s: (len(in_memory[s]), s))
        why = f"memory lacks rank {listed(sorted(set(range(world_size)) - in_memory[best]))} at step {best}"
    lost = newest - step
    older = f"{lost} step{'' if lost == 1 else 's'} older than the newest copy (step {newest})" if lost else "no older"
    return f"; {older}: {why}"


def _not_there(at: int, copies: Mapping[int, Mapping[int, StateCopy]], common: Sequence[int], world_size: int) -> str:
    steps = listed(sorted(common, reverse=True))
    exist = f"there are steps {steps}" if common else "no step can be restored by all of them"
    missing = sorted(set(range(world_size)) - copies.get(at, {}).keys())
    who = f"rank {listed(missing)} lacks it" if len(missing) == 1 else f"ranks {listed(missing)} lack it"
    lacks = "no rank has it" if len(missing) == world_size else who
    return f"step {at} cannot be restored by all {world_size} ranks: {lacks}; {exist}"


def _of_other_runs(at: int, everything: Sequence[StateCopy], copies: Mapping[int, Mapping[int, StateCopy]]) -> str:
    """Names ranks that have a step, but of another run of the job's name than the rest."""
    there = {copy.rank: copy for copy in everything if copy.valid and copy.completed_steps == at}
    others = [copy for rank, copy in sorted(there.items()) if rank not in copies.get(at, {})]
    if not others:
        return ""
    where = listed([f"rank {copy.rank} on {copy.machine}" for copy in others])
    return f"; an earlier run of that name left it to {where}, which does not go with the others"


def _nothing(held_before: bool) -> Restore:
    if held_before:
        return Restore(0, "the checkpoints that the job had are gone")
    return Restore(NOTHING_HELD, "no rank holds a checkpoint")


def _damaged(everything: Sequence[StateCopy]) -> str:
    damaged = [copy for copy in everything if not copy.valid and copy.reason != NEVER_USED and not copy.unlisted]
    texts = [f"; rank {copy.rank} on {copy.machine}{_in(copy)}: {copy.reason}" for copy in damaged[:3]]
    return "".join([*texts, *(f"; {copy.reason}" for copy in everything if copy.unlisted)][:4])


def _in(copy: StateCopy) -> str:
    return "" if copy.tier == Tier.OWN else f" ({copy.tier})"
