"""The machines' answers as evidence for the decisions, no larger than a history can hold.

A payload of Temporal may have 2 MB, compressed (``activities/payloads.py``). Ten
thousand ranks that hold several copies in several tiers, each with the end of
its output, are more than that: what the decision does not need is left out
here, and the evidence says how much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from activities.agents.convert import TIERS, exit_of
from activities.payloads import packed_bytes
from agent.monitor.finding_messages import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.first_failure import is_victim
from everstep.model.evidence import Evidence, RankExit, Unlisted
from everstep.model.finding import MachineFinding, worst_first
from everstep.model.state_copy import StateCopy, Tier

PACKED_LIMIT = 900_000
"""Bytes of evidence as it crosses Temporal: a search may add as much again."""
HELD_LIMIT = 4000
"""Copies in one payload, about 250 bytes each and compressed 25; more where one step of all ranks has more."""
DAMAGED_LIMIT = 100
"""Damaged copies that are named."""
FINDINGS_LIMIT = 64
"""Findings of inspections, of some 500 bytes each."""
TAILS = 32
"""Ranks whose end of the output is kept whole: those that ended first."""
LINE = 300
"""Characters of an exception's line."""
NARROWER = ((2, LINE), (2, 100), (1, 60))
"""Where that does not fit: copies of each rank at a step, and characters of exceptions, ever fewer. All are cut
alike, so that equal ones stay equal, and their class stays."""

ON_FILES = {Tier.DISK, Tier.REMOTE}
DEPTH = {tier: depth for depth, tier in enumerate(Tier)}
NEWER = "this release cannot use such a copy; the agent is of a newer one"


def evidence_of(
    generation: int,
    replies: Mapping[str, pb.StopReply],
    unreachable: Iterable[str],
    homes: Mapping[int, str] | None = None,
) -> Evidence:
    """What the machines answered to a stop.

    Args:
        generation: The one that was stopped.
        replies: Machine → answer.
        unreachable: Machines that did not answer.
        homes: Rank → machine that runs it.
    """
    exits = [exit_of(machine, rank) for machine, reply in replies.items() for rank in reply.ranks]
    held, shared = held_of({machine: reply.checkpoints for machine, reply in replies.items()}, homes)
    return fitted(
        Evidence(
            generation=generation,
            exits=sorted(exits, key=lambda end: end.rank),
            held=held,
            unreachable=sorted(unreachable),
            emptied=sorted(machine for machine, reply in replies.items() if reply.unknown),
            disk_shared=shared,
            unlisted=unlisted_of({machine: reply.checkpoints for machine, reply in replies.items()}),
            findings=findings_of(replies),
            disk_asked=max(
                (reply.disk_asked for reply in replies.values() if reply.HasField("disk_asked")), default=None
            ),
        )
    )


def findings_of(replies: Mapping[str, pb.StopReply]) -> list[MachineFinding]:
    """What the inspections of all machines say, the worst of all first, and not more than fit."""
    found = [(machine, finding_of(message)) for machine, reply in replies.items() for message in reply.findings]
    first = worst_first([finding for _, finding in found])
    place = {id(finding): position for position, finding in enumerate(first)}
    found.sort(key=lambda entry: (place[id(entry[1])], entry[0]))
    return [MachineFinding(machine=machine, finding=finding) for machine, finding in found[:FINDINGS_LIMIT]]


def unlisted_of(
    listings: Mapping[str, Iterable[pb.HeldCheckpoint]], silent: Iterable[str] = (), *, remote_asked: bool = False
) -> list[Unlisted]:
    """The places that could not be looked at, by reason.

    Remote storage is one place: it is unknown where no machine listed it.

    Args:
        listings: What machines answered that were asked for all copies.
        silent: Machines that did not answer.
        remote_asked: They were asked for what is on remote storage too.
    """
    disks: dict[str, list[str]] = defaultdict(list)
    remote: list[str] = []
    for machine, checkpoints in sorted(listings.items()):
        why = {TIERS.get(copy.tier): copy.reason[:LINE] for copy in checkpoints if _is_unlisted(copy)}
        if Tier.DISK in why:
            disks[why[Tier.DISK]].append(machine)
        if Tier.REMOTE in why:
            remote.append(why[Tier.REMOTE])
    for machine in sorted(silent):
        disks["no agent answers"].append(machine)
    unlisted = [Unlisted(tier=Tier.DISK, machines=machines, reason=reason) for reason, machines in disks.items()]
    if remote_asked and len(remote) == len(listings):
        unlisted.append(Unlisted(tier=Tier.REMOTE, reason=remote[0] if remote else "no agent answers"))
    return unlisted


def _is_unlisted(copy: pb.HeldCheckpoint) -> bool:
    return not copy.valid and copy.completed_steps < 0 and TIERS.get(copy.tier) in ON_FILES


def held_of(
    listings: Mapping[str, Iterable[pb.HeldCheckpoint]], homes: Mapping[int, str] | None = None
) -> tuple[list[StateCopy], bool]:
    """The copies, and whether several machines listed the same files on disk.

    A file that several machines see is one copy: it is named where the rank runs
    that needs it, so that this machine reads it directly.
    """
    homes = homes or {}
    held: list[StateCopy] = []
    files: dict[tuple[object, ...], StateCopy] = {}
    seen_by: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for machine, checkpoints in sorted(listings.items()):
        for listed in checkpoints:
            copy = StateCopy(
                rank=listed.rank,
                machine=machine,
                completed_steps=listed.completed_steps,
                bytes=listed.bytes,
                valid=listed.valid and listed.tier in TIERS,
                reason=listed.reason[:LINE] if listed.tier in TIERS else NEWER,
                tier=TIERS.get(listed.tier) or Tier(f"tier {listed.tier}"),
                generation=listed.generation,
                saved_ns=listed.saved_ns,
                digest=listed.digest,
                run=listed.run,
                topology=listed.topology,
                verified=not listed.unverified,
            )
            if copy.tier not in ON_FILES or not listed.place:
                held.append(copy)
                continue
            file = (copy.tier, listed.place, copy.rank, copy.completed_steps, copy.valid, copy.digest, copy.saved_ns)
            seen_by[file].add(machine)
            if file not in files or machine == homes.get(copy.rank):
                files[file] = copy
    shared = any(len(machines) > 1 for file, machines in seen_by.items() if file[0] is Tier.DISK)
    return sorted([*held, *files.values()], key=_order), shared


