"""Saves take longer than steps: ranks save every 4th step, and a fault costs at most 8 steps and changes no bit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from controlplane.queries.saved import SavedReport
from controlplane.queries.status import saved_of
from drills import DrillCluster
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
import everstep
from everstep.slots.file import SlotFile

commit = SlotFile.commit

def slow_commit(self, completed_steps):
    time.sleep(SAVE_S[run.rank])
    return commit(self, completed_steps)

SlotFile.commit = slow_commit
SAVE_S, STEP_S = (0.0, 0.35), 0.1
run, folder = everstep.join(), pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(run.rank)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generation = os.environ["EVERSTEP_GENERATION"]
losses = open(folder / f"losses-{generation}-{run.rank}", "a", buffering=1)

for step in run.steps(10_000, run.checkpoint(model=model, optimizer=optimizer)):
    time.sleep(STEP_S)
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    losses.write(json.dumps([step, loss.item().hex()]) + "\\n")
    if run.rank == 1 and generation == "1" and (folder / "die").exists() and step % 8 == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def losses_of(folder: Path, generation: int, rank: int) -> dict[int, str]:
    lines = (folder / f"losses-{generation}-{rank}").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


async def test_ranks_save_every_fourth_step_and_the_job_resumes_from_one(cluster: DrillCluster, tmp_path: Path) -> None:
    job = cluster.next_name("slow-saves")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    await cluster.control.start_job(
        JobSpec(name=job, script=str(script), args=[str(tmp_path)], machines=2), cluster.machines[:2]
    )

    async def until_saving_every(steps: int) -> SavedReport:
        while True:  # the test's time-out limits this loop
            saved = await saved_of(cluster.control, await cluster.control.state(job))
            if saved and saved.saves and saved.saves.every == steps and not saved.saves.waits:
                return saved
            await asyncio.sleep(0.2)

    await until_saving_every(4)
    (tmp_path / "die").touch()
    handle = cluster.control.client.get_workflow_handle(incident_workflow_id(job, 1), result_type=IncidentReport)
    while True:
        state = await cluster.control.state(job)
        if state.incidents and state.incidents[-1].resolution:  # before, the incident's workflow may not have begun
            break
        await asyncio.sleep(0.1)
    result: IncidentReport = await handle.result()
    assert result.recovered
    assert result.resume_step % 4 == 0
    assert result.lost_steps is not None
    assert result.lost_steps <= 8
    assert result.save_every == state.save_every == 4

    again = await until_saving_every(4)
    assert again.saves is not None
    assert again.saves.number == 0, "the second generation begins with the distance of the first"
    for rank in (0, 1):
        before = losses_of(tmp_path, 1, rank)
        repeated = {step: loss for step, loss in before.items() if step >= result.resume_step}
        assert repeated
        while True:
            after = losses_of(tmp_path, 2, rank)
            if after.keys() >= repeated.keys():
                break
            await asyncio.sleep(0.2)
        assert {step: after[step] for step in repeated} == repeated
    await cluster.control.stop(job)
    await cluster.control.result(job)
