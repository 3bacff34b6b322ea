"""Converts the machines' answers to evidence for the decisions, small enough for a workflow's history.

A payload of Temporal may have 2 MB, compressed (``activities/payloads.py``). The answers of ten thousand ranks, each
with several copies in several tiers and the end of its output, are larger. So data that the decision does not need is
dropped, and the evidence says how much was dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from activities.agents.convert import TIERS
from activities.payloads import packed_bytes
from agent.reporting.observations import finding_of
from agent.state.rank_record import exit_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.first_failure import is_victim
from everstep.model.evidence import Evidence, RankExit, Unlisted
from everstep.model.finding import MachineFinding, worst_first
from everstep.model.state_copy import StateCopy, Tier

PACKED_LIMIT = 900_000
"""The largest compressed size of evidence, bytes. It is less than half of a payload, because a search for checkpoints
may add as much again."""
HELD_LIMIT = 4000
"""The largest number of copies in one payload: a copy has about 250 bytes, 25 when compressed. One step of all ranks is
kept even if it has more copies."""
DAMAGED_LIMIT = 100
"""The largest number of damaged copies that are named."""
FINDINGS_LIMIT = 64
"""The largest number of inspection findings, of about 500 bytes each."""
TAILS = 32
"""The largest number of ranks whose output is kept in full; these are the ranks that ended first."""
LINE = 300
"""The largest number of characters in the line of an exception."""
NARROWER = ((2, LINE), (2, 100), (1, 60))
"""Smaller limits for evidence that is still too large: copies of each rank, and characters per exception. All
exceptions are cut to the same length, so equal exceptions stay equal. The first characters, with the name of the
exception's class, are kept."""

ON_FILES = {Tier.DISK, Tier.REMOTE}
DEPTH = {tier: depth for depth, tier in enumerate(Tier)}
NEWER = "this release cannot use such a copy: the agent is of a newer release"


def evidence_of(
    generation: int,
    replies: Mapping[str, pb.StopReply],
    unreachable: Iterable[str],
    homes: Mapping[int, str] | None = None,
) -> Evidence:
    """Return the machines' answers to a stop as evidence.

    Args:
        generation: The stopped generation.
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
            save_every=max((reply.save_every for reply in replies.values()), default=0),
        )
    )


def findings_of(replies: Mapping[str, pb.StopReply]) -> list[MachineFinding]:
    """Return the findings of all machines' inspections, the worst first, up to the limit."""
    entries = [(machine, finding_of(message)) for machine, reply in replies.items() for message in reply.findings]
    ordered = worst_first([finding for _, finding in entries])
    place = {id(finding): position for position, finding in enumerate(ordered)}
    entries.sort(key=lambda entry: (place[id(entry[1])], entry[0]))
    return [MachineFinding(machine=machine, finding=finding) for machine, finding in entries[:FINDINGS_LIMIT]]


def unlisted_of(
    listings: Mapping[str, Iterable[pb.HeldCheckpoint]], silent: Iterable[str] = (), *, remote_asked: bool = False
) -> list[Unlisted]:
    """Return the locations that could not be searched, by reason.

    Remote storage is one location: it counts as not searched only if no machine could list it.

    Args:
        listings: The answers of machines to a request for all copies.
        silent: Machines that did not answer.
        remote_asked: The request included remote storage.
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
        disks["its agent does not answer"].append(machine)
    unlisted = [Unlisted(tier=Tier.DISK, machines=machines, reason=reason) for reason, machines in disks.items()]
    if remote_asked and len(remote) == len(listings):
        unlisted.append(Unlisted(tier=Tier.REMOTE, reason=remote[0] if remote else "no agent answers"))
    return unlisted


def _is_unlisted(copy: pb.HeldCheckpoint) -> bool:
    return not copy.valid and copy.completed_steps < 0 and TIERS.get(copy.tier) in ON_FILES


def held_of(
    listings: Mapping[str, Iterable[pb.HeldCheckpoint]], homes: Mapping[int, str] | None = None
) -> tuple[list[StateCopy], bool]:
    """Return the copies, and whether several machines listed the same files on disk.

    A file that several machines see is one copy. Its location is the machine whose rank needs it, so that this machine
    reads the file directly.
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
    """Return evidence that fits into a payload, with the number of dropped entries; for ``at`` see :func:`bounded`.

    The end of every rank, and one copy of each rank at one step, are always kept.
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
    """Return each rank's nearest copies of the step that a restore would use, and some damaged copies."""
    valid = [copy for copy in held if copy.valid]
    all_ranks = {copy.rank for copy in held}
    by_step: dict[int, set[int]] = defaultdict(set)
    for copy in valid:
        by_step[copy.completed_steps].add(copy.rank)
    best = max(by_step, key=lambda step: (step == at, by_step[step] == all_ranks, step), default=None)
    taken: dict[int, int] = defaultdict(int)
    kept = [copy for copy in held if not copy.valid][-DAMAGED_LIMIT:]
    for copy in sorted(valid, key=_order):
        if copy.completed_steps == best and taken[copy.rank] < per_rank:
            taken[copy.rank] += 1
            kept.append(copy)
    return sorted(kept, key=_order)


def bounded(held: list[StateCopy], *, at: int | None = None, limit: int = HELD_LIMIT) -> list[StateCopy]:
    """Return the most important copies, about ``limit`` of them at most.

    The order is: some damaged copies, then the newest steps that every rank
    can restore, each step in full, then the newest of the other copies.

    Args:
        held: All copies.
        at: A requested step; its copies have priority.
        limit: The largest number of copies; one step of all ranks is kept even if it has more.
    """
    if len(held) <= limit:
        return held
    damaged = [copy for copy in held if not copy.valid][-DAMAGED_LIMIT:]
    by_step: dict[int, list[StateCopy]] = defaultdict(list)
    for copy in held:
        if copy.valid:
            by_step[copy.completed_steps].append(copy)
    all_ranks = {copy.rank for copy in held}
    complete = [step for step, copies in by_step.items() if {copy.rank for copy in copies} == all_ranks]
    order = sorted(by_step, key=lambda step: (step != at, step not in complete, -step))
    kept = list(damaged)
    for position, step in enumerate(order):
        if position and len(kept) + len(by_step[step]) > limit:
            continue
        kept += by_step[step]
    return sorted(kept, key=_order)


def bounded_exits(exits: list[RankExit]) -> list[RankExit]:
    """Return the ends of all ranks; only those that ended first keep their output. The agents have already classified
    each end by its full output."""
    if len(exits) <= TAILS:
        return exits
    own = sorted((end for end in exits if not end.stopped_by_us), key=lambda end: (is_victim(end), end.time_ns))
    with_output = {end.rank for end in own[:TAILS]}
    return [_cut(end, LINE, end.log_tail) if end.rank in with_output else _bare(_cut(end, LINE, "")) for end in exits]


def _cut(end: RankExit, characters: int, log_tail: str) -> RankExit:
    """Return an end with shorter texts."""
    return end.model_copy(update={"exception": end.exception[:characters], "log_tail": log_tail})


def _bare(end: RankExit) -> RankExit:
    """Return an end without the lines of its log, but with its classification."""
    if end.classification is None:
        return end
    bare = end.classification.model_copy(update={"place": "", "evidence": []})
    return end.model_copy(update={"classification": bare})