def _order(copy: StateCopy) -> tuple[int, int, int, str]:
    return copy.rank, copy.completed_steps, DEPTH.get(copy.tier, len(DEPTH)), copy.machine


def fitted(evidence: Evidence, *, at: int | None = None) -> Evidence:
    """Evidence that fits into a payload, with what was left out in numbers; ``at`` as for :func:`bounded`.

    How each rank ended, and one copy of each rank at one step, is always kept.
    """
    exits, held = bounded_exits(evidence.exits), bounded(evidence.held, at=at)
    kept = _counted(evidence, exits, held)
    for per_rank, characters in NARROWER:
        if packed_bytes(kept.model_dump_json()) <= PACKED_LIMIT:
            break
        exits = [_bare(_cut(end, characters, end.log_tail)) for end in exits]
        held = nearest_of_each(held, per_rank, at=at)
        kept = _counted(evidence, exits, held)
    return kept


def _counted(evidence: Evidence, exits: list[RankExit], held: list[StateCopy]) -> Evidence:
    """The evidence with some of its ends and copies, and a line about the rest."""
    left_out = []
    if copies := len(evidence.held) - len(held):
        left_out.append(f"{copies} of {len(evidence.held)} copies")
    if quiet := sum(len(kept.log_tail) < len(end.log_tail) for kept, end in zip(exits, evidence.exits, strict=True)):
        left_out.append(f"the output of {quiet} of {len(exits)} ranks")
    if short := sum(len(kept.exception) < len(end.exception) for kept, end in zip(exits, evidence.exits, strict=True)):
        left_out.append(f"the end of {short} exceptions")
    cut = len(held) < len(evidence.held)
    return evidence.model_copy(update={"exits": exits, "held": held, "left_out": ", ".join(left_out), "held_cut": cut})


def nearest_of_each(held: list[StateCopy], per_rank: int, *, at: int | None = None) -> list[StateCopy]:
    """Of each rank the nearest copies of the step that a restore would take, and the damaged ones that are named."""
    valid = [copy for copy in held if copy.valid]
    everybody = {copy.rank for copy in held}
    by_step: dict[int, set[int]] = defaultdict(set)
    for copy in valid:
        by_step[copy.completed_steps].add(copy.rank)
    best = max(by_step, key=lambda step: (step == at, by_step[step] == everybody, step), default=None)
    taken: dict[int, int] = defaultdict(int)
    kept = [copy for copy in held if not copy.valid][-DAMAGED_LIMIT:]
    for copy in sorted(valid, key=_order):
        if copy.completed_steps == best and taken[copy.rank] < per_rank:
            taken[copy.rank] += 1
            kept.append(copy)
    return sorted(kept, key=_order)


def bounded(held: list[StateCopy], *, at: int | None = None, limit: int = HELD_LIMIT) -> list[StateCopy]:
    """The copies that matter, at most about ``limit`` of them.

    First the damaged ones, some of them, then the newest steps that every rank
    can restore, whole steps at a time, then the newest of the rest.

    Args:
        held: All of them.
        at: A step that is asked for; it comes before all others.
        limit: How many; one step of all ranks is kept whatever it takes.
    """
    if len(held) <= limit:
        return held
    damaged = [copy for copy in held if not copy.valid][-DAMAGED_LIMIT:]
    by_step: dict[int, list[StateCopy]] = defaultdict(list)
    for copy in held:
        if copy.valid:
            by_step[copy.completed_steps].append(copy)
    everybody = {copy.rank for copy in held}
    complete = [step for step, copies in by_step.items() if {copy.rank for copy in copies} == everybody]
    order = sorted(by_step, key=lambda step: (step != at, step not in complete, -step))
    kept = list(damaged)
    for position, step in enumerate(order):
        if position and len(kept) + len(by_step[step]) > limit:
            continue
        kept += by_step[step]
    return sorted(kept, key=_order)


def bounded_exits(exits: list[RankExit]) -> list[RankExit]:
    """The ends, with the output of the first ones only; their agents classified them with all of it at hand."""
    if len(exits) <= TAILS:
        return exits
    own = sorted((end for end in exits if not end.stopped_by_us), key=lambda end: (is_victim(end), end.time_ns))
    with_output = {end.rank for end in own[:TAILS]}
    return [_cut(end, LINE, end.log_tail) if end.rank in with_output else _bare(_cut(end, LINE, "")) for end in exits]


def _cut(end: RankExit, characters: int, log_tail: str) -> RankExit:
    """An end with less text."""
    return end.model_copy(update={"exception": end.exception[:characters], "log_tail": log_tail})


def _bare(end: RankExit) -> RankExit:
    """An end whose class is kept, and not the lines that say it."""
    if end.classification is None:
        return end
    bare = end.classification.model_copy(update={"place": "", "evidence": []})
    return end.model_copy(update={"classification": bare})
