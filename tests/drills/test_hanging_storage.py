"""A machine is lost while the share with the checkpoints hangs. The job waits or is parked, and repeats nothing.

A manifest that is a FIFO without a writer blocks each process that lists the folder, like a dead share.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.local import power
from drills import DrillCluster
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, incident_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

SCRIPT = """
import pathlib, sys, time
import everstep

class Count:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

run, count, folder = everstep.join(), Count(), pathlib.Path(sys.argv[1])
for step in run.steps(30, run.checkpoint(count=count)):
    if count.value != step:
        raise SystemExit(f"{count.value} steps were restored, and this is step {step}")
    if step == 25 and run.rank == 0:
        (folder / "stands").touch()
    while (step == 20 and not (folder / f"gpt/step-000000020/rank-{run.rank}.json").exists()) or (
        step == 25 and not (folder / "go").exists()
    ):
        time.sleep(0.02)
    time.sleep(0.1)  # the watchers have seen the ranks of m1 before it is lost
    count.value += 1
    run.report(step, loss=1.0)
"""


class Share:
    """The folder with the job's checkpoints, which both machines use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fifo = root / "gpt" / "step-000000001" / "rank-0.json"

    def hang(self) -> None:
        self.fifo.parent.mkdir()
        os.mkfifo(self.fifo)

    def let_go(self) -> None:
        """Let the share answer again, and let the ranks continue after step 25."""
        descriptor = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        self.fifo.unlink()
        self.fifo.parent.rmdir()
        os.close(descriptor)
        (self.root / "go").touch()


async def lose_m1(cluster: DrillCluster, share: Share, **storage: float) -> None:
    """Start the job. At step 25, with step 20 on the share, m1 and its memory are lost while the share hangs."""
    script = share.root / "train.py"
    script.write_text(SCRIPT)
    spec = JobSpec(
        name="gpt",
        script=str(script),
        args=[str(share.root)],
        machines=2,
        checkpoint=CheckpointPolicy(backup=False, disk_path=str(share.root), disk_every_steps=10, disk_every_min=0),
        policy=RecoveryPolicy(storage={"answer_s": 1.0, "wait_initial_s": 0.2, **storage}),
    )
    await cluster.control.start_job(spec, cluster.machines[:2])
    await until((share.root / "stands").exists)
    with power.powered_off(cluster.file, ["m1"]):
        power.empty_memory(cluster.file, "m1")
        power.empty_disk(cluster.file, "m1")
        share.hang()


async def until(holds: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - another process; the test has a time-out
        await asyncio.sleep(0.05)


async def state_when(cluster: DrillCluster, holds: Callable[[JobState], bool]) -> JobState:
    while True:
        state = await cluster.control.state("gpt")
        if holds(state):
            return state
        await asyncio.sleep(0.1)


async def report_of(cluster: DrillCluster) -> IncidentReport:
    handle = cluster.control.client.get_workflow_handle(incident_workflow_id("gpt", 1), result_type=IncidentReport)
    report: IncidentReport = await handle.result()
    return report


async def test_the_job_is_parked_and_goes_on_from_the_newer_step_when_an_operator_resumes_it(
    cluster: DrillCluster, tmp_path: Path
) -> None:
    share = Share(tmp_path)
    await lose_m1(cluster, share, tries=2)
    try:
        state = await state_when(cluster, lambda state: state.status == "parked")
        stage = await cluster.control.stage(state.incidents[-1].id)
        assert "step 20 may exist: disk of" in stage.found
        assert "no answer for" in stage.found
        assert stage.to_accept == "from step 0"
        assert state.generation == 1, "the job was not launched again"
    finally:
        share.let_go()
    await cluster.control.answer(state.incidents[-1].id, "resume", "the share is back")

    report = await report_of(cluster)

    assert (report.recovered, report.resume_step, report.accepted_loss) == (True, 20, "")
    assert (await cluster.control.result("gpt")).outcome == "finished"


@pytest.mark.wide
async def test_the_job_goes_on_by_itself_when_the_share_answers_in_time(cluster: DrillCluster, tmp_path: Path) -> None:
    share = Share(tmp_path)
    await lose_m1(cluster, share, tries=1000, wait_max_s=0.2)
    try:
        state = await state_when(cluster, lambda state: state.incidents != [])
        id = state.incidents[-1].id
        assert state.incidents_so_far == 1, "incidents of earlier runs of the name do not count"
        while True:
            stage = await cluster.control.stage(id)
            if "asked again in" in stage.found:
                break
            await asyncio.sleep(0.02)
    finally:
        share.let_go()

    handle = cluster.control.client.get_workflow_handle(id, result_type=IncidentReport)
    report: IncidentReport = await handle.result()

    assert (report.recovered, report.resume_step) == (True, 20)
    assert (await cluster.control.result("gpt")).outcome == "finished"
