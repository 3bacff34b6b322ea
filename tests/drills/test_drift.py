"""Ranks meet only every 25 steps, and one is three times as fast: there is always a step that all can restore."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.queries.saved import SavedReport, saved_lines
from controlplane.queries.status import saved_of
from drills import DrillCluster
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

SCRIPT = """
import os, pathlib, signal, sys, time
import everstep

class Count:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

run, count, folder = everstep.join(), Count(), pathlib.Path(sys.argv[1])
generation = os.environ["EVERSTEP_GENERATION"]

def at(rank, step):
    return folder / f"at-{generation}-{rank}-{step}"

for step in run.steps(1_000_000, run.checkpoint(count=count)):
    if count.value != step:
        raise SystemExit(f"{count.value} steps were restored, and this is step {step}")
    time.sleep((0.05, 0.15)[run.rank])
    if step % 25 == 0:
        at(run.rank, step).touch()
        while not at(1 - run.rank, step).exists():
            time.sleep(0.01)
    # Here, the other rank already waits at the next meeting, and has removed its copies of the steps that this rank
    # has.
    if run.rank == 1 and generation == "1" and step % 25 == 12 and (folder / "die").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    count.value += 1
    run.report(step, loss=1.0)
"""


async def saved(cluster: DrillCluster, job: str) -> SavedReport | None:
    return await saved_of(cluster.control, await cluster.control.state(job))


@pytest.mark.parametrize(
    "backup", [True, pytest.param(False, marks=pytest.mark.wide)], ids=["backed-up", "own-memory-only"]
)
async def test_it_is_told_and_a_fault_in_the_middle_costs_some_steps_and_not_all(
    cluster: DrillCluster, tmp_path: Path, backup: bool
) -> None:
    job = cluster.next_name("drifts")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    spec = JobSpec(
        name=job,
        script=str(script),
        args=[str(tmp_path)],
        machines=2,
        checkpoint=CheckpointPolicy(backup=backup),
    )
    await cluster.control.start_job(spec, cluster.machines[:2])
    while True:  # the test's time-out limits this loop
        report = await saved(cluster, job)
        # The step must be so far behind the slowest rank that the machines have kept it together.
        if report and report.apart and report.own_step and report.own_step < (report.own_newest or 0) - 4:
            break
        await asyncio.sleep(0.2)
    assert any(line.startswith("ranks drift up to") for what, line in saved_lines(report) if what == "problem")
    (tmp_path / "die").touch()

    handle = cluster.control.client.get_workflow_handle(incident_workflow_id(job, 1), result_type=IncidentReport)
    while True:
        state = await cluster.control.state(job)
        if state.incidents and state.incidents[-1].resolution:  # before, the incident's workflow may not have begun
            break
        await asyncio.sleep(0.1)
    result: IncidentReport = await handle.result()

    assert result.recovered
    assert result.resume_step >= report.own_step, (
        "the job resumes from the step that status called saved, or from a later one"
    )
    await cluster.control.stop(job)
    await cluster.control.result(job)
