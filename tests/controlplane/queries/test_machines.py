"""The summary of the inspections of several machines. The agents are fakes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from controlplane.queries.machines import MachineReport, ask_machines, odd_ones
from everstep.errors import AgentError, AgentUnreachable
from everstep.model.finding import Health
from everstep.model.machine import Machine

HOT = pb.Finding(inspection="gpu", reason="gpu-hot", verdict="faulty", item="GPU 3", owner="machine", sure=True)
BUSY = pb.Finding(inspection="cpu", reason="cpu-overload", verdict="unknown", owner="unknown", since_ns=1)


def said(*findings: pb.Finding, verdict: str = "healthy", driver: str = "570") -> pb.InspectReply:
    state = pb.InspectionState(name="all", verdict=verdict, findings=findings, facts={"nvidia driver": driver})
    return pb.InspectReply(machine="m", time_ns=9, verdict=verdict, inspections=[state])


async def asked(*replies: pb.InspectReply | Exception) -> list[MachineReport]:
    agents = [FakeAgent(f"m{index}", inspect=reply) for index, reply in enumerate(replies)]
    pool = AgentClients()
    try:
        for agent in agents:
            await agent.start()
        machines = [Machine(name=agent.machine, address=agent.address) for agent in agents]
        return await ask_machines(pool, machines)
    finally:
        await pool.close()
        for agent in agents:
            await agent.stop()


async def test_each_machine_says_what_it_is() -> None:
    found = await asked(said(), said(BUSY, HOT, verdict="faulty"), said(BUSY, verdict="unknown"))

    assert [report.verdict for report in found] == [Health.HEALTHY, Health.FAULTY, Health.UNKNOWN]
    assert [seen.reason for seen in found[1].findings] == ["gpu-hot", "cpu-overload"]


@pytest.mark.parametrize("error", [AgentUnreachable("it is away"), AgentError("no")])
async def test_a_machine_that_does_not_say_is_unknown_and_hides_no_other(error: Exception) -> None:
    silent, other = await asked(error, said())

    assert (silent.verdict, other.verdict) == (Health.UNKNOWN, Health.HEALTHY)
    assert silent.problem


async def test_without_inspections_nothing_is_known() -> None:
    [report] = await asked(pb.InspectReply(machine="m0", verdict="healthy"))
    assert (report.verdict, report.problem) == (Health.UNKNOWN, "its monitor is off")


def reports(drivers: Iterable[str]) -> list[MachineReport]:
    return [
        MachineReport(machine=f"m{index}", address="", verdict=Health.HEALTHY, facts={"driver": driver, "kernel": "6"})
        for index, driver in enumerate(drivers)
    ]


def test_what_differs_is_told_from_what_is_usual() -> None:
    [odd] = odd_ones(reports(["570", "570", "550", "570"]))
    assert (odd.fact, odd.value, odd.machines, odd.usual) == ("driver", "550", ["m2"], "570")
    assert odd_ones(reports(["570", "570"])) == []


def test_of_two_values_that_are_equally_frequent_neither_is_usual() -> None:
    assert [(odd.value, odd.usual) for odd in odd_ones(reports(["550", "570"]))] == [("550", ""), ("570", "")]
