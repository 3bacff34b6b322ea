"""The activities that launch, stop and prepare ranks, on real and on fake agents."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.activity import SOON
from activities.agents import evidence
from activities.agents.await_machines import AwaitMachines
from activities.agents.evidence import evidence_of
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.release_machines import ReleaseMachines
from activities.agents.stop_ranks import StopRanks
from agent.client import AgentClients
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.model.evidence import Evidence
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from tests.activities.performing import perform
from tests.activities.spoken import serving
from tests.agent.agents import running_agent
from tests.sized import RANKS, SMALL, stop_replies


def large(machines: int) -> FakeAgent:
    """Return an agent whose answer to a stop is as large as the answers of ``machines`` agents together."""
    reply = pb.StopReply()
    for one in stop_replies(machines).values():
        reply.MergeFrom(one)
    return FakeAgent(stop=reply)


async def test_others_have_their_turns_while_evidence_of_thousands_of_ranks_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = JobSpec(name="large", script="/job.py", machines=1, ranks_per_machine=RANKS * SMALL)
    agent, pool = large(SMALL), AgentClients()
    turns, within = 0, []

    async def heartbeat() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    def counting(*given: Any) -> Evidence:
        before = turns
        found = evidence_of(*given)
        within.append(turns - before)
        return found

    monkeypatch.setattr(evidence, "evidence_of", counting)
    async with serving([agent]) as machines:
        beating = asyncio.create_task(heartbeat())
        given = StopRanks(job=PlacedJob(spec=spec, machines=machines), generation=1)
        found = await asyncio.wait_for(perform(given, agents=pool), 60)
        beating.cancel()
        await pool.close()
    assert sum(len(end.ranks) for end in found.exits) == RANKS * SMALL
    assert within[0] >= 3


async def test_machines_are_waited_for_until_all_answer() -> None:
    pool = AgentClients()
    async with serving([FakeAgent(describe=pb.DescribeReply(machine="m0"))]) as machines:
        away = Machine(name="m1", address="127.0.0.1:1")
        given = AwaitMachines(machines=[*machines, away], patience_s=1.0)
        with pytest.raises(ApplicationError, match="waiting for m1: its agent does not answer") as refused:
            await perform(given, agents=pool)

        assert refused.value.next_retry_delay == SOON, "the server asks again, and no worker waits meanwhile"
        everybody = AwaitMachines(machines=machines, patience_s=60.0)
        await perform(everybody, agents=pool)
    await pool.close()


async def test_the_store_of_a_job_takes_a_port_of_its_range() -> None:
    store = pb.StartStoreReply(host="::1", port=29501)
    agent, pool = FakeAgent(start_store=store, launch=pb.LaunchReply(generation=1)), AgentClients()
    for ports, first, last in (("29500-29510", 29500, 29510), ("29500", 29500, 29500), ("", 0, 0)):
        spec = JobSpec(name="gpt", script="/job.py", store_ports=ports)
        async with serving([agent]) as machines:
            given = LaunchRanks(job=PlacedJob(spec=spec, machines=machines), generation=1, resume_step=-1)
            await perform(given, ActivityEnvironment(), agents=pool)
        asked = [call.request for call in agent.calls if call.method == "start_store"][-1]
        assert (asked.first_port, asked.last_port) == (first, last)
        launch = [call.request for call in agent.calls if call.method == "launch"][-1]
        assert (launch.program.env["MASTER_ADDR"], launch.program.env["MASTER_PORT"]) == ("::1", "29501")
    await pool.close()


async def test_a_launch_compares_no_machine_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search in the list of all machines for each machine would take a second with 2,000 machines."""
    store = pb.StartStoreReply(host="m0", port=1)
    agents, pool = (
        [FakeAgent(start_store=store, launch=pb.LaunchReply(generation=1)) for _ in range(12)],
        AgentClients(),
    )
    spec = JobSpec(name="large", script="/job.py", machines=12, ranks_per_machine=2)
    compared: list[object] = []

    def compare(one: Machine, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(Machine, "__eq__", compare)
    async with serving(agents) as machines:
        given = LaunchRanks(job=PlacedJob(spec=spec, machines=machines), generation=1, resume_step=-1)
        await asyncio.wait_for(perform(given, agents=pool), 60)
        await pool.close()
    asked = [[rank.rank for rank in agent.asked("launch")[0].ranks] for agent in agents]
    assert asked == [[2 * n, 2 * n + 1] for n in range(12)]
    assert not compared


async def test_a_machine_that_was_never_prepared_takes_part_in_a_reattempt(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import time\ntime.sleep(600)\n")
    spec = JobSpec(name="late", script=str(script))
    async with running_agent(tmp_path / "agent") as agent:
        machines, pool = [Machine(name="m1", address=agent.address)], AgentClients()
        job, environment = PlacedJob(spec=spec, machines=machines), ActivityEnvironment()
        # The agent was silent when the job was prepared. So the incident's stop is the first command that it gets.
        await perform(StopRanks(job=job, generation=1), environment, agents=pool)
        launched = await asyncio.wait_for(
            perform(LaunchRanks(job=job, generation=2, resume_step=0), environment, agents=pool), 60
        )
        assert launched.generation == 2
        living = [rank.alive for job in (await agent.client.describe()).jobs for rank in job.ranks]
        assert living == [True]
        await perform(ReleaseMachines(job=job), environment, agents=pool)
        with pytest.raises(ApplicationError, match="over"):  # a launch after the release starts nothing
            await perform(LaunchRanks(job=job, generation=3, resume_step=0), environment, agents=pool)
        await pool.close()


async def test_a_variable_that_a_machine_lacks_is_named_before_anything_is_started(tmp_path: Path) -> None:
    spec = JobSpec(name="lacks", script="/job.py", env_from=["EVEN_MORE_SECRET"])
    async with running_agent(tmp_path / "agent") as agent:
        machines, pool = [Machine(name="m1", address=agent.address)], AgentClients()
        with pytest.raises(ApplicationError, match=r"EVEN_MORE_SECRET, .* environment on m1") as caught:
            await perform(PrepareMachines(job=PlacedJob(spec=spec, machines=machines)), agents=pool)
        assert caught.value.non_retryable
        assert list((await agent.client.describe()).jobs) == []
        await pool.close()


@pytest.mark.parametrize("part", ["prepare", "launch"])
async def test_a_machine_that_stands_still_is_given_up_where_another_may_come(part: str) -> None:
    """Another machine can replace this one. So it is given up within seconds, and without another request."""
    spec, pool = JobSpec(name="job", script="/job.py", machines=2), AgentClients()
    store = pb.StartStoreReply(host="m0", port=1)
    well = FakeAgent(prepare=pb.PrepareReply(fork_server_pid=1), start_store=store, launch=pb.LaunchReply(generation=2))
    still = FakeAgent(prepare=NEVER, launch=NEVER, describe=NEVER)
    async with serving([well, still]) as machines:
        job, bounds = PlacedJob(spec=spec, machines=machines), {"patience_s": 0.5, "probed": True}
        asked: dict[str, Any] = {
            "prepare": PrepareMachines(job=job, **bounds),
            "launch": LaunchRanks(job=job, generation=2, resume_step=0, **bounds),
        }
        with pytest.raises(ApplicationError, match="m1 did not") as caught:
            await asyncio.wait_for(perform(asked[part], agents=pool), 30)
        await pool.close()
    assert caught.value.non_retryable


def prepared_with(**libraries: str) -> FakeAgent:
    """Return a machine that has these libraries of a job, and reports them when it prepares the job."""
    here = pb.JobOnMachine(job="job", libraries=libraries)
    return FakeAgent(
        prepare=pb.PrepareReply(fork_server_pid=1, libraries=libraries), describe=pb.DescribeReply(jobs=[here])
    )


async def test_a_machine_with_other_libraries_than_the_job_has_is_refused() -> None:
    spec, pool = JobSpec(name="job", script="/job.py", machines=4), AgentClients()
    silent, former = FakeAgent(describe=NEVER), prepared_with()
    agents = [prepared_with(torch="2.9.1"), prepared_with(torch="2.8.0"), silent, former]
    async with serving(agents) as machines:
        new, other = machines[:2]

        async def prepared(like: list[Machine]) -> float:
            given = PrepareMachines(job=PlacedJob(spec=spec, machines=[new]), like=like, probed=True, patience_s=5.0)
            return await perform(given, agents=pool)

        with pytest.raises(ApplicationError, match=r"m0 has torch 2\.9\.1 instead of 2\.8\.0") as caught:
            await prepared([machines[2], other])  # machines[2] does not answer, and is not waited for
        assert caught.value.non_retryable
        assert await prepared([machines[3]]) == 0.0, (
            "the other machine reports no libraries, so there is nothing to compare"
        )
        assert await prepared([new]) == await prepared([]) == 0.0
        await pool.close()
