"""A trial of a replay runs a job's script on one group of machines. Here the agents and ranks are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import CancelledError
from temporalio.testing import ActivityEnvironment

from activities.agents.release_machines import ReleaseMachines
from activities.agents.replay_on_group import (
    GroupPace,
    ReplayOnGroup,
    loss_digests,
    not_finite,
    shape_of,
    state_digests,
)
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.replay.group_jobs import plan_of, spec_of_group
from everstep.errors import AgentError, AgentUnreachable
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, RunEnd
from tests.activities.performing import perform
from tests.activities.spoken import serving
from tests.agent.agents import RunningAgent, running_agent, until

SCRIPT = """
import os, sys, time
import everstep

class Counter:
    count = 0
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]

run, counter, how = everstep.join(), Counter(), sys.argv[1]
struck = how if os.environ["EVERSTEP_MACHINE"] == "m1" else ""
if struck == "slow":
    time.sleep(9)
for step in run.steps(1000, run.checkpoint(counter=counter), start=100 if how == "later" else 0):
    if struck == "stuck":
        time.sleep(1000)
    counter.count += 1 + (struck == "silent" and step == 3)
    loss = 1 / counter.count
    if struck == "plods":
        time.sleep(0.9)
    if step == 2:
        if struck == "raise":
            raise ValueError("a bad day")
        if struck == "hang":
            time.sleep(1000)
        if struck == "wrong":
            loss += 1e-15
        if struck == "nan":
            loss = float("nan")
    run.report(step, loss=loss)
