"""Converts the machines' answers to evidence for the decisions, small enough for a workflow's history.

The answers of ten thousand ranks, each with several copies in several tiers and the end of its output, have many
megabytes. In the evidence, ranks, copies and machines that are alike are one entry. So it is small, and the decisions
about it are quick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from activities.agents.convert import TIERS
from activities.agents.held_copies import LINE, ON_FILES, held_of
from activities.agents.rank_ends import ends_of
from agent.reporting.observations import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.act.evict.shared import alike_machines, kept_findings
from everstep.model.evidence import Evidence, Unlisted
from everstep.model.finding import MachineFinding
from everstep.model.machine import Assignment
from everstep.model.state_copy import Tier


def evidence_of(
    generation: int,
    replies: Mapping[str, pb.StopReply],
    unreachable: Iterable[str],
    assignment: Assignment[str] | None = None,
    inspected: Sequence[MachineFinding] = (),
) -> Evidence:
    """Return the machines' answers to a stop as evidence.

    Args:
        generation: The stopped generation.
        replies: Machine → answer.
        unreachable: Machines that did not answer.
        assignment: The machines, by name, that run the job's ranks; None: not known.
        inspected: Findings of machines that did not answer the stop.
    """
    listings = {machine: reply.checkpoints for machine, reply in replies.items()}
    held, shared = held_of(listings, assignment)
    machines = [*assignment.machines] if assignment else [*replies]
    findings = [*inspected, *_findings(replies)]
    alike = alike_machines(findings)
    return Evidence(
        generation=generation,
        machines=machines,
        exits=ends_of((machine, rank) for machine, reply in replies.items() for rank in reply.ranks),
        held=held,
        unreachable=sorted(unreachable),
        emptied=sorted(machine for machine, reply in replies.items() if reply.unknown),
        disk_shared=shared,
        unlisted=unlisted_of(listings),
        findings=kept_findings(findings, alike, len(machines)),
        alike=alike,
        disk_asked=max((reply.disk_asked for reply in replies.values() if reply.HasField("disk_asked")), default=None),
        save_every=max((reply.save_every for reply in replies.values()), default=0),
    )


def _findings(replies: Mapping[str, pb.StopReply]) -> list[MachineFinding]:
    return [
        MachineFinding(machine=machine, finding=finding_of(message))
        for machine, reply in replies.items()
        for message in reply.findings
    ]


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
