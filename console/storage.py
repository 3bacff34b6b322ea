"""Whether a job's checkpoints can be written where it wants them: asked of its machines before it starts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent.v1 import agent_pb2 as pb
from console.resume import listed
from everstep.errors import AgentError, ConfigError

if TYPE_CHECKING:
    from console.control import Control
    from everstep.job import JobSpec
    from everstep.machine import Machine

ASKING_S = 15.0
"""A machine that has not answered by then is not judged: it is not known to lack anything (ours)."""


async def check_storage(control: Control, spec: JobSpec, machines: Sequence[Machine]) -> None:
    """Let every machine of a job try ``disk_path`` and ``remote_url``.

    Raises:
        ConfigError: some machine cannot write there, and waiting would not help; says which and why.
    """
    policy = spec.checkpoint
    request = pb.CheckStorageRequest(job=spec.name, disk_path=policy.disk_path, remote_url=policy.remote_url)
    if not policy.disk or not (policy.disk_path or policy.remote_url):
        return

    async def one(machine: Machine) -> Sequence[str]:
        try:
            reply = await control.agents.get(machine.address).check_storage(request, timeout_s=ASKING_S)
        except AgentError:
            return ()
        return reply.problems

    found = dict(zip([one.name for one in machines], await asyncio.gather(*map(one, machines)), strict=True))
    if any(found.values()):
        raise ConfigError(refusal(spec.name, found))


def refusal(job: str, found: Mapping[str, Sequence[str]]) -> str:
    """What a person is told: each problem once, with the machines that have it."""
    having: dict[str, list[str]] = defaultdict(list)
    for machine, problems in found.items():
        for problem in problems:
            having[problem].append(machine)
    told = [f"{problem} (seen from {_seen_from(machines, len(found))})" for problem, machines in having.items()]
    return f"job {job} is not started, its checkpoints could not be written: {'; '.join(told)}"


def _seen_from(machines: Sequence[str], all_machines: int) -> str:
    return f"all {all_machines} machines" if len(machines) == all_machines > 1 else listed(machines)
