"""Asks machines outside of a job whether they answer.

If no machine of a job answers, the machines may be lost, or the worker that asks may be cut off from the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from activities.turns import gathered
from everstep.errors import EverstepError
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.clusters.cluster import Cluster
    from agent.client import AgentClients

ASKED = 16
"""The largest number of machines that are asked."""
ANSWER_S = 2.0
"""The time that they have to answer, seconds."""


async def another_answers(agents: AgentClients, cluster: Cluster | None, machines: Sequence[Machine]) -> bool:
    """Return whether a machine of the cluster besides these machines answers. The standbys are asked first."""

    async def answers(machine: Machine) -> bool:
        try:
            await agents.get(machine.address).describe(timeout_s=ANSWER_S)
        except EverstepError:
            return False
        return True

    try:
        known = (await cluster.list()).machines if cluster else []
    except EverstepError:
        return False
    of_job = {machine.address for machine in machines}
    others = [machine for machine in reversed(known) if machine.address not in of_job]
    return any(await gathered(map(answers, others[:ASKED])))
