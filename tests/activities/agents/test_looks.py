"""Samples of all ranks of a job, from agents that replay recorded hangs, and the conclusions from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from activities.agents.looks import Judged, RankLook, hang_found, trace
from agent.client import AgentClients
from agent.fake import NEVER, FakeAgent
from agent.tracer.signatures import reduced
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.progress import HangSign
from everstep.errors import AgentUnreachable, UnknownJob
from everstep.model.hang import HangConclusion
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.topology import Topology
from tests.activities.agents.recorded_looks import looks
from tests.activities.spoken import reached

APART_S = 0.05


def telling(replies: list[pb.SampleReply]) -> FakeAgent:
    """Return an agent that gives these answers one after the other, and then repeats the last."""
    left: Iterator[pb.SampleReply] = iter(replies)
    last = [replies[0]]

    def answer(_: pb.SampleRequest) -> pb.SampleReply:
        last[0] = next(left, last[0])
        return last[0]

    return FakeAgent(sample=answer)


def job(topology: Topology) -> JobSpec:
    sizes = dict(topology.mesh)
    return JobSpec(
        name="gpt",
        script="/train.py",
        machines=topology.machines,
        ranks_per_machine=topology.ranks_per_machine,
        tp=sizes.get("tp", 1),
        pp=sizes.get("pp", 1),
    )


async def seen(name: str, other: dict[int, FakeAgent] | None = None, **of: Any) -> tuple[list[RankLook], Judged, int]:
    """Return the samples of a recorded job, their judgement and the rank at fault; ``other`` replaces some agents."""
    topology, culprit, told = looks(name, **of)
    agents = [telling([one[index] for one in told]) for index in range(topology.machines)]
    for index, agent in (other or {}).items():
        agents[index] = agent
    async with reached(agents) as (pool, machines):
        found, judged = await traced(pool, job(topology), machines)
    return found, judged, culprit


async def traced(pool: AgentClients, spec: JobSpec, machines: list[Machine]) -> tuple[list[RankLook], Judged]:
    return await trace(pool, spec, machines, apart_s=APART_S, generation=3, is_hung=True, limit_s=2.0)


@pytest.mark.parametrize("name", ["deadlock", "skip", "loader", "gil"])
async def test_the_rank_is_named_and_does_nothing(name: str) -> None:
    found, judged, culprit = await seen(name)

    verdict = judged.check.verdict
    assert (verdict.conclusion, verdict.ranks, len(found)) == (HangConclusion.NAMES, (culprit,), 2), verdict.reason
    assert judged.check.sign is HangSign.QUIET
    assert judged.evidence.unread == ()


async def test_a_rank_that_computes_may_have_a_long_phase() -> None:
    _, judged, culprit = await seen("spin", cpu_s={1: 600.0})
    assert (judged.check.verdict.ranks, judged.check.sign) == ((culprit,), HangSign.BUSY)


async def test_of_a_stopped_rank_one_look_is_enough() -> None:
    found, judged, culprit = await seen("stop")
    assert (judged.check.verdict.ranks, len(found)) == ((culprit,), 1)
    assert judged.check.sign is HangSign.NEVER


@pytest.mark.parametrize("name", ["healthy", "healthy-pp4", "evaluation"])
async def test_a_job_that_comes_on_does_not_hang(name: str) -> None:
    _, judged, _ = await seen(name)
    assert judged.check.sign is HangSign.COMPUTES
    assert judged.check.verdict.machines == ()


async def test_the_scripts_own_order_is_of_no_machine() -> None:
    _, judged, _ = await seen("order")
    assert judged.check.verdict.conclusion is HangConclusion.NOT_A_MACHINE
    assert judged.check.sign is HangSign.NEVER


@pytest.mark.parametrize(
    "other",
    [
        FakeAgent(),  # an agent of an earlier release does not know this request
        FakeAgent(sample=AgentUnreachable("away")),
        FakeAgent(sample=UnknownJob("gpt is not here")),
        FakeAgent(sample=pb.SampleReply(generation=2)),
        FakeAgent(sample=pb.SampleReply(generation=3, stacks=[pb.StackSignature(role="cook", kind="other")])),
        FakeAgent(sample=NEVER),
    ],
    ids=["of an earlier release", "away", "knows nothing", "another generation", "of a later release", "hangs"],
)
async def test_who_says_nothing_is_left_out_and_the_rank_is_named_all_the_same(other: FakeAgent) -> None:
    found, judged, culprit = await seen("deadlock", {7: other})

    topology, _, _ = looks("deadlock")
    assert topology.machine(culprit) != 7
    assert judged.check.verdict.ranks == (culprit,)
    kept = hang_found(found, judged, job(topology), [Machine(name=f"m{i}", address="-") for i in range(8)])
    assert (kept.machines, kept.suspects, kept.looks) == ([f"m{culprit // 2}"], [f"m{culprit // 2}"], 2)
    assert (kept.unknown, len(kept.silent)) == (2, 1)


async def test_the_incident_says_once_why_there_are_no_stacks() -> None:
    why = "py-spy may not read its stacks; add to docker run: --cap-add SYS_PTRACE"
    processes = [pb.TracedProcess(rank=rank, pid=rank + 1, state="S", problem=why) for rank in range(2)]
    denied = pb.StacksReply(machine="m0", generation=3, processes=processes)
    found, judged, _ = await seen("deadlock", {0: FakeAgent(sample=reduced(denied))})

    kept = hang_found(found, judged, job(looks("deadlock")[0]), [Machine(name=f"m{i}", address="-") for i in range(8)])

    [line] = [line for line in kept.evidence if "py-spy" in line]
    assert line.startswith("2 of ")
    assert line.endswith(f" processes: {why}")
