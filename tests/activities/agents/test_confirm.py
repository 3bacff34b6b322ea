"""A worker watches a launch until all ranks step. The agents are fakes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from activities.agents.confirm_steps import ConfirmSteps, Heard
from agent.client import AgentClients
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.decisions.act.recover.confirm import RankState
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.launch import Launched
from tests.activities.performing import perform
from tests.activities.spoken import serving


def shows(rank: int, *generations: int) -> FakeAgent:
    """An agent whose only rank never steps. It reports these generations in turn; 0 means that it knows of no job."""
    ranks = [pb.RankProgress(rank=rank, generation=one, alive=True, attached=True) for one in generations]
    replies = [pb.ProgressReply(generation=one.generation, ranks=[one] if one.generation else []) for one in ranks]
    return FakeAgent(progress=[*replies, NEVER])


async def test_a_machine_that_knows_nothing_of_its_launch_was_lost() -> None:
    spec = JobSpec(name="job", script="/job.py", machines=2)
    async with serving([shows(0, 2), shows(1, 2, 0)]) as machines:
        given = ConfirmSteps(
            job=PlacedJob(spec=spec, machines=machines),
            launched=Launched(generation=2, resume_step=20, started_ns=1),
            timeout_s=600.0,
        )
        pool = AgentClients()
        verdict = await asyncio.wait_for(perform(given, agents=pool), 30)
        await pool.close()
    assert (verdict.ok, verdict.emptied) == (False, ["m1"])


async def test_a_machine_that_says_nothing_while_nobody_steps_is_not_waited_for() -> None:
    async def tells_on(_request: pb.ProgressRequest) -> AsyncIterator[pb.ProgressReply]:
        while True:
            yield pb.ProgressReply(generation=2, ranks=[pb.RankProgress(rank=0, generation=2, alive=True)])
            await asyncio.sleep(0.02)

    spec, pool = JobSpec(name="job", script="/job.py", machines=2), AgentClients()
    async with serving([FakeAgent(progress=tells_on), FakeAgent(progress=NEVER)]) as machines:
        launched = Launched(generation=2, resume_step=20, started_ns=1)
        given = ConfirmSteps(
            job=PlacedJob(spec=spec, machines=machines), launched=launched, timeout_s=600.0, silent_s=0.5
        )
        verdict = await asyncio.wait_for(perform(given, agents=pool), 30)
        await pool.close()
    assert not verdict.ok
    assert verdict.reason.startswith("no answer of m1 for ")


def test_steps_of_any_rank_say_that_the_silent_ones_step_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heard = Heard(["m0", "m1", "m2"], 10.0)

    def looks(after_s: float, steps: int, *machines: str) -> dict[str, float]:
        now[0] += after_s
        for machine in machines:
            heard.note(machine)
        state = RankState(0, alive=True, attached=True, finished=False, completed_steps=steps, optimizer_steps=0)
        return heard.silent([state])

    assert looks(1.0, -1, "m0", "m1", "m2") == {}
    assert looks(9.5, -1, "m0", "m1") == {}, "m2 is silent for less than 10 s"
    assert looks(1.0, 20, "m0", "m1") == {}, "a step was completed, so m2 steps too, and its 10 s begin anew"
    assert looks(9.0, 20, "m0", "m1") == {}
    assert looks(1.0, 20, "m0") == {"m2": 10.0}
    assert looks(10.0, 20) == {}, "if no machine is heard, this worker itself may be cut off"
    assert Heard(["m0"], 0.0).silent([]) == {}
