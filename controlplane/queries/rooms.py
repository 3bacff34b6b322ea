"""The free memory of the machines of a cluster, from their agents, for ``everstep plan``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.errors import ClusterError, EverstepError
from everstep.model.machine import Machine


async def smallest_room(agents: AgentClients, machines: Sequence[Machine]) -> tuple[dict[str, float], str]:
    """The least memory and the least shared memory that is free on any machine, and where this is known from.

    Machines on loopback addresses share this computer's memory, so each of them has its part of it.

    Args:
        agents: Clients of the agents.
        machines: The machines to ask.

    Returns:
        Values of ``memory_gb`` and ``shm_gb`` of ``Hardware``, and a text that names machines without an answer.

    Raises:
        ClusterError: no machine answers.
    """

    async def ask(machine: Machine) -> pb.Room | None:
        try:
            reply = await agents.get(machine.address).describe()
        except EverstepError:
            return None
        return reply.room if reply.HasField("room") else None

    answers = dict(zip(machines, await asyncio.gather(*map(ask, machines)), strict=True))
    rooms = {machine: room for machine, room in answers.items() if room is not None}
    if not rooms:
        raise ClusterError(f"none of {len(machines)} machines answers: start their agents, or leave out --cluster")
    silent = [machine.name for machine in machines if machine not in rooms]
    on_host = Counter(_host(machine) for machine in machines)
    least = {
        "memory_gb": min(room.memory_available / on_host[_host(machine)] for machine, room in rooms.items()) / 1e9,
        "shm_gb": min(room.shm_free / on_host[_host(machine)] for machine, room in rooms.items()) / 1e9,
    }
    unknown = f", without an answer of {listed(silent)}" if silent else ""
    return least, f"free on the smallest machine of the cluster{unknown}"


def _host(machine: Machine) -> str:
    return "this computer" if machine.host.startswith("127.") else machine.name
