"""Checks, before a job starts, whether its machines can write checkpoints and have the variables that it needs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.errors import AgentError, ConfigError

if TYPE_CHECKING:
    from controlplane.client import Control
    from everstep.model.job import JobSpec
    from everstep.model.machine import Machine

ASKING_S = 15.0
"""A machine that does not answer within this time is not checked, seconds."""


async def check_storage(control: Control, spec: JobSpec, machines: Sequence[Machine]) -> None:
    """Let every machine of a job test ``disk_path`` and ``remote_url``, and check for the variables in ``env_from``.

    Raises:
        ConfigError: a machine cannot write there, or lacks a variable; the message names the machine and why.
    """
    policy = spec.checkpoint
    asked = policy.disk and bool(policy.disk_path or policy.remote_url)
    if not (asked or spec.env_from):
        return
    request = pb.CheckStorageRequest(
        job=spec.name,
        disk_path=policy.disk_path if asked else "",
        remote_url=policy.remote_url if asked else "",
        env_from=spec.env_from,
        env_file=spec.env_file,
    )

    async def check_machine(machine: Machine) -> pb.CheckStorageReply:
        try:
            return await control.agents.get(machine.address).check_storage(request, timeout_s=ASKING_S)
        except AgentError:
            return pb.CheckStorageReply()

    replies = await asyncio.gather(*map(check_machine, machines))
    if missing := sorted(reply.missing for reply in replies if reply.missing):
        rest = f"; and {len(missing) - 1} more machines lack some" if len(missing) > 1 else ""
        raise ConfigError(f"job {spec.name} is not started: {missing[0]}{rest}")
    problems_of = {machine.name: reply.problems for machine, reply in zip(machines, replies, strict=True)}
    if any(problems_of.values()):
        raise ConfigError(refusal(spec.name, problems_of))


def refusal(job: str, problems_of: Mapping[str, Sequence[str]]) -> str:
    """The error message: each problem once, with the machines that report it."""
    machines_of: dict[str, list[str]] = defaultdict(list)
    for machine, problems in problems_of.items():
        for problem in problems:
            machines_of[problem].append(machine)
    count = len(problems_of)
    texts = [
        f"{problem} (reported by {f'all {count} machines' if len(machines) == count > 1 else listed(machines)})"
        for problem, machines in machines_of.items()
    ]
    return f"job {job} is not started, since its checkpoints could not be written: {'; '.join(texts)}"
