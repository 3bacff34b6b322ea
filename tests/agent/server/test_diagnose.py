"""The RPC Diagnose of a real agent. One diagnosis runs at a time, and none beside ranks. New callers can follow it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from agent.launcher.processes import family_of
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, ConfigError
from tests.agent.agents import Job, RunningAgent, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLEEPS = "import time; time.sleep(600)"


def request(request_id: str, *tests: str, job: str = "", run: str = "", **settings: object) -> pb.DiagnoseRequest:
    asked = [pb.TestToRun(name=test, settings=json.dumps(settings)) for test in tests]
    return pb.DiagnoseRequest(request_id=request_id, job=job, run=run, tests=asked)


def waiting(request_id: str) -> pb.DiagnoseRequest:
    """Return a request for a test that waits for another machine, which never connects."""
    return pb.DiagnoseRequest(
        request_id=request_id,
        tests=[pb.TestToRun(name="nic", settings='{"deadline_s": 600}')],
        peer=pb.TestPeer(position=0, secret="x"),
    )


async def all_of(stream: AsyncIterator[pb.DiagnoseReply]) -> list[pb.DiagnoseReply]:
    async with asyncio.timeout(100):
        return [reply async for reply in stream]


def kinds(replies: list[pb.DiagnoseReply]) -> list[str]:
    return [str(reply.WhichOneof("what")) for reply in replies]


async def test_results_are_streamed_and_repeated_for_the_same_request(agent: RunningAgent) -> None:
    asked = request("one", "memory", "memory", mb=2, seconds=0.01)
    first = await all_of(agent.client.diagnose(asked))
    second = await all_of(agent.client.diagnose(asked))

    assert kinds(first) == ["begun", "result", "begun", "result", "over"]
    assert second == first, "the same request runs no test again"
    assert [reply.result.measures["tested_bytes"] for reply in first if reply.HasField("result")] == [2e6, 2e6]
    assert (first[0].begun.number, first[0].begun.of) == (1, 2)


async def test_a_test_that_has_not_begun_in_time_is_unknown(agent: RunningAgent) -> None:
    asked = request("late", "memory", "memory", mb=2, seconds=1.0)
    asked.limit_s = 0.5
    said = [reply.result for reply in await all_of(agent.client.diagnose(asked)) if reply.HasField("result")]

    assert [[one.reason for one in result.findings] for result in said] == [["test-unable"], ["test-unable"]]
    assert "of the 0.5 s for all tests" in said[0].findings[0].text


async def test_a_test_knows_its_time_limit_and_is_not_killed(agent: RunningAgent, tmp_path: Path) -> None:
    """A killed test could not undo its changes, for example to the clocks of GPUs."""
    (dcgmi := tmp_path / "dcgmi").write_text("#!/bin/sh\nexec sleep 600\n")
    dcgmi.chmod(0o755)
    asked = request("short", "eud", command=str(dcgmi), deadline_s=1200.0)
    asked.limit_s = 3.0
    [said] = [reply.result for reply in await all_of(agent.client.diagnose(asked)) if reply.HasField("result")]

    assert [one.reason for one in said.findings] == ["test-unable"]
    assert "did not end within" in said.findings[0].text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("wrong", "teleport"), "there is no test 'teleport'"),
        (request("wrong", "memory", mb=-1), "mb is -1"),
        (request("wrong", "nic"), "needs two machines"),
        (request("wrong", "memory", job="../etc"), "is not a job name"),
    ],
)
async def test_an_impossible_request_is_refused(agent: RunningAgent, asked: pb.DiagnoseRequest, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await all_of(agent.client.diagnose(asked))


async def test_a_second_diagnosis_is_refused_until_the_first_one_ends(agent: RunningAgent) -> None:
    async with aclosing(agent.client.diagnose(waiting(""))) as stream:  # type: ignore[type-var]
        assert kinds([await anext(stream), await anext(stream)]) == ["begun", "waits"]
        with pytest.raises(AgentError, match="another diagnosis is running"):
            await all_of(agent.client.diagnose(request("two", "memory")))
    # The first diagnosis ends with its caller, because its request had no id.
    found = None
    while found is None:
        try:
            found = await all_of(agent.client.diagnose(request("three", "memory", mb=2, seconds=0.01)))
        except AgentError:
            await asyncio.sleep(0.05)
    assert kinds(found) == ["begun", "result", "over"]


async def test_ranks_take_precedence_over_a_diagnosis(agent: RunningAgent) -> None:
    """A diagnosis is refused while ranks live, and must name the job that it follows.

    A launch of ranks ends a running diagnosis.
    """
    job = Job(agent, SLEEPS, ranks=1)
    await job.prepare()
    await job.launch()
    await job.entered()
    with pytest.raises(AgentError, match=f"ranks 0 of {job.name} run on m1"):
        await all_of(agent.client.diagnose(request("beside", "memory", job=job.name)))
    await job.stop()
    with pytest.raises(AgentError, match=f"has the job {job.name}"):
        await all_of(agent.client.diagnose(request("stranger", "memory")))
    found = await all_of(agent.client.diagnose(request("for it", "memory", job=job.name, mb=2, seconds=0.01)))
    assert kinds(found) == ["begun", "result", "over"]

    long = waiting("ended")
    long.job = job.name
    stream = agent.client.diagnose(long)
    assert kinds([await anext(stream), await anext(stream)]) == ["begun", "waits"]
    await job.launch(2)
    with pytest.raises(AgentError, match="the diagnosis was ended: ranks are started"):
        await all_of(stream)
    await job.entered()
    await job.release()


async def test_after_a_caller_died_another_one_can_follow_the_diagnosis(agent: RunningAgent) -> None:
    async with aclosing(agent.client.diagnose(waiting("kept"))) as stream:  # type: ignore[type-var]
        first = [await anext(stream), await anext(stream)]
    async with aclosing(agent.client.diagnose(waiting("kept"))) as stream:  # type: ignore[type-var]
        assert [await anext(stream), await anext(stream)] == first, (
            "the second caller gets the same diagnosis, with the same port"
        )
    job = Job(agent, SLEEPS, ranks=1)
    await job.prepare()
    await job.launch()  # a launch ends the diagnosis
    await job.stop()
    await job.release()


async def test_no_process_of_a_diagnosis_outlives_the_agent(agent: RunningAgent) -> None:
    stream = agent.client.diagnose(waiting("last"))
    assert kinds([await anext(stream), await anext(stream)]) == ["begun", "waits"]
    [mark] = _marks(agent)
    agent.kill(15)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: not family_of(-1, mark), "the processes of its tests are gone")
    await agent.start()


def _marks(agent: RunningAgent) -> set[str]:
    """Return the marks of this agent's diagnostic processes."""
    from everstep.system.procfs import PROC, living

    assert agent.process
    found = set()
    for process in living():
        if process.parent == agent.process.pid:
            try:
                variables = (PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {one.decode() for one in variables if one.startswith(b"EVERSTEP_DIAGNOSIS=")}
    return found
