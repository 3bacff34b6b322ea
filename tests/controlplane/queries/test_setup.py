"""What agents lack on their machines: who is asked, and which answers share a line."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from controlplane.queries.setup import AGENT, ANSWERS_SHOWN, SetupAnswer, ask_setup, folded
from everstep.model.finding import Health
from everstep.model.machine import Machine
from tests.activities.spoken import serving

VERDICTS = st.sampled_from(list(Health))
ANSWERS = st.lists(st.tuples(st.sampled_from(["kernel-log", "clock"]), VERDICTS, st.sampled_from("abcdefghij")))


def made(answers: Iterable[tuple[str, Health, str]]) -> list[SetupAnswer]:
    """Return an answer of each machine."""
    return [
        SetupAnswer(name=name, verdict=verdict, text=text, machines=[f"gpu-{number}"])
        for number, (name, verdict, text) in enumerate(answers)
    ]


def checked(machine: str, **verdicts: str) -> pb.CheckSetupReply:
    checks = [pb.SetupCheck(name=name, verdict=verdict, text="found") for name, verdict in verdicts.items()]
    return pb.CheckSetupReply(machine=machine, checks=checks)


@pytest.mark.asyncio
async def test_every_agent_checks_itself_and_tries_the_next_machine() -> None:
    agents = [FakeAgent(f"gpu-{number}", check_setup=checked(f"gpu-{number}", clock="healthy")) for number in range(3)]
    pool = AgentClients()
    async with serving(agents) as served:
        machines = [Machine(name=f"gpu-{number}", address=one.address) for number, one in enumerate(served)]
        answers = await ask_setup(pool, machines)
        asked = [(request.peer, request.address) for agent in agents for request in agent.asked("check_setup")]
    await pool.close()

    everybody = [machine.name for machine in machines]
    assert [(answer.name, answer.verdict, answer.machines) for answer in answers] == [
        (AGENT, Health.HEALTHY, everybody),
        ("clock", Health.HEALTHY, everybody),
    ]
    assert asked == [(machine.name, machine.address) for machine in [*machines[1:], machines[0]]]


@pytest.mark.asyncio
async def test_an_agent_that_is_silent_or_has_another_name_lacks_its_agent() -> None:
    pool, agent = AgentClients(), FakeAgent("gpu-9", check_setup=checked("gpu-9", clock="healthy"))
    async with serving([agent]) as [served]:
        machines = [Machine(name="gpu-0", address=served.address), Machine(name="gpu-1", address="127.0.0.1:1")]
        answers = await ask_setup(pool, machines)
    await pool.close()

    assert {answer.name for answer in answers} == {AGENT}, "nothing is said about a machine that did not answer"
    by_machine = {answer.machines[0]: answer for answer in answers}
    assert by_machine["gpu-0"].text == f"the agent at {served.address} has the name gpu-9"
    assert by_machine["gpu-1"].text.startswith("the agent at its address did not answer: ")
    assert {answer.verdict for answer in answers} == {Health.FAULTY}


@pytest.mark.asyncio
async def test_the_only_machine_has_no_next_one() -> None:
    pool, agent = AgentClients(), FakeAgent("gpu-0", check_setup=checked("gpu-0"))
    async with serving([agent]) as [served]:
        await ask_setup(pool, [Machine(name="gpu-0", address=served.address)])
        assert agent.asked("check_setup") == [pb.CheckSetupRequest()]
    await pool.close()


def test_equal_answers_of_1200_machines_are_one() -> None:
    lack = [("kernel-log", Health.FAULTY, "it cannot be read")]
    answers = made([*(lack * 1199), ("kernel-log", Health.HEALTHY, "it can be read")])

    assert [(answer.verdict, len(answer.machines)) for answer in folded(answers)] == [
        (Health.FAULTY, 1199),
        (Health.HEALTHY, 1),
    ]


def test_different_answers_of_1200_machines_are_few_lines() -> None:
    answers = folded(made(("ports", Health.FAULTY, f"port {number}") for number in range(1200)))

    assert len(answers) == ANSWERS_SHOWN + 1
    assert answers[-1].text == f"{1200 - ANSWERS_SHOWN} other answers"


@given(ANSWERS)
def test_no_machine_is_lost_and_no_line_is_too_many(answers: list[tuple[str, Health, str]]) -> None:
    found = folded(made(answers))

    told = sorted((answer.name, machine) for answer in found for machine in answer.machines)
    assert told == sorted((name, f"gpu-{number}") for number, (name, _, _) in enumerate(answers))
    for name in ("kernel-log", "clock"):
        lines = [answer for answer in found if answer.name == name]
        assert len(lines) <= ANSWERS_SHOWN + 2
        assert [line.verdict is Health.HEALTHY for line in lines] == sorted(
            line.verdict is Health.HEALTHY for line in lines
        ), "healthy machines come last"
        has_fault = any(verdict is Health.FAULTY for of, verdict, _ in answers if of == name)
        assert (Health.FAULTY in {line.verdict for line in lines}) is has_fault
