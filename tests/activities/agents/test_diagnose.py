"""The activity that diagnoses machines combines the answers of their agents. A silent machine's verdict is unknown."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.agents.diagnose_machines import DiagnoseMachines, Diagnosing
from agent.client import AgentClients
from agent.fake import FakeAgent, no_findings
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, AgentUnreachable
from everstep.model.diagnosis import Diagnosis
from everstep.model.finding import Health
from everstep.model.machine import Machine
from tests.activities.performing import perform
from tests.activities.spoken import serving

ALONE, BETWEEN = ["memory", "bitwise"], ["all-gather", "nic"]


def reply(name: str, **said: Any) -> list[pb.DiagnoseReply]:
    begun = pb.DiagnoseReply(begun=pb.TestBegun(name=name, number=1, of=1))
    return [begun, pb.DiagnoseReply(result=pb.TestResult(name=name, **said)), pb.DiagnoseReply(over=pb.DiagnosisOver())]


def bits(digest: str) -> Callable[[pb.DiagnoseRequest], Any]:
    return lambda request: (
        reply("bitwise", kind="cpu", digests={"rank 0": digest})
        if request.tests[0].name == "bitwise"
        else no_findings(request)
    )


def failing(test: str) -> Callable[[pb.DiagnoseRequest], Any]:
    """Return an agent that fails a test with each partner; the partners fail too."""

    def answer(request: pb.DiagnoseRequest) -> Any:
        if request.tests[0].name != test:
            return no_findings(request)
        finding = pb.Finding(inspection=test, reason=f"{test}-failed", verdict="unknown", text="timed out")
        said = pb.DiagnoseReply(result=pb.TestResult(name=test, findings=[finding]))
        waits = pb.DiagnoseReply(waits=pb.TestWaits(name=test, host="127.0.0.1", port=1))
        return [waits, said, pb.DiagnoseReply(over=pb.DiagnosisOver())]

    return answer


async def diagnosed(agents: list[FakeAgent], *tests: str, also: list[Machine] | None = None, **given: Any) -> Any:
    pool, said, environment = AgentClients(), list[str](), ActivityEnvironment()
    environment.on_heartbeat = lambda *details: said.extend(map(str, details))
    async with serving(agents) as machines:
        asked = DiagnoseMachines(machines=[*machines, *(also or [])], tests=list(tests), **{"patience_s": 0.3} | given)
        found: Diagnosis = await asyncio.wait_for(perform(asked, environment, agents=pool), 60)
    await pool.close()
    return found, said


async def test_all_tests_of_all_machines_and_each_with_both_neighbours() -> None:
    agents = [FakeAgent.empty(f"m{index}") for index in range(4)]
    found, _ = await diagnosed(agents, *ALONE, *BETWEEN, settings={"memory": {"mb": 8}})

    assert found.verdict is Health.HEALTHY
    assert [one.machine for one in found.machines] == ["m0", "m1", "m2", "m3"]
    assert (found.pairs, found.links, found.tests) == ([], [], [*ALONE, *BETWEEN])
    for agent in agents:
        asked = Counter(test.name for request in agent.asked("diagnose") for test in request.tests)
        assert asked == {"memory": 1, "bitwise": 1, "all-gather": 2, "nic": 2}
        assert agent.asked("diagnose")[0].tests[0].settings == '{"mb": 8}'
        ids = [request.request_id for request in agent.asked("diagnose")]
        assert len(set(ids)) == len(ids)


async def test_it_says_how_far_it_is_and_without_an_id_it_ends_with_its_caller() -> None:
    said: list[str] = []
    pool, agents = AgentClients(), [FakeAgent.empty(f"m{index}") for index in range(3)]
    async with serving(agents) as machines:
        given = DiagnoseMachines(machines=machines, tests=["memory", "nic"])
        await asyncio.wait_for(Diagnosing(pool, given, "", said.append).run(), 60)
    await pool.close()

    assert said[0] == "0 of 3 machines are done; memory on 1"
    assert "3 of 3 machines are done" in said
    assert said[-1] == "nic, round 3: 1 pairs of machines"
    assert {request.request_id for agent in agents for request in agent.asked("diagnose")} == {""}


async def test_odd_bits_name_a_machine() -> None:
    agents = [FakeAgent.empty(f"m{n}", diagnose=bits("b" if n == 2 else "a")) for n in range(4)]
    found, _ = await diagnosed(agents, "bitwise")

    assert found.faulty == ["m2"]


@pytest.mark.parametrize("test", BETWEEN)
async def test_a_machine_that_fails_with_all_is_named(test: str) -> None:
    """In a real test its partners fail too. Here they report success, but the pair has still failed."""
    agents = [FakeAgent.empty(f"m{n}", **({"diagnose": failing(test)} if n == 1 else {})) for n in range(5)]
    found, _ = await diagnosed(agents, *BETWEEN)

    assert found.faulty == ["m1"]
    assert [(pair.test, pair.passed) for pair in found.pairs] == [(test, False)] * 2
    assert found.links == []


async def test_who_is_silent_or_refuses_is_unknown_and_in_no_pair() -> None:
    refusing = FakeAgent.empty("m2", diagnose=AgentError("ranks 0 of gpt run on m2"))
    agents = [FakeAgent.empty("m0"), FakeAgent.empty("m1"), refusing]
    away = Machine(name="m3", address="127.0.0.1:1")
    found, _ = await diagnosed(agents, *ALONE, *BETWEEN, also=[away])

    assert {one.machine: one.verdict for one in found.machines} == {
        "m0": Health.HEALTHY,
        "m1": Health.HEALTHY,
        "m2": Health.UNKNOWN,
        "m3": Health.UNKNOWN,
    }
    texts = {one.machine: one.findings[0].text for one in found.machines if one.findings}
    assert "ranks 0 of gpt run on m2" in texts["m2"]
    assert "did not answer" in texts["m3"]
    assert found.pairs == []
    assert len(refusing.asked("diagnose")) == 1


async def test_an_agent_that_goes_away_is_asked_again_for_the_same_diagnosis() -> None:
    tried = 0

    async def breaks_once(request: pb.DiagnoseRequest) -> AsyncIterator[pb.DiagnoseReply]:
        nonlocal tried
        tried += 1
        replies = reply("memory")
        yield replies[0]
        yield replies[1]
        if tried == 1:
            raise AgentUnreachable("gone")
        yield replies[2]

    agent = FakeAgent.empty("m0", diagnose=breaks_once)
    found, _ = await diagnosed([agent], "memory", patience_s=20.0)

    assert found.verdict is Health.HEALTHY
    assert len({request.request_id for request in agent.asked("diagnose")}) == 1
    assert tried == 2
    assert [one.results for one in found.machines] == [[]], "the measurements of a healthy machine are dropped"
