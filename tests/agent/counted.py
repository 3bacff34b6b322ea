"""A job whose ranks note that they started. Each rank ends when a test wants it."""

from __future__ import annotations

import asyncio

from everstep.rank.step_reports import ReportFile
from tests.agent.agents import Job, RunningAgent

COUNTED = """
import os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
name = f"{here}/entered-{os.environ['EVERSTEP_JOB']}-{os.environ['RANK']}"
with open(name, "a") as file:
    file.write(f"{os.getpid()}\\n")
while not os.path.exists(f"{name}.end"):
    time.sleep(0.01)
sys.exit(5)
"""


def entries(job: Job) -> dict[int, list[int]]:
    """Return the process ids that entered the script, by rank."""
    found = {}
    for rank in range(job.ranks):
        path = job.agent.folder / f"entered-{job.name}-{rank}"
        found[rank] = [int(pid) for pid in path.read_text().split()] if path.exists() else []
    return found


def let_end(job: Job, rank: int) -> None:
    (job.agent.folder / f"entered-{job.name}-{rank}.end").touch()


async def first_pid(job: Job) -> None:
    """Wait until the first rank of a launch exists. Other ranks may not exist yet."""

    def written() -> bool:
        paths = (job.agent.shm / job.name).glob("report-*-1")
        return any(ReportFile.open(path).snapshot().pid for path in paths)

    while not written():  # noqa: ASYNC110 - milliseconds matter, and there is no event
        await asyncio.sleep(0.001)


async def fork_server(agent: RunningAgent, job: Job) -> int:
    """Return the process id of the job's fork server; 0: none."""
    return next(j.fork_server_pid for j in (await agent.client.describe()).jobs if j.job == job.name)
