"""Asks, before a job starts, whether backups may use the network cards of its machines, and how fast they may be."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.errors import AgentError

if TYPE_CHECKING:
    from controlplane.client import Control
    from everstep.model.checkpoint_policy import CheckpointPolicy
    from everstep.model.job import JobSpec
    from everstep.model.machine import Machine

ASKING_S = 5.0
"""A machine that does not answer within this time is not checked, seconds."""


async def backup_warnings(control: Control, spec: JobSpec, machines: Sequence[Machine]) -> list[str]:
    """The warnings about the backups of a job, by what its machines say about their network cards."""
    if not spec.checkpoint.backup or spec.machines == 1:
        return []

    async def describe(machine: Machine) -> pb.DescribeReply:
        try:
            return await control.agents.get(machine.address).describe(timeout_s=ASKING_S)
        except AgentError:
            return pb.DescribeReply()

    replies = await asyncio.gather(*map(describe, machines))
    return warnings(spec.checkpoint, {machine.name: reply for machine, reply in zip(machines, replies, strict=True)})


def warnings(policy: CheckpointPolicy, described: Mapping[str, pb.DescribeReply]) -> list[str]:
    """The warnings about backups, each with the machines that it is about."""
    found = [
        f"there are no backups of the ranks of {machines}: {why}"
        for why, machines in _machines_of((reply.no_backups, name) for name, reply in described.items())
    ]
    if policy.backup_card_share and not policy.backup_rate_mb_s:
        found += [
            f"the speed of {cards} of {machines} is not known, so backups are not limited to a share of it: set "
            "checkpoint.backup_rate_mb_s to limit them"
            for cards, machines in _machines_of(
                (listed(reply.cards_without_speed), name) for name, reply in described.items()
            )
        ]
    return found


def _machines_of(said: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """What machines say, each with the names of these machines as text; machines that say nothing are left out."""
    machines: dict[str, list[str]] = defaultdict(list)
    for text, machine in said:
        if text:
            machines[text].append(machine)
    return [(text, listed(names, noun="machines")) for text, names in machines.items()]