open(os.path.join(os.path.dirname(__file__), "after-the-loop"), "w").close()
"""
POLICY = RecoveryPolicy(replay={"steps": 5, "machines": 2})

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningAgent]]:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "job.py").write_text(SCRIPT)
    async with running_agent(folder / "m0", machine="m0") as first, running_agent(folder / "m1", machine="m1") as other:
        yield [first, other]


def given(agents: list[RunningAgent], how: str, **more: Any) -> ReplayOnGroup:
    script = agents[0].folder.parent / "job.py"
    spec = JobSpec(name="gpt", script=str(script), args=[how], machines=4, policy=POLICY)
    group = plan_of(spec).groups[0]
    machines = [Machine(name=agent.machine, address=agent.address) for agent in agents]
    asked = {"group": group.name, "steps": 5, "start_s": 60.0, "limit_s": 30.0, **more}
    return ReplayOnGroup(job=PlacedJob(spec=spec_of_group(spec, group), machines=machines, run="r1"), **asked)


async def replayed(asked: ReplayOnGroup) -> GroupRun:
    pool = AgentClients()
    try:
        run = perform(asked, agents=pool)
        found: GroupRun = await asyncio.wait_for(run, 60)
    finally:
        await pool.close()
    return found


async def jobs_of(agents: list[RunningAgent]) -> list[str]:
    return [job.job for agent in agents for job in (await agent.client.describe()).jobs]


async def both_run(agents: list[RunningAgent]) -> None:
    """Wait until each machine has a rank that has completed a step."""
    deadline = time.monotonic() + 60.0
    while True:
        jobs = [job for agent in agents for job in (await agent.client.describe()).jobs]
        if sum(rank.completed_steps >= 1 for job in jobs for rank in job.ranks) == len(agents):
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def ranks_started(agents: list[RunningAgent]) -> int:
    """Return how many ranks of the trial were started, according to their logs."""
    logs = [path.read_text() for agent in agents for path in agent.state.glob("jobs/gpt~row-0/**/*.err*")]
    return sum(log.count("--- everstep: rank") for log in logs)


async def test_a_group_runs_its_steps_and_leaves_nothing(two: list[RunningAgent]) -> None:
    first = await replayed(given(two, "well"))
    assert (first.end, first.steps, first.machines, first.why) == (RunEnd.RAN, 5, ["m0", "m1"], "")
    assert len(first.losses) == 5 and len(first.states) == 2 and " x " in first.kind
    assert await jobs_of(two) == [] and all(agent.left() == [] for agent in two)
    assert not (two[0].folder.parent / "after-the-loop").exists()

    again = await replayed(given(two, "well", repeat=2))
    assert (again.losses, again.states, again.repeat) == (first.losses, first.states, 2)
    wrong = await replayed(given(two, "wrong"))
    assert [one == other for one, other in zip(wrong.losses, first.losses, strict=True)] == [True, True, False] + [
        True
    ] * 2
    silent = await replayed(given(two, "silent"))
    assert silent.states[0] == first.states[0] and silent.states[1] != first.states[1]


@pytest.mark.parametrize(
    ("how", "end", "why"),
    [
        ("raise", RunEnd.CRASHED, "rank 1 on m1 raised ValueError: a bad day"),
        ("nan", RunEnd.NOT_FINITE, "the loss of rank 1 in step 2"),
        ("hang", RunEnd.HUNG, "rank 1 did not do 5 steps within 3 s of the first"),
        ("plods", RunEnd.SLOW, "rank 1 did not do 5 steps within 3 s of the first, and still stepped"),
    ],
)
async def test_how_a_group_broke_is_told(two: list[RunningAgent], how: str, end: RunEnd, why: str) -> None:
    limits = {"limit_s": 3.0} if how in {"hang", "plods"} else {}
    found = await replayed(given(two, how, **limits))
    assert (found.end, found.why) == (end, why)
    assert await jobs_of(two) == []


async def test_a_script_that_begins_at_a_later_step_runs_as_many(two: list[RunningAgent]) -> None:
    found = await replayed(given(two, "later"))
    assert (found.end, found.steps, len(found.losses)) == (RunEnd.RAN, 105, 5)


async def test_a_slow_start_is_no_hang(two: list[RunningAgent]) -> None:
    """The start takes longer than the time limit of all steps."""
    found = await replayed(given(two, "slow", limit_s=8.0))
    assert (found.end, found.steps, found.why) == (RunEnd.RAN, 5, "")


async def test_a_group_that_comes_to_no_first_step_says_so(two: list[RunningAgent]) -> None:
    found = await replayed(given(two, "stuck", start_s=8.0))
    assert found.end is RunEnd.NOT_STARTED and await jobs_of(two) == []
    assert "rank 1 did not complete a first step within 8 s" in found.why


@pytest.mark.parametrize(
    "why", [ActivityCancellationDetails(not_found=True), ActivityCancellationDetails(worker_shutdown=True)]
)
async def test_whoever_takes_over_goes_on_with_the_ranks_that_run(
    two: list[RunningAgent], why: ActivityCancellationDetails
) -> None:
    """A second attempt of the activity uses the ranks that the first attempt started.

    The server heard nothing of the first worker for a while and began the second attempt, which sends the same request
    ids; or the first worker is drained. The first worker still lives, but must not end the ranks any more.
    """
    pool, asked, environment = AgentClients(), given(two, "hang"), ActivityEnvironment()
    first = asyncio.create_task(perform(asked, environment, agents=pool))
    await both_run(two)
    before = ranks_started(two)
    environment.cancel(why)
    await asyncio.gather(first, return_exceptions=True)
    assert await jobs_of(two) == [asked.job.spec.name] * 2
    short = asked.model_copy(update={"limit_s": 1.0})
    found = await asyncio.wait_for(perform(short, agents=pool), 60)
    assert found.end is RunEnd.HUNG and await jobs_of(two) == []
    assert ranks_started(two) == before, "each of the two ranks was started only once"
    await pool.close()


async def test_ranks_that_somebody_else_ended_are_no_fault_of_their_machines(two: list[RunningAgent]) -> None:
    asked = given(two, "hang", limit_s=6.0)
    replaying = asyncio.create_task(replayed(asked))
    await both_run(two)
    pool = AgentClients()
    release = ReleaseMachines(job=asked.job, dying_s=30.0)
    elsewhere = ActivityEnvironment()
    elsewhere.info = replace(elsewhere.info, activity_id="another")
    await perform(release, elsewhere, agents=pool)
    await pool.close()
    found = await replaying
    assert found.end is RunEnd.UNABLE and "ended from outside" in found.why


async def test_a_replay_that_is_cancelled_ends_its_ranks(two: list[RunningAgent]) -> None:
    pool, environment = AgentClients(), ActivityEnvironment()
    running = asyncio.create_task(perform(given(two, "hang"), environment, agents=pool))
    await both_run(two)
    environment.cancel()
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        await asyncio.wait_for(running, 30)
    assert await jobs_of(two) == []
    await pool.close()


async def test_replays_are_their_jobs_and_never_run_beside_it(two: list[RunningAgent]) -> None:
    """A replay left on a machine is ended by a launch of the job or of another replay, and by the end of the job.

    While the job runs, no replay begins.
    """
    agent, script = two[0], str(two[0].folder.parent / "job.py")

    async def launch(job: str, generation: int) -> None:
        await agent.client.prepare(pb.PrepareRequest(job=job, run="r1"), timeout_s=60)
        store = pb.StartStoreRequest(job=job, generation=generation, run="r1", begins_run=True)
        started = await agent.client.start_store(store, timeout_s=60)
        env = {"MASTER_ADDR": started.host, "MASTER_PORT": str(started.port), "WORLD_SIZE": "1"}
        env |= {"EVERSTEP_TOPOLOGY": "1,1,1,1,pp-dp-tp"}
        program = pb.Program(script=script, args=["well"], env=env)
        request = pb.LaunchRequest(job=job, generation=generation, program=program, run="r1", begins_run=True)
        request.ranks.add(rank=0, env={"RANK": "0", "LOCAL_RANK": "0"})
        await agent.client.launch(request, timeout_s=60)

    async def known() -> list[str]:
        return sorted(job.job for job in (await agent.client.describe()).jobs)

    await launch("gpt~row-0", 1)
    await launch("gpt~column-0", 1)
    assert await known() == ["gpt~column-0"]
    await launch("gpt", 1)
    assert await known() == ["gpt"]
    with pytest.raises(AgentError, match="ranks of gpt run on m0"):
        await launch("gpt~row-0", 1)
    await agent.client.stop(pb.StopRequest(job="gpt", generation=1, run="r1"))
    await launch("gpt~row-0", 1)
    assert await known() == ["gpt", "gpt~row-0"]
    await agent.client.release(pb.ReleaseRequest(job="gpt", run="r1"), timeout_s=30)
    assert await known() == []
    await until(lambda: agent.left() == [], "shared memory is given back")


async def test_a_silent_machine_says_nothing_of_the_group() -> None:
    spec = JobSpec(name="gpt~row-0", script="/job.py", machines=2)
    pool, well = AgentClients(), FakeAgent(prepare=pb.PrepareReply(fork_server_pid=1), release=pb.ReleaseReply())
    silent = FakeAgent(prepare=AgentUnreachable("gone"), release=pb.ReleaseReply())
    async with serving([well, silent]) as machines:
        asked = ReplayOnGroup(job=PlacedJob(spec=spec, machines=machines), group="row 0", start_s=30.0, patience_s=0.2)
        found = await asyncio.wait_for(perform(asked, agents=pool), 60)
    await pool.close()
    assert found.end is RunEnd.UNABLE and "m1 did not" in found.why
    assert [len(agent.asked("release")) for agent in (well, silent)] == [1, 1]


async def test_digests_are_of_all_bits() -> None:
    def record(step: int, loss: float, given: int = 1) -> pb.StepRecord:
        return pb.StepRecord(step=step, loss=loss, given=given)

    usual = loss_digests([(0, record(0, 1.0)), (1, record(0, 2.0)), (0, record(1, 3.0))])
    assert len(usual) == 2
    assert usual == loss_digests([(0, record(1, 3.0)), (1, record(0, 2.0)), (0, record(0, 1.0))])
    assert usual[0] != loss_digests([(0, record(0, 1.0)), (1, record(0, 2.0 + 4e-16)), (0, record(1, 3.0))])[0]
    assert usual[0] != loss_digests([(0, record(0, 1.0)), (1, record(0, 2.0, 0))])[0]


async def test_a_gradient_norm_that_a_scaler_skips_is_no_fault() -> None:
    def norms(*values: float) -> list[tuple[int, pb.StepRecord]]:
        of_rank = [(rank, step, value) for rank in (0, 1) for step, value in enumerate(values)]
        return [(rank, pb.StepRecord(step=step, loss=1.0, grad_norm=norm, given=3)) for rank, step, norm in of_rank]

    bad, policy = float("inf"), RecoveryPolicy()
    assert not_finite(norms(bad, bad, 1.0, bad, bad, 1.0), policy) == ""
    assert not_finite(norms(1.0, bad, bad, bad), policy) == "the gradient norm of rank 0 in step 1"
    assert not_finite(norms(bad, bad, bad), RecoveryPolicy(nan={"grad_norm_steps": 0})) == ""
    loss = [(1, pb.StepRecord(step=4, loss=float("nan"), given=1))]
    assert not_finite(loss, policy) == "the loss of rank 1 in step 4"


async def test_states_are_known_of_all_ranks_or_of_none() -> None:
    told = {rank: f"noise\n--- everstep: state after step 5: {rank}abc\nmore" for rank in (0, 1)}
    assert state_digests(told) == ["0abc", "1abc"]
    assert state_digests(told | {2: "nothing"}) == state_digests({}) == []


async def test_what_a_machine_did_not_keep_makes_another_shape_and_no_difference() -> None:
    whole = GroupRun(group="row 0", machines=["m0"], end=RunEnd.RAN, losses=["a"] * 5, states=["s"] * 2)
    assert shape_of(whole, 10) == "10 reports of 5 steps, states of 2 ranks"
    assert shape_of(whole.model_copy(update={"states": []}), 10) == "10 reports of 5 steps, no states"
    assert len({shape_of(whole, count) for count in (7, 10)}) == 2, "the last reports of a rank are missing"


@pytest.mark.parametrize(
    ("seen", "now", "goes_on"),
    [
        ([0, 40, 80, 120, 160, 200, 240, 280], 300, True),
        ([0, 100, 200], 300, True),
        ([0, 1, 2, 3, 4], 300, False),
        ([0, 1, 2, 3, 4], 6, True),
        ([0, 10], 15, False),
        ([], 300, False),
    ],
)
async def test_a_group_goes_on_where_a_step_came_lately(seen: list[float], now: float, goes_on: bool) -> None:
    pace = GroupPace()
    for number, at in enumerate(seen, 1):
        pace.note(number, at)
        pace.note(number, at + 0.1)
    assert pace.is_stepping(now) is goes_on
