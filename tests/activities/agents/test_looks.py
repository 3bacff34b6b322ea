"""Samples of all ranks of a job, from agents that replay recorded hangs, and the conclusions from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.agents.looks import Judged, RankLook, hang_found, keep_looks, trace, whole_stacks
from activities.ledger.ledger import Ledger
from activities.tools import Tools
from agent.client import AgentClients
from agent.fake import NEVER, FakeAgent
from agent.tracer.signatures import reduced
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.progress import HangSign
from everstep.errors import AgentUnreachable, UnknownJob
from everstep.model.hang import HangConclusion
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.topology import Topology
from tests.activities.agents.recorded_looks import looks, telling_whole, whole_looks
from tests.activities.spoken import reached

APART_S = 0.05


def telling(replies: list[pb.SampleReply], **more: Any) -> FakeAgent:
    """Return an agent that gives these answers to samples one after the other, and then repeats the last."""
    left: Iterator[pb.SampleReply] = iter(replies)
    last = [replies[0]]

    def answer(_: pb.SampleRequest) -> pb.SampleReply:
        last[0] = next(left, last[0])
        return last[0]

    return FakeAgent(sample=answer, **more)


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


INCIDENT = "incident/gpt/0001"


async def test_the_ledger_has_whole_stacks_of_ranks_that_matter_and_the_number_of_ranks_like_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.agents.looks.KEEP_S", 60.0)
    monkeypatch.setattr("everstep.decisions.blame.hang.examples.MOST_RANKS", 4)
    topology, culprit, told = looks("deadlock")
    _, _, whole = whole_looks("deadlock")
    gone = topology.machine(culprit)
    agents = [
        telling([one[index] for one in told], stacks=telling_whole(*(one[index] for one in whole)))
        for index in range(topology.machines)
    ]
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        async with reached(agents) as (pool, machines):
            placed = PlacedJob(spec=job(topology), machines=machines)
            found, judged = await traced(pool, placed.spec, machines)
            tools, named = Tools(agents=pool, ledger=ledger), judged.check.verdict.ranks
            stored = await keep_looks(tools, INCIDENT, placed, found, named=named)
            agents[gone].answer(stacks=AgentUnreachable("away"))
            missing = await keep_looks(tools, "incident/gpt/0002", placed, found, named=named)
            every = await whole_stacks(pool, "gpt", machines, found[1])
        rows = [(number, pb.StacksReply.FromString(data)) for number, _, _, data in ledger.looks(INCIDENT)]

    assert (stored, missing) == ("", f"no stacks came from m{gone}")
    kept = {number: {one.rank for n, reply in rows for one in reply.processes if n == number} for number in (1, 2)}
    assert kept[1] == kept[2] and culprit in kept[2] and len(kept[2]) < topology.world_size
    alike = {rank: count for _, reply in rows for rank, count in reply.alike.items()}
    assert alike.keys() == kept[2]
    assert alike[culprit] == 1 and max(alike.values()) > 1
    assert {one.rank for reply in every for one in reply.processes} == {
        rank for rank in range(topology.world_size) if topology.machine(rank) != gone
    }
