"""What agents and ranks of earlier releases left in files is read: jobs, fences, slots, checkpoints on disk.

``record_state.py`` makes the recordings.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from everstep.errors import Fenced
from tests.agent.agents import RunningAgent, running_agent
from tests.agent.record_state import FOLDER, NAME, STEPS, job_on, launch

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]
MORE = 8
Losses = dict[tuple[int, int], list[float]]


@pytest_asyncio.fixture(params=sorted(FOLDER.iterdir()), ids=lambda path: path.name)
async def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RunningAgent]:
    """An agent on the folders of one that was killed."""
    unpacked = tmp_path / "unpacked"
    with tarfile.open(request.param) as packed:
        packed.extractall(unpacked, filter="data")
    agent = RunningAgent(tmp_path)
    (unpacked / "state").rename(agent.state)
    agent.shm.parent.mkdir(exist_ok=True)
    _copy(unpacked / "shm", agent.shm)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*"), key=lambda path: len(path.parts)):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_file():
            to.write_bytes(path.read_bytes())
            to.chmod(0o600)


async def losses(agent: RunningAgent) -> Losses:
    """By rank and step, of all generations in turn."""
    found: Losses = {}
    async for reply in agent.client.steps(pb.StepsRequest(job=NAME, rank=-1)):
        for one in reply.records:
            found.setdefault((reply.rank, one.step), []).append(one.loss)
    return found


async def test_an_agent_knows_the_job_and_all_its_copies(recorded: RunningAgent) -> None:
    (job,) = (await recorded.client.describe()).jobs
    assert (job.job, job.generation, job.fenced_generation) == (NAME, 1, 1)
    reply = await recorded.client.checkpoints(pb.CheckpointsRequest(job=NAME, verify=True))
    tier = pb.HeldCheckpoint.Tier.Name
    held = {(one.rank, tier(one.tier), one.completed_steps) for one in reply.checkpoints if one.valid}
    assert held >= {(rank, "OWN", STEPS) for rank in range(2)} | {(rank, "DISK", 10) for rank in range(2)}
    with pytest.raises(Fenced, match="generation 1"):
        await job_on(recorded, STEPS).launch(1, "a late one")
    assert len((await job_on(recorded, STEPS).launch(1)).ranks) == 2, "the one that was carried out has its first reply"


async def test_ranks_go_on_bit_for_bit_from_slots_that_an_earlier_release_wrote(
    recorded: RunningAgent, tmp_path: Path
) -> None:
    before = await losses(recorded)
    assert sorted(before) == [(rank, step) for rank in range(2) for step in range(STEPS)]
    await launch(job_on(recorded, STEPS + MORE), 2, resume_step=STEPS)
    after = await losses(recorded)
    async with running_agent(tmp_path / "undisturbed") as other:
        job = job_on(other, STEPS + MORE)
        await job.prepare()
        await launch(job, 1)
        undisturbed = await losses(other)
    # A processor of another kind than the one that the recording is from may round otherwise in the last bit.
    alike = all(undisturbed[key] == before[key] for key in before)
    assert after == (
        undisturbed if alike else {key: pytest.approx(value, rel=1e-6) for key, value in undisturbed.items()}
    )
