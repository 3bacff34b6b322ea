"""One round of the vote that finds a slow machine: which machine gets the flag, and why. The agents are fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from activities.agents.vote_round import VoteRound
from activities.ledger.ledger import Ledger
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.slow.by_samples import FEWEST_SAMPLES
from everstep.errors import AgentUnreachable
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.slow import SlowRound
from tests.activities.agents.recorded_looks import looks, telling_whole, whole_looks
from tests.activities.agents.test_looks import job
from tests.activities.performing import perform
from tests.activities.spoken import reached

ROUND_S = 0.6
INCIDENT = "incident/gpt/0001"


@pytest.fixture(autouse=True)
def whole_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until the ledger has the samples, however slow the machine is."""
    monkeypatch.setattr("activities.agents.looks.KEEP_S", 60.0)


def paced(
    rank: int, *, generation: int = 3, waited_s: float = 0.0, step_s: float = 0.4, at_look_s: float = 0.0
) -> pb.RankProgress:
    """Return a rank whose steps take twice as long as before.

    Args:
        rank: Its number.
        generation: Its generation.
        waited_s: How long it waits for a CPU in each step, seconds. Before, it did not wait.
        step_s: The duration of a step now, seconds.
        at_look_s: The duration of a step when ``waited_s`` was measured, seconds.
    """
    metrics = pb.Metrics(
        step_s=step_s,
        typical_step_s=0.2,
        cpu=pb.CpuPerStep(had_s=0.05, waited_s=waited_s, step_s=at_look_s),
        typical_cpu=pb.CpuPerStep(had_s=0.05),
    )
    return pb.RankProgress(rank=rank, generation=generation, alive=True, metrics=metrics)


def at(spec: JobSpec, machines: list[Machine], round_s: float) -> PlacedJob:
    policy = RecoveryPolicy(slow={"round_s": round_s})
    return PlacedJob(spec=spec.model_copy(update={"policy": policy}), machines=machines)


async def voted(
    tmp_path: Path, name: str, *, slow: int = -1, away: int = -1, step_s: float = 0.4, at_look_s: float = 0.0
) -> tuple[SlowRound, int, list[int]]:
    """Hold a round of the vote in a recorded job.

    Returns:
        The result of the round; the machine for which the others wait, -1: none; and the round of each sample in the
        ledger.
    """
    topology, culprit, told = looks(name)
    _, _, kept = whole_looks(name)
    agents = []
    for machine in range(topology.machines):
        ranks = [
            paced(rank, waited_s=0.2 * (machine == slow), step_s=step_s, at_look_s=at_look_s)
            for rank in topology.ranks(machine)
        ]
        progress = pb.ProgressReply(generation=3, ranks=ranks)
        whole = telling_whole(kept[0][machine])
        agents.append(FakeAgent(sample=told[0][machine], stacks=whole, progress=[progress, NEVER]))
    if away >= 0:
        agents[away] = FakeAgent(sample=AgentUnreachable("away"), progress=NEVER)
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    try:
        async with reached(agents) as (pool, machines):
            given = VoteRound(job=at(job(topology), machines, ROUND_S), generation=3, incident=INCIDENT, number=2)
            found = await perform(given, agents=pool, ledger=ledger)
        numbers = [number for number, _, _, _ in ledger.looks(INCIDENT)]
    finally:
        ledger.close()
    return found, topology.machine(culprit) if culprit >= 0 else -1, numbers


async def test_the_machine_for_which_the_others_wait_has_the_flag_and_its_own_past_is_told(tmp_path: Path) -> None:
    _, culprit, _ = looks("deadlock")
    found, machine, kept = await voted(tmp_path, "deadlock", slow=culprit // 2)

    assert (found.number, found.problem, found.silent) == (2, "", [])
    assert found.looks >= 3
    assert (found.flagged, found.machines, found.ranks) == (f"m{machine}", [f"m{machine}"], [culprit])
    assert found.longer == {f"m{machine}": "no CPU"}
    assert set(kept) == {2} and len(kept) == looks("deadlock")[0].machines, (
        "the ledger has the first sample of each machine"
    )


async def test_what_a_rank_computes_is_held_against_the_steps_in_which_it_was_looked_at(tmp_path: Path) -> None:
    """Steps became longer after the rank's CPU time was measured. CPU time is measured only every few steps."""
    _, culprit, _ = looks("deadlock")
    found, machine, _ = await voted(tmp_path, "deadlock", slow=culprit // 2, step_s=0.9, at_look_s=0.4)
    assert found.longer == {f"m{machine}": "no CPU"}


async def test_a_machine_that_does_not_answer_is_left_out_and_nothing_is_concluded_of_it(tmp_path: Path) -> None:
    _, culprit, _ = looks("deadlock")
    found, machine, _ = await voted(tmp_path, "deadlock", away=culprit // 2)
    assert found.silent == [f"m{machine}"]
    assert f"m{machine}" not in found.machines


@pytest.mark.parametrize("generation", [2, 4])
async def test_of_another_generation_nothing_is_known(tmp_path: Path, generation: int) -> None:
    agent = FakeAgent(
        sample=pb.SampleReply(generation=generation),
        progress=[pb.ProgressReply(generation=generation, ranks=[paced(0, generation=generation)]), NEVER],
    )
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    topology, _, _ = looks("deadlock")
    try:
        async with reached([agent] * 1) as (pool, machines):
            given = VoteRound(job=at(job(topology), machines, 0.1), generation=3, incident=INCIDENT, number=1)
            found = await perform(given, agents=pool, ledger=ledger)
    finally:
        ledger.close()
    assert found.problem
    assert found.machines == []


async def test_a_round_has_enough_samples_although_one_takes_longer_than_the_round(tmp_path: Path) -> None:
    topology, _, told = looks("deadlock")

    async def late(_: pb.SampleRequest) -> pb.SampleReply:
        await asyncio.sleep(0.04)
        return told[0][0]

    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        async with reached([FakeAgent(sample=late, progress=NEVER)]) as (pool, machines):
            given = VoteRound(job=at(job(topology), machines, 0.05), generation=3, incident=INCIDENT, number=1)
            found = await perform(given, agents=pool, ledger=ledger)
    assert found.looks == FEWEST_SAMPLES
