"""Records what an agent and its ranks leave in files: ``python tests/agent/record_state.py NAME``.

Later releases must read it (``test_recorded.py``). Run it before a change of a
format, and of what a release leaves once it is out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from agent.v1 import agent_pb2 as pb
from tests.agent.agents import Job, RunningAgent, running_agent

FOLDER = Path(__file__).parent / "recorded"
NAME = "recorded"
STEPS = 12
SCRIPT = """
import sys
import torch
import everstep

run = everstep.join(tp=1, pp=1)
torch.manual_seed(run.rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
state = run.checkpoint(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[1]), state):
    loss = model(torch.rand(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.report(step, loss=loss)
"""


def job_on(agent: RunningAgent, steps: int) -> Job:
    """The job that is recorded, to be launched to a number of steps."""
    job = Job(agent, SCRIPT, args=(str(steps),))
    job.name = NAME
    return job


async def launch(job: Job, generation: int, resume_step: int = 0) -> None:
    """Launch a generation and wait until its ranks have ended."""
    request = job.launch_request(generation)
    request.resume_step = resume_step
    request.checkpoint.CopyFrom(pb.CheckpointOptions(slots=3, disk=True, disk_every_steps=5, disk_keep=2))
    request.env["EVERSTEP_TOPOLOGY"] = "1,2,1,1,pp-dp-tp"
    await job.agent.client.launch(request, timeout_s=60)
    ended = 0
    async with asyncio.timeout(60):
        async for seen in job.agent.client.observe(pb.ObserveRequest(job=NAME)):
            ended += seen.HasField("rank_ended") and seen.generation == generation
            if ended == job.ranks:
                return


async def record(path: Path) -> None:
    """Run the job, kill its agent, and pack all that is left."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_agent(Path(folder), alone=True) as agent:
            job = job_on(agent, STEPS)
            await job.prepare()
            await launch(job, 1)
            await job.stop(1)
            await asyncio.sleep(1)  # what goes to disk behind all commands
            agent.kill()
            with tarfile.open(path, "w:xz") as packed:
                packed.add(agent.state, "state", filter=_files)
                packed.add(agent.shm, "shm", filter=_files)
            await agent.start()


def _files(found: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return found if found.isfile() or found.isdir() else None


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".token") as token:
        token.write("of a recording\n")
        token.flush()
        os.environ["EVERSTEP_AGENT_TOKEN_FILE"] = token.name
        asyncio.run(record(FOLDER / f"{sys.argv[1]}.tar.xz"))
