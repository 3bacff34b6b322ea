"""Chooses the step from which a job resumes, and the copies that have to be brought to its machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.errors import CheckpointError
from everstep.model.machine import Assignment
from everstep.model.places import Places
from everstep.model.ranks import NO_RANKS, Ranks, members, span_text, text_of
from everstep.model.state_copy import StateCopies, Tier, count_of
from everstep.model.topology import Topology
from everstep.slots.format import NEVER_USED


def readers(copies: Iterable[StateCopies], topology: Topology, *, disk_shared: bool = False) -> dict[int, int]:
    """Return rank → the rank that reads the same tensors for it from shared storage.

    Ranks of a data-parallel group have equal tensors. So one rank of the group reads them from storage that all
    machines share, and the other ranks get the tensors from that rank (MegaScale). A rank whose tensors are not known
    to be equal reads for itself. The result leaves out ranks that read for themselves.

    Args:
        copies: The copies to restore.
        topology: The topology of the job.
        disk_shared: All machines share the folder of disk checkpoints; False: each machine reads its own disk.
    """
    shared = {Tier.REMOTE, Tier.DISK} if disk_shared else {Tier.REMOTE}
    found: dict[int, int] = {}
    for entry in copies:
        alike: dict[int, list[int]] = defaultdict(list)
        for rank in entry.ranks & entry.alike if entry.tier in shared else ():
            alike[topology.first_along(rank, topology.data_axes)].append(rank)
        found |= {rank: ranks[0] for ranks in alike.values() for rank in ranks[1:]}
    return found


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
    copies: tuple[StateCopies, ...] = ()
    """The copies that have to be brought to their ranks' machines first."""
    unverified: tuple[StateCopies, ...] = ()
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


@dataclass(frozen=True, slots=True)
class ChosenCopies:
    """The copies of one step that a restore would use: at most one copy of each rank."""

    in_place: tuple[StateCopies, ...]
    """Copies in the ranks' own slots on the machines that will run them."""
    elsewhere: tuple[StateCopies, ...]
    """All other copies, the nearest first."""

    @property
    def all(self) -> tuple[StateCopies, ...]:
        """All copies."""
        return *self.in_place, *self.elsewhere


