"""Faults that no rung of the ladder repairs: all are tried, no machine leaves the job, and an operator decides."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from drills import DrillCluster
from drills.faults.all import drill_request
from drills.inject.plan import planned
from drills.judge import facts as gather
from drills.judge.compare import compare
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.ladder import Rung
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.rank import environment
from tests.drills.conftest import Clusters, DrillOf
from workflows.incident.workflow import IncidentWorkflow

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

R, D, P = Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REPLAY
LIMIT_S = 500.0
FOUR: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 1, "pp": 1}

BAD_BATCH = """
    import time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import everstep

    run = everstep.join(tp=1, pp=1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = run.checkpoint(model=model, optimizer=optimizer)
    for step in run.steps(24, state):
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batch = torch.randn(4, 8, generator=data)
        if step == 12:
            batch[0, 0] = float("nan")
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(step, loss=loss.item())
        time.sleep(0.1)
"""
"""In one step, every rank reads a bad sample, on whichever machines it runs."""


async def until(cluster: DrillCluster, name: str, status: str) -> JobState:
    """Wait for a status of the job. The job must not end before."""
    while (state := await cluster.control.state(name)).status != status:
        assert not state.outcome, state.outcome
        await asyncio.sleep(0.2)
    return state


async def why_parked(cluster: DrillCluster, state: JobState) -> str:
    """Return what the incident that parked the job shows."""
    incident = cluster.control.client.get_workflow_handle(state.incidents[-1].id)
    return (await incident.query(IncidentWorkflow.current_stage)).found


async def reports_of(cluster: DrillCluster, name: str) -> list[IncidentReport]:
    """Return the reports of all incidents of the job that are over."""
    found = [one.report for one in await gather.incidents(cluster, name)]
    return [report for report in found if report is not None]


def tried(reports: list[IncidentReport]) -> list[Rung]:
    """Return all tried rungs of all incidents, in order."""
    return [one.rung for report in reports for one in report.tried]


def found(reports: list[IncidentReport], rung: Rung) -> str:
    """Return the result of a rung that was tried once."""
    [one] = [one for report in reports for one in report.tried if one.rung is rung]
    return one.found


async def test_a_nan_that_the_data_bring_parks_the_job_and_takes_nobody_out(
    cluster: DrillCluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(BAD_BATCH))
    name = cluster.next_name("bad-batch")
    policy = RecoveryPolicy(replay={"steps": 16, "fault_share": 1.0})
    disk = cluster.home / "disk"
    disk.mkdir(exist_ok=True)
    checkpoint = CheckpointPolicy(disk=True, disk_path=str(disk), disk_every_steps=4, disk_keep=9)
    spec = JobSpec(name=name, script=str(script), policy=policy, checkpoint=checkpoint, **FOUR)
    machines = cluster.machines[:4]
    await cluster.control.start_job(spec, machines)
    async with asyncio.timeout(LIMIT_S):
        state = await until(cluster, name, "parked")
        why = await why_parked(cluster, state)
        assert "reattempt, diagnose and replay did not help, and nothing else is left to try" in why
        assert [one.name for one in state.machines] == [one.name for one in machines]
        await cluster.control.answer(state.incidents[-1].id, "abandon", "the test is over")
        await cluster.control.result(name)
    reports = await reports_of(cluster, name)
    assert [report.evicted for report in reports] == [[]] * len(reports)
    assert tried(reports) == [D, R, P, R]
    assert "at fault" not in found(reports, D)
    assert "every group" in found(reports, P), "the cause is the script or its data, and not a machine"


async def test_a_fault_that_no_rung_finds_is_parked_and_trains_on_bit_for_bit_once_it_is_resumed(
    cluster: DrillCluster, clusters: Clusters
) -> None:
    request = drill_request(fault="kill-rank", ranks=[1], times=3, at_step=12, steps=36, **FOUR)
    name = cluster.next_name("not-found")
    plan = cluster.home / "drills" / name / "faults.json"
    spec = request.spec(name, {environment.FAULTS: str(plan), environment.STATE_DIGEST: "1"})
    faults = planned(request, spec, plan, cluster)
    faults.write()
    machines = cluster.machines[:4]
    await cluster.control.start_job(spec, machines)
    async with asyncio.timeout(LIMIT_S):
        state = await until(cluster, name, "parked")
        assert all(faults.fired().values())
        why = await why_parked(cluster, state)
        assert "reattempt, diagnose and replay did not help, and nothing else is left to try" in why
        assert "rollback: there is no version to go back to" in why
        kept = [cluster.file.shm / machine.name / name for machine in machines]
        assert all(any(folder.rglob("*")) for folder in kept), "the states of all ranks are kept"
        await cluster.control.answer(state.incidents[-1].id, "resume", "the cause is gone")
        ended = await cluster.control.result(name)
    assert ended.outcome == "finished"
    state = await cluster.control.state(name)
    reports = await reports_of(cluster, name)
    assert (reports[-1].resolution, [report.evicted for report in reports]) == (
        "resumed by operator",
        [[]] * len(reports),
    )
    assert reports[-1].lost_steps is not None and reports[-1].lost_steps <= 1
    assert [one.name for one in state.machines] == [one.name for one in machines]
    assert tried(reports) == [R, D, R, P]
    assert "not reproduced on groups of" in found(reports, P) and "one that shows in 0.02" in found(reports, P)
    assert state.tried == [] and len(state.failures) == 1, "what was tried before the operator's resume is forgotten"
    reference = await clusters.references.of(cluster, spec)
    records, too_many = await gather.records(cluster, spec, machines)
    compared = compare(reference, records, spec.topology().world_size)
    assert (compared.losses, compared.state, too_many) == ([], [], 0)


GPU_TEXTS = {
    "CUDA error: uncorrectable ECC error encountered": ["m1"],
    "CUDA error: the GPU is lost. Reboot the system to recover this GPU": ["m1"],
    "NCCL error in: ProcessGroupNCCL.cpp:1970, internal error - please report this issue to the NCCL developers": [],
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.27.5"
    " Call to ibv_modify_qp failed with error Connection timed out": ["m1"],
    "CUDA error: an illegal memory access was encountered": [],
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx": [],
}
"""An error text that a rank raises in each attempt, without a cause in tests or replay → the machines that leave.

The rank raises it at the same step each time. If no machine leaves, the job is parked for a person.
"""


@pytest.mark.parametrize("text", GPU_TEXTS)
async def test_what_gpus_and_networks_report_by_exceptions(text: str, drill: DrillOf) -> None:
    result = await drill("raise", message=text, times=3, ranks=[3], steps=60)
    assert (result.problems, result.fired, result.evicted) == ([], True, GPU_TEXTS[text])
    assert any(name == "diagnose" for name, _ in result.stages), (
        "the machines were tested, and the code was not taken back"
    )
