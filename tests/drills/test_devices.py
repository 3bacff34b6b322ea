"""Broken devices of a machine are found by inspections, and an incident names the reason, the machine and the owner."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from drills import DrillCluster, DrillResult
from drills.faults.devices import FREEZER
from drills.faults.out_of_memory import OutOfMemory
from everstep.model.finding import Health, Owner
from everstep.model.job import JobSpec
from tests.drills.conftest import DrillOf

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package")]
Recovered = Callable[..., None]
STEPPING = 52
"""So many steps that the job still steps when the machine is found faulty."""
KERNEL_LOG = pytest.mark.skipif(not os.access("/dev/kmsg", os.W_OK), reason="/dev/kmsg needs root")


def went_on(result: DrillResult, *, incidents: int = 1) -> None:
    """Check that the fault was reported and the job lost no step."""
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution, result.generations) == (True, True, "observed", 1)
    assert (len(result.incidents), result.steps_lost, result.losses_match) == (incidents, 0, True)
    assert result.detected_s is not None and result.detected_s > 0


def replaced(result: DrillResult, machine: str = "m1") -> None:
    """Check that the machine was replaced and no step was lost.

    Before the ranks were ended, all of them had saved the same step.
    """
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution, result.generations) == (True, True, "eviction", 2)
    assert (result.evicted, result.losses_match) == ([machine], True)
    assert result.steps_lost == 0
    assert [name for name, _ in result.stages][:3] == ["evict", "align", "stop"]


@KERNEL_LOG
async def test_the_kernel_reports_that_a_gpu_fell_off_the_bus(drill: DrillOf, cluster: DrillCluster) -> None:
    result = await drill("xid", machine="m1", steps=STEPPING)
    replaced(result)
    [incident] = (await cluster.control.state(result.job)).incidents
    assert "m1: GPU 0000:" in incident.headline
    assert "Xid 79, the GPU has fallen off the bus (xid-79)" in incident.headline


@KERNEL_LOG
@pytest.mark.wide
async def test_an_xid_that_the_program_causes_opens_no_incident(drill: DrillOf) -> None:
    went_on(await drill("xid", machine="m0", code=31), incidents=0)


@KERNEL_LOG
@pytest.mark.wide
async def test_a_rank_that_ends_with_its_gpu(drill: DrillOf) -> None:
    result = await drill("xid", machine="m1", then="kill-rank", steps=40)
    assert (result.problems, result.resolution, result.generations) == ([], "reattempt", 2)


@pytest.mark.wide
async def test_a_gpu_is_lost(drill: DrillOf) -> None:
    replaced(await drill("gpu-lost", machine="m1", steps=STEPPING))


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs root and cgroups of the first version")
@pytest.mark.wide
async def test_a_rank_that_sigkill_does_not_end_beside_a_lost_gpu(drill: DrillOf) -> None:
    result = await drill("gpu-stuck", machine="m1", steps=60)
    assert (result.problems, result.ok, result.resolution) == ([], True, "eviction")
    assert (result.evicted, result.losses_match) == (["m1"], True)
    assert result.steps_lost in {0, 1}  # the frozen rank may stand anywhere in its step, so the ranks cannot be aligned


@pytest.mark.wide
async def test_a_gpu_is_too_hot(drill: DrillOf) -> None:
    went_on(await drill("gpu-hot", machine="m1"))


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are mounted by root")
@pytest.mark.wide
async def test_a_file_system_turns_read_only(drill: DrillOf) -> None:
    replaced(await drill("fs-readonly", machine="m1", steps=STEPPING))


@pytest.mark.wide
async def test_without_another_machine_the_job_continues_with_the_fault(spread: DrillOf) -> None:
    went_on(await spread("gpu-lost", machine="m1", steps=40))


@pytest.mark.skipif(bool(OutOfMemory().why_not()), reason=OutOfMemory().why_not() or "it can be made")
async def test_a_rank_is_killed_for_memory(drill: DrillOf, recovered: Recovered, cluster: DrillCluster) -> None:
    result = await drill("oom", ranks=[2])
    recovered(result)
    [incident] = (await cluster.control.state(result.job)).incidents
    report = await cluster.control.client.get_workflow_handle(incident.id).result()
    assert "m1: rank 2 of " in report["headline"]
    found = report["findings"][0]["finding"]
    assert (found["reason"], found["owner"], found["verdict"]) == ("oom-kill-limit", Owner.CODE, Health.UNKNOWN)
    group = OutOfMemory().details(JobSpec(name="x", script="/x.py"))["group"]
    assert not os.path.exists(group)  # noqa: ASYNC240, PTH110