def choose_restore(
    held: Iterable[StateCopies],
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
    by_step = copies_by_step(everything, assignment)
    copies = {step: union(entries) for step, entries in by_step.items()}
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
        chosen = nearest(by_step[step], assignment)
        wanted = "was requested, and" if at is not None else "is the latest step that"
        reason = f"step {step} {wanted} all {world_size} ranks can restore: {_sources(chosen)}"
        if at is None:
            reason += _cost(step, by_step, chosen, world_size)
        check = tuple(entry for entry in chosen.in_place if not entry.verified)
        return Restore(step, reason + note, chosen.elsewhere, check, max(entry.bytes for entry in chosen.all))
    if not everything and held_before:
        return Restore(0, "the checkpoints that the job had are lost")
    if not everything:
        return Restore(NOTHING_HELD, "no rank has a checkpoint")
    best = max(copies, key=lambda step: (len(copies[step]), step), default=None)
    if best is None:
        return Restore(0, f"no valid checkpoint{note}")
    missing = all_ranks(assignment) - copies[best]
    return Restore(0, f"no step has a copy of every rank: step {best} lacks rank {_named(missing)}{note}")


def all_ranks(assignment: Assignment[str]) -> Ranks:
    """Return all ranks of a job."""
    return Ranks.of_spans([(0, assignment.topology.world_size - 1)])


def union(entries: Iterable[StateCopies]) -> Ranks:
    """Return the ranks that have any of the copies."""
    found = NO_RANKS
    for entry in entries:
        found |= entry.ranks
    return found


def copies_by_step(held: Iterable[StateCopies], assignment: Assignment[str]) -> dict[int, list[StateCopies]]:
    """Return step → the valid copies of the job's ranks that a restore may use; arguments as for
    :func:`choose_restore`.

    All copies of a step are of one run: the run that has the step for most ranks, and among equal runs the latest.
    """
    by_run: dict[int, dict[str, list[StateCopies]]] = defaultdict(lambda: defaultdict(list))
    ranks = all_ranks(assignment)
    for entry in held:
        if entry.valid and entry.tier.known and entry.completed_steps >= 1 and (ours := entry.among(ranks)).ranks:
            by_run[entry.completed_steps][entry.run].append(ours)
    return {step: max(runs.items(), key=lambda run: (len(union(run[1])), run[0]))[1] for step, runs in by_run.items()}


def nearest(entries: Iterable[StateCopies], assignment: Assignment[str]) -> ChosenCopies:
    """Return the copies of one step that a restore uses.

    The order of preference is the rank's own memory on its machine, other memory, disk, remote storage. Among copies of
    equal preference, the copy on the rank's machine is used.
    """
    parts = []
    for entry in entries:
        home = at_home(entry, assignment)
        away = entry.at(entry.places - home.places)
        parts += [(_preference(part, home=part is home), part) for part in (home, away) if part.places]
    in_place: list[StateCopies] = []
    elsewhere: list[StateCopies] = []
    taken = NO_RANKS
    for preference, part in sorted(parts, key=lambda each: each[0]):
        if wanted := part.ranks - taken:
            chosen = _one_of_each(part.among(wanted))
            taken |= wanted
            (in_place if preference == _IN_PLACE else elsewhere).append(chosen)
    return ChosenCopies(tuple(in_place), tuple(elsewhere))


def at_home(entry: StateCopies, assignment: Assignment[str]) -> StateCopies:
    """Return the copies that are on the machines that run their ranks."""
    size, home = assignment.topology.ranks_per_machine, dict[str, str]()
    index_of = {machine: index for index, machine in enumerate(assignment.machines)}
    for machine, spans in entry.places.each():
        index = index_of.get(machine)
        if index is None:
            continue
        first, last = index * size, (index + 1) * size - 1
        if spans == [(first, last)]:
            home[machine] = entry.places[machine]
        elif both := [(max(a, first), min(b, last)) for a, b in spans if a <= last and b >= first]:
            home[machine] = ",".join(span_text(a, b) for a, b in both)
    places = Places(home)
    return entry if places == entry.places else entry.at(places)


def _one_of_each(entry: StateCopies) -> StateCopies:
    """Return one copy of each rank, if several machines have the same: that of the machine whose name comes first."""
    if count_of([entry]) == len(entry.ranks):
        return entry
    left = {*entry.ranks}
    places: dict[str, str] = {}
    for machine, text in sorted(entry.places.items()):
        if own := members(text) & left:
            places[machine] = text_of(own)
            left -= own
    return entry.at(Places(places))


def _order(entry: StateCopies) -> tuple[int, int, str, str, str]:
    return entry.ranks.first, entry.completed_steps, entry.tier, entry.places.first, entry.reason


def _preference(entry: StateCopies, *, home: bool) -> tuple[int, bool, int]:
    tier = TIERS[entry.tier]
    depth = 0 if entry.tier == Tier.OWN and home else 1 if entry.tier in MEMORY else tier
    return depth, not home, tier


_IN_PLACE = (0, False, TIERS[Tier.OWN])


def _sources(chosen: ChosenCopies) -> str:
    """Return the sources of the copies as text, e.g. ``4 from their own memory, 4 from backups (m0, m3)``."""
    names = {
        Tier.OWN: "memory elsewhere",
        Tier.BACKUP: "backups",
        Tier.DISK: "disk",
        Tier.REMOTE: "remote storage",
    }
    sources = [("their own memory", "", count_of(chosen.in_place))]
    for tier, name in names.items():
        entries = [entry for entry in chosen.elsewhere if entry.tier == tier]
        machines = sorted({machine for entry in entries for machine in entry.places})
        sources.append((name, "" if tier == Tier.REMOTE else f" ({listed(machines)})", count_of(entries)))
    total = sum(count for *_, count in sources)
    parts = []
    for name, where, count in sources:
        if count:
            parts.append(f"{f'all {count}' if count == total > 1 else count} from {name}{where}")
    return ", ".join(parts)


def _cost(step: int, by_step: Mapping[int, Sequence[StateCopies]], chosen: ChosenCopies, world_size: int) -> str:
    """Return why memory is not enough, and how much older the step is than the newest copy; empty: memory is enough."""
    if all(entry.tier in MEMORY for entry in chosen.all):
        return ""
    everyone, newest = Ranks.of_spans([(0, world_size - 1)]), max(by_step)
    in_memory = {s: union(entry for entry in entries if entry.tier in MEMORY) for s, entries in by_step.items()}
    lost_ranks = everyone
    for ranks in in_memory.values():
        lost_ranks -= ranks
    if len(lost_ranks) == world_size:
        why = "no rank's memory is left"
    elif lost_ranks:
        noun = "rank" if len(lost_ranks) == 1 else "ranks"
        why = f"owner and peer of {noun} {_named(lost_ranks)} were lost together"
    else:
        best = max(in_memory, key=lambda s: (len(in_memory[s]), s))
        why = f"memory lacks rank {_named(everyone - in_memory[best])} at step {best}"
    lost = newest - step
    older = f"{lost} step{'' if lost == 1 else 's'} older than the newest copy (step {newest})" if lost else "not older"
    return f"; {older}: {why}"


def _named(ranks: Ranks) -> str:
    return listed([*ranks])


def _not_restorable(at: int, copies: Mapping[int, Ranks], common: Sequence[int], world_size: int) -> str:
    steps = listed(sorted(common, reverse=True))
    exist = f"there are steps {steps}" if common else "no step can be restored by all of them"
    missing = Ranks.of_spans([(0, world_size - 1)]) - copies.get(at, NO_RANKS)
    some = f"rank {_named(missing)} lacks it" if len(missing) == 1 else f"ranks {_named(missing)} lack it"
    lacks = "no rank has it" if len(missing) == world_size else some
    return f"step {at} cannot be restored by all {world_size} ranks: {lacks}; {exist}"


def _of_other_runs(at: int, everything: Sequence[StateCopies], copies: Mapping[int, Ranks]) -> str:
    """Describe the ranks that have a step only from another run of the job's name; empty: there are none."""
    ours = copies.get(at, NO_RANKS)
    named: dict[int, str] = {}
    for entry in everything:
        if entry.valid and entry.completed_steps == at:
            others = entry.among(entry.ranks - ours)
            for machine, text in others.places.items():
                named |= dict.fromkeys(members(text), machine)
    if not named:
        return ""
    ranks = listed([f"rank {rank} on {machine}" for rank, machine in sorted(named.items())])
    return f"; {ranks} has it only of another run of that name"


def _damaged(everything: Sequence[StateCopies]) -> str:
    """Return a few damaged copies, and locations that could not be listed, as text."""
    damaged = [entry for entry in everything if not entry.valid and entry.reason != NEVER_USED and not entry.unlisted]
    texts = []
    for entry in damaged[:3]:
        tier = "" if entry.tier == Tier.OWN else f" ({entry.tier})"
        texts.append(f"; rank {_named(entry.ranks)} on {listed([*entry.places])}{tier}: {entry.reason}")
    return "".join([*texts, *(f"; {entry.reason}" for entry in everything if entry.unlisted)][:4])
