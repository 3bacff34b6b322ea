"""If no machine of a job answers, other machines of the cluster show whether the worker is cut off."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from temporalio.client import Client

from activities.agents.stop_ranks import StopRanks
from activities.clusters.cluster import ListedCluster, Listing
from activities.heartbeat import steady_ns
from activities.watching.job_view import JobView
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError
from everstep.model.evidence import Evidence
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from tests.activities.performing import perform
from tests.activities.spoken import reached

AWAY = Machine(name="m9", address="127.0.0.1:1")


async def stopped(agents: AgentClients, machines: list[Machine], cluster: list[Machine] | None) -> Evidence:
    """Return the evidence of a job on ``machines``; None: the cluster's list cannot be read."""

    def listing() -> Listing:
        if cluster is None:
            raise ConfigError("the list of machines cannot be read")
        return Listing(machines=cluster, standbys=1)

    job = PlacedJob(spec=JobSpec(name="gpt", script="/train.py", machines=len(machines)), machines=machines)
    stop = StopRanks(job=job, generation=1, patience_s=0.5, probed=True)
    return await perform(stop, agents=agents, cluster=ListedCluster(listing))


@pytest.mark.parametrize("machines", [1, 2])
async def test_the_worker_may_be_cut_off_if_no_machine_of_the_cluster_answers(machines: int) -> None:
    standby = FakeAgent(describe=pb.DescribeReply(machine="m5"))
    async with reached([standby]) as (agents, [answers]):
        job = [Machine(name=f"m{number}", address=f"127.0.0.1:{number + 2}") for number in range(machines)]
        assert (await stopped(agents, job, [*job, AWAY])).cut_off
        assert (await stopped(agents, job, job)).cut_off, "the cluster has no other machine that could answer"
        assert (await stopped(agents, job, None)).cut_off
        found = await stopped(agents, job, [*job, AWAY, answers])
        assert (found.cut_off, found.unreachable) == (False, [machine.name for machine in job])


async def test_others_are_not_asked_while_a_machine_of_the_job_answers() -> None:
    here, standby = FakeAgent(stop=pb.StopReply()), FakeAgent(describe=NEVER)
    async with reached([here, standby]) as (agents, [answers, other]):
        found = await stopped(agents, [answers, AWAY], [answers, AWAY, other])
    assert (found.cut_off, found.unreachable) == (False, ["m9"])


async def test_the_watcher_of_a_job_of_one_machine_asks_others_while_the_machine_is_silent() -> None:
    policy = RecoveryPolicy(silence={"detect_s": 0.2})
    view = JobView(JobSpec(name="gpt", script="/train.py", machines=1, policy=policy), [AWAY])
    view.known = (1, 7)
    standby = FakeAgent(describe=pb.DescribeReply(machine="m5"))
    async with reached([standby]) as (agents, [other]):
        cluster = ListedCluster(lambda: Listing(machines=[AWAY, other], standbys=1))
        asking = asyncio.create_task(Watcher(cast(Client, None), agents, "queue", cluster=cluster)._ask_others(view))
        try:
            async with asyncio.timeout(20):
                while not view.facts(1, steady_ns()).others_answer:  # noqa: ASYNC110 - nobody tells us
                    await asyncio.sleep(0.05)
        finally:
            asking.cancel()
        assert view.facts(1, steady_ns()).unheard_s["m9"] >= 0.2
