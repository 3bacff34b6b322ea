"""What the machines answered, as the decisions take it, and no larger than a history can hold.

A payload of Temporal may have 2 MB, squeezed (``activities/payloads.py``). Ten
thousand ranks that hold several copies in several tiers, each with the end of
its output, are more than that: what the decision does not need is left out
here, and how much that is, said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from activities.agents.convert import TIERS, code_of, signal_of
from activities.payloads import packed_bytes
from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.root_cause import is_victim, said_of_a_peer
from everstep.model.incident import Evidence, RankExit, StateCopy, Tier, Unlisted

PACKED_LIMIT = 900_000
"""Bytes of evidence as it crosses Temporal (ours): a search may add as much again."""
HELD_LIMIT = 4000
"""Copies in one payload, about 250 bytes each and squeezed 25; more where one step of all ranks has more (ours)."""
DAMAGED_LIMIT = 100
"""Damaged copies that are named (ours)."""
TAILS = 32
"""Ranks whose end of the output is kept whole: those that ended first (ours)."""
LINE = 300
"""Characters of an exception's line (ours)."""
NARROWER = ((2, LINE), (2, 100), (1, 60))
"""Where that does not fit: copies of each rank at a step, and characters of exceptions, ever fewer (ours). All are cut
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
            disk_asked=max((one.disk_asked for one in replies.values() if one.HasField("disk_asked")), default=None),
        )
    )


def unlisted_of(
    told: Mapping[str, Iterable[pb.HeldCheckpoint]], silent: Iterable[str] = (), *, remote_asked: bool = False
) -> list[Unlisted]:
    """The places that could not be looked at, by reason.

    Remote storage is one place: it is unknown where no machine listed it.

    Args:
        told: What machines answered that were asked for all copies.
        silent: Machines that did not answer.
        remote_asked: They were asked for what is on remote storage too.
    """
    disks: dict[str, list[str]] = defaultdict(list)
    remote: list[str] = []
    for machine, checkpoints in sorted(told.items()):
        why = {TIERS.get(one.tier): one.reason[:LINE] for one in checkpoints if _is_unlisted(one)}
        if Tier.DISK in why:
            disks[why[Tier.DISK]].append(machine)
        if Tier.REMOTE in why:
            remote.append(why[Tier.REMOTE])
    for machine in sorted(silent):
        disks["no agent answers"].append(machine)
    found = [Unlisted(tier=Tier.DISK, machines=machines, reason=reason) for reason, machines in disks.items()]
    if remote_asked and len(remote) == len(told):
        found.append(Unlisted(tier=Tier.REMOTE, reason=remote[0] if remote else "no agent answers"))
    return found


def _is_unlisted(one: pb.HeldCheckpoint) -> bool:
    return not one.valid and one.completed_steps < 0 and TIERS.get(one.tier) in ON_FILES


def exit_of(machine: str, rank: pb.RankEvidence) -> RankExit:
    """How one rank ended."""
    return RankExit(
        rank=rank.rank,
        machine=machine,
        pid=rank.pid,
        code=code_of(rank.exit),
        signal=signal_of(rank.exit),
        time_ns=rank.exit.time_ns,
        stopped_by_us=rank.stopped_by_us,
        completed_steps=rank.completed_steps,
        exception=rank.exception,
        log_tail=rank.log_tail,
        shown_steps=rank.shown_steps if rank.HasField("shown_steps") else -1,
    )


def held_of(
    told: Mapping[str, Iterable[pb.HeldCheckpoint]], homes: Mapping[int, str] | None = None
) -> tuple[list[StateCopy], bool]:
    """The copies, and whether several machines told of the same files on disk.

    A file that several machines see is one copy: it is named where the rank runs
    that needs it, so that this machine reads it directly.
    """
    homes = homes or {}
    held: list[StateCopy] = []
    files: dict[tuple[object, ...], StateCopy] = {}
    seen_by: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for machine, checkpoints in sorted(told.items()):
        for one in checkpoints:
            copy = StateCopy(
                rank=one.rank,
                machine=machine,
                completed_steps=one.completed_steps,
                bytes=one.bytes,
                valid=one.valid and one.tier in TIERS,
                reason=one.reason[:LINE] if one.tier in TIERS else NEWER,
                tier=TIERS.get(one.tier) or Tier(f"tier {one.tier}"),
                generation=one.generation,
                saved_ns=one.saved_ns,
                digest=one.digest,
                run=one.run,
                topology=one.topology,
                verified=not one.unverified,
            )
            if copy.tier not in ON_FILES or not one.place:
                held.append(copy)
                continue
            file = (copy.tier, one.place, copy.rank, copy.completed_steps, copy.valid, copy.digest, copy.saved_ns)
            seen_by[file].add(machine)
            if file not in files or machine == homes.get(copy.rank):
                files[file] = copy
    shared = any(len(machines) > 1 for file, machines in seen_by.items() if file[0] is Tier.DISK)
    return sorted([*held, *files.values()], key=_order), shared


def _order(one: StateCopy) -> tuple[int, int, int, str]:
    return one.rank, one.completed_steps, DEPTH.get(one.tier, len(DEPTH)), one.machine


def fitted(found: Evidence, *, at: int | None = None) -> Evidence:
    """Evidence that fits into a payload, with what was left out in numbers; ``at`` as for :func:`bounded`.

    How each rank ended, and one copy of each at one step, is kept whatever it takes.
    """
    exits, held = bounded_exits(found.exits), bounded(found.held, at=at)
    kept = _counted(found, exits, held)
    for each, line in NARROWER:
        if packed_bytes(kept.model_dump_json()) <= PACKED_LIMIT:
            break
        exits = [_cut(end, line, end.log_tail) for end in exits]
        held = nearest_of_each(held, each, at=at)
        kept = _counted(found, exits, held)
    return kept


def _counted(found: Evidence, exits: list[RankExit], held: list[StateCopy]) -> Evidence:
    """The evidence with some of its ends and copies, and a line about the rest."""
    said = []
    if copies := len(found.held) - len(held):
        said.append(f"{copies} of {len(found.held)} copies")
    if quiet := sum(len(kept.log_tail) < len(end.log_tail) for kept, end in zip(exits, found.exits, strict=True)):
        said.append(f"the output of {quiet} of {len(exits)} ranks")
    if short := sum(len(kept.exception) < len(end.exception) for kept, end in zip(exits, found.exits, strict=True)):
        said.append(f"the end of {short} exceptions")
    cut = len(held) < len(found.held)
    return found.model_copy(update={"exits": exits, "held": held, "left_out": ", ".join(said), "held_cut": cut})


def nearest_of_each(held: list[StateCopy], each: int, *, at: int | None = None) -> list[StateCopy]:
    """Of each rank the nearest copies of the step that a restore would take, and the damaged ones that are named."""
    valid = [one for one in held if one.valid]
    everybody = {one.rank for one in held}
    by_step: dict[int, set[int]] = defaultdict(set)
    for one in valid:
        by_step[one.completed_steps].add(one.rank)
    best = max(by_step, key=lambda step: (step == at, by_step[step] == everybody, step), default=None)
    taken: dict[int, int] = defaultdict(int)
    kept = [one for one in held if not one.valid][-DAMAGED_LIMIT:]
    for one in sorted(valid, key=_order):
        if one.completed_steps == best and taken[one.rank] < each:
            taken[one.rank] += 1
            kept.append(one)
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
    damaged = [one for one in held if not one.valid][-DAMAGED_LIMIT:]
    by_step: dict[int, list[StateCopy]] = defaultdict(list)
    for one in held:
        if one.valid:
            by_step[one.completed_steps].append(one)
    everybody = {one.rank for one in held}
    whole = [step for step, copies in by_step.items() if {one.rank for one in copies} == everybody]
    order = sorted(by_step, key=lambda step: (step != at, step not in whole, -step))
    kept = list(damaged)
    for position, step in enumerate(order):
        if position and len(kept) + len(by_step[step]) > limit:
            continue
        kept += by_step[step]
    return sorted(kept, key=_order)


def bounded_exits(exits: list[RankExit]) -> list[RankExit]:
    """The ends, with the output of the first ones only; who is a victim of another rank stays a victim."""
    if len(exits) <= TAILS:
        return exits
    own = sorted((end for end in exits if not end.stopped_by_us), key=lambda end: (is_victim(end), end.time_ns))
    whole = {end.rank for end in own[:TAILS]}
    return [_cut(end, LINE, end.log_tail if end.rank in whole else "") for end in exits]


def _cut(end: RankExit, line: int, log_tail: str) -> RankExit:
    """An end with less text, which says still whether a peer went away."""
    cut = end.model_copy(update={"exception": end.exception[:line], "log_tail": log_tail})
    said = "" if end.stopped_by_us else said_of_a_peer(end)
    return cut if not said or is_victim(cut) else cut.model_copy(update={"log_tail": f"{log_tail}\n{said}".lstrip()})
