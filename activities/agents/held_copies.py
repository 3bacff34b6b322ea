"""Gathers the copies of state that machines list: copies that differ only in rank and machine are one entry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from activities.agents.convert import TIERS
from agent.v1 import agent_pb2 as pb
from everstep.model.machine import Assignment
from everstep.model.places import Places
from everstep.model.ranks import NO_RANKS, Ranks, text_of
from everstep.model.state_copy import StateCopies, Tier

REASONS = 100
"""The largest number of different reasons for which copies are not valid; the others have one entry for each step."""
LINE = 300
"""The largest number of characters of a reason."""
APART_NS = 60_000_000_000
"""Saves of the same step are different saves if none was made for this long between them, nanoseconds."""
OTHER_REASONS = "it is not valid; its reason is one of many, and is not kept"
NEWER = "this release cannot use such a copy: the agent is of a newer release"

ON_FILES = {Tier.DISK, Tier.REMOTE}
DEPTH = {tier: depth for depth, tier in enumerate(Tier)}


class _Kind(NamedTuple):
    """What the copies of an entry have in common."""

    tier: Tier
    completed_steps: int
    valid: bool
    reason: str
    generation: int
    run: str
    topology: str
    verified: bool


class _Copy(NamedTuple):
    rank: int
    machine: str
    bytes: int
    saved_ns: int
    digest: str


def held_of(
    listings: Mapping[str, Iterable[pb.HeldCheckpoint]], assignment: Assignment[str] | None = None
) -> tuple[list[StateCopies], bool]:
    """Return the copies, and whether several machines listed the same files on disk.

    A file that several machines see is one copy. Its location is the machine whose rank needs it, so that this machine
    reads the file directly.

    Args:
        listings: Machine → the copies that it listed.
        assignment: The machines, by name, that run the job's ranks; None: not known.
    """
    homes = assignment.homes() if assignment else {}
    copies: dict[_Kind, list[_Copy]] = defaultdict(list)
    files: dict[tuple[object, ...], tuple[_Kind, _Copy]] = {}
    seen_by: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for machine, checkpoints in sorted(listings.items()):
        for listed in checkpoints:
            tier = TIERS.get(listed.tier)
            kind = _Kind(
                tier=tier or Tier(f"tier {listed.tier}"),
                completed_steps=listed.completed_steps,
                valid=listed.valid and tier is not None,
                reason=listed.reason[:LINE] if tier is not None else NEWER,
                generation=listed.generation,
                run=listed.run,
                topology=listed.topology,
                verified=not listed.unverified,
            )
            copy = _Copy(listed.rank, machine, listed.bytes, listed.saved_ns, listed.digest)
            if kind.tier not in ON_FILES or not listed.place:
                copies[kind].append(copy)
                continue
            file = (kind, listed.place, copy.rank, copy.digest, copy.saved_ns)
            seen_by[file].add(machine)
            if file not in files or machine == homes.get(copy.rank):
                files[file] = kind, copy
    for kind, copy in files.values():
        copies[kind].append(copy)
    shared = any(len(machines) > 1 and files[file][0].tier is Tier.DISK for file, machines in seen_by.items())
    entries = [_entry(kind, save, assignment) for kind, all_of in _few_reasons(copies) for save in _saves(all_of)]
    return sorted(entries, key=_order), shared


def _few_reasons(copies: Mapping[_Kind, list[_Copy]]) -> Iterator[tuple[_Kind, list[_Copy]]]:
    """Return the copies of each kind; of too many reasons, the rare ones are replaced by a general one."""
    invalid = sorted((kind for kind in copies if not kind.valid), key=lambda kind: -len(copies[kind]))
    rare = set(invalid[REASONS:])
    together: dict[_Kind, list[_Copy]] = defaultdict(list)
    for kind, all_of in copies.items():
        together[kind._replace(reason=OTHER_REASONS) if kind in rare else kind] += all_of
    yield from together.items()


def _saves(copies: Sequence[_Copy]) -> Iterator[list[_Copy]]:
    """Return the copies of each save of a step: another save of the step has another time."""
    save: list[_Copy] = []
    for copy in sorted(copies, key=lambda copy: copy.saved_ns):
        if save and copy.saved_ns - save[-1].saved_ns > APART_NS:
            yield save
            save = []
        save.append(copy)
    yield save


def _entry(kind: _Kind, copies: Sequence[_Copy], assignment: Assignment[str] | None) -> StateCopies:
    places: dict[str, list[int]] = defaultdict(list)
    for copy in sorted(copies):
        places[copy.machine].append(copy.rank)
    return StateCopies(
        places=Places({machine: text_of(ranks) for machine, ranks in places.items()}),
        bytes=max(copy.bytes for copy in copies),
        saved_ns=copies[0].saved_ns,
        saved_until_ns=copies[-1].saved_ns,
        alike=_alike(copies, assignment) if assignment else NO_RANKS,
        **kind._asdict(),
    )


def _alike(copies: Sequence[_Copy], assignment: Assignment[str]) -> Ranks:
    """Return the ranks whose tensors equal those of the first rank of their data-parallel group."""
    topology = assignment.topology
    digests = {copy.rank: copy.digest for copy in copies if copy.digest and copy.rank < topology.world_size}
    axes = topology.data_axes
    return Ranks.of(rank for rank, digest in digests.items() if digests.get(topology.first_along(rank, axes)) == digest)


def _order(entry: StateCopies) -> tuple[int, int, int, str]:
    return entry.completed_steps, DEPTH.get(entry.tier, len(DEPTH)), entry.ranks.first, entry.reason
