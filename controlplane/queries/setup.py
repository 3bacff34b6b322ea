"""What the agents of a cluster lack on their machines, with equal answers of machines in one line."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.errors import EverstepError
from everstep.model.finding import Health
from everstep.model.machine import Machine

ANSWER_S = 30.0
"""A machine that does not answer within this time counts as silent, seconds."""
ANSWERS_SHOWN = 5
"""Number of different answers to one check that are listed."""
AGENT = "agent"
"""Name of the check whether an agent answers under its own name."""


class SetupAnswer(BaseModel):
    """The answer of some machines to one check."""

    name: str
    """Name of the check (``agent/needs.py``), or ``AGENT``."""
    verdict: Health
    """Faulty: the machines lack what the check is about."""
    text: str
    """What was found."""
    remedy: str = ""
    """What to do; empty: nothing."""
    machines: list[str]


async def ask_setup(agents: AgentClients, machines: Sequence[Machine]) -> list[SetupAnswer]:
    """Ask all agents at the same time. Each agent also tries to reach the agent of the next machine in the list.

    Args:
        agents: Clients by address.
        machines: The machines of the cluster.
    """

    async def ask(machine: Machine, peer: Machine) -> list[SetupAnswer]:
        others = {"peer": peer.name, "address": peer.address} if peer is not machine else {}
        try:
            reply = await agents.get(machine.address).check_setup(pb.CheckSetupRequest(**others), timeout_s=ANSWER_S)
        except EverstepError as error:
            remedy = "start the agent, or correct its address, certificate or token"
            text = str(error).replace(machine.address, "its address")  # equal texts are shown once
            return [_answer(machine, AGENT, Health.FAULTY, text, remedy)]
        if reply.machine != machine.name:
            text = f"the agent at {machine.address} has the name {reply.machine}"
            return [_answer(machine, AGENT, Health.FAULTY, text, "correct one of the two names")]
        answers = [_answer(machine, one.name, Health(one.verdict), one.text, one.remedy) for one in reply.checks]
        return [_answer(machine, AGENT, Health.HEALTHY, "it answers"), *answers]

    peers = [*machines[1:], *machines[:1]]
    return folded([answer for answers in await asyncio.gather(*map(ask, machines, peers)) for answer in answers])


def folded(answers: Iterable[SetupAnswer]) -> list[SetupAnswer]:
    """Join equal answers. For each check, the faulty answers come first, then those of most machines.

    All healthy answers to a check are one answer. Of the other answers, at most ``ANSWERS_SHOWN`` are listed, and a
    last answer has the machines of the remaining ones.
    """
    checks: dict[str, dict[tuple[Health, str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        checks[answer.name][answer.verdict, answer.text, answer.remedy] += answer.machines
    return [joined for name, found in checks.items() for joined in _of_check(name, found)]


def _of_check(name: str, found: dict[tuple[Health, str, str], list[str]]) -> list[SetupAnswer]:
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    rows = [
        SetupAnswer(name=name, verdict=verdict, text=text, remedy=remedy, machines=machines)
        for (verdict, text, remedy), machines in found.items()
    ]
    rows.sort(key=lambda row: (order.get(row.verdict, 2), -len(row.machines)))
    healthy = [row for row in rows if row.verdict is Health.HEALTHY]
    others = [row for row in rows if row.verdict is not Health.HEALTHY]
    shown, rest = others[:ANSWERS_SHOWN], others[ANSWERS_SHOWN:]
    if rest:
        machines = [machine for row in rest for machine in row.machines]
        text = f"{len(rest)} other answers"
        shown.append(SetupAnswer(name=name, verdict=rest[0].verdict, text=text, machines=machines))
    if healthy:
        machines = [machine for row in healthy for machine in row.machines]
        shown.append(healthy[0].model_copy(update={"machines": machines}))
    return shown


def _answer(machine: Machine, name: str, verdict: Health, text: str, remedy: str = "") -> SetupAnswer:
    return SetupAnswer(name=name, verdict=verdict, text=text, remedy=remedy, machines=[machine.name])
