"""Each machine leaves a job for every reason to evict it, and healthy machines never leave. Run by ``make drills``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from drills import DrillResult
from drills.faults.devices import LINES, SURE
from drills.spec.stages import MOMENTS
from tests.drills.conftest import Clusters, DrillOf

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

WHOLE: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2, "at_step": 10, "steps": 30}
EIGHT: dict[str, Any] = {"machines": 8, "ranks_per_machine": 1, "tp": 2, "pp": 2, "at_step": 10, "steps": 30}
TEN: dict[str, Any] = {"machines": 10, "ranks_per_machine": 1, "tp": 2, "pp": 1, "at_step": 8, "steps": 40}
FOUR: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 2, "pp": 1, "at_step": 8}
SMALL: dict[str, Any] = {"machines": 2, "ranks_per_machine": 2, "tp": 2, "pp": 1, "at_step": 8, "steps": 24}
STEPPING = SMALL | {"steps": 52}
"""The sizes of a job that still steps when its machine is found faulty."""
CONTROL = ("kill-worker", "kill-temporal")
KERNEL_LOG = pytest.mark.skipif(not os.access("/dev/kmsg", os.W_OK), reason="/dev/kmsg needs root")
WentOn = Callable[..., None]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """One cluster, which is large enough for a job of ten machines and three replacements."""
    shared = Clusters(machines=11, standbys=2)
    yield shared
    assert await shared.close() == []


def on_others(result: DrillResult, *evicted: str) -> None:
    """Check that exactly these machines were evicted and replaced."""
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution, result.generations) == (True, True, "eviction", 2)
    assert (result.evicted, result.losses_match, result.leaked) == (sorted(evicted), True, [])
    assert result.steps_lost is not None and result.steps_lost <= 1


@pytest.mark.parametrize("reason", [pytest.param(one, marks=[KERNEL_LOG] if one in LINES else []) for one in SURE])
async def test_each_fault_that_names_its_machine_evicts_it(drill: DrillOf, reason: str) -> None:
    on_others(await drill("machine-fault", machine="m1", reason=reason, **STEPPING), "m1")


@pytest.mark.parametrize("machine", ["m0", "m1", "m2", "m3"])
async def test_each_machine_is_lost_for_good(drill: DrillOf, machine: str) -> None:
    """The machines include the one with rank 0 and the rendezvous store."""
    on_others(await drill("kill-machine", machine=machine, gone=True, **WHOLE), machine)


GROUPS = {
    "tp": [["m0"], ["m1"], ["m2"], ["m3"]],
    "pp": [["m0", "m2"], ["m0", "m2"], ["m1", "m3"], ["m1", "m3"]],
    "dp": [["m0", "m1"], ["m0", "m1"], ["m2", "m3"], ["m2", "m3"]],
}
"""Kind of groups → the machines of each group of the job ``WHOLE``."""


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", GROUPS)
async def test_each_group_is_lost_for_good(drill: DrillOf, kind: str, index: int) -> None:
    on_others(await drill("kill-group", kind=kind, index=index, gone=True, **WHOLE), *GROUPS[kind][index])


async def test_two_ranks_are_stopped_at_once(drill: DrillOf) -> None:
    """Both ranks are named, and both machines leave. Neither machine has backups of the other."""
    on_others(await drill("stop-rank", ranks=[1, 3], **WHOLE), "m0", "m1")


@pytest.mark.parametrize("rank", range(8))
async def test_each_rank_hangs(drill: DrillOf, rank: int) -> None:
    on_others(await drill("deadlock", ranks=[rank], **WHOLE), f"m{rank // 2}")


@pytest.mark.parametrize("index", range(4))
async def test_a_quarter_of_the_machines_is_lost_for_good(drill: DrillOf, index: int) -> None:
    """These machines could be behind one switch. Standbys replace them, without an operator."""
    on_others(
        await drill("kill-group", kind="tp", index=index, gone=True, **EIGHT), f"m{2 * index}", f"m{2 * index + 1}"
    )


async def test_a_faulty_standby_is_replaced_by_the_next_one(drill: DrillOf) -> None:
    result = await drill("kill-machine", machine="m1", gone=True, standby="sick", **SMALL)
    assert result.problems == []
    assert result.resolution == "eviction"
    assert result.evicted[0] == "m1"
    assert len(result.evicted) <= 2, (
        "besides m1, at most the sick standby leaves; the pool gives it only if it has not polled it yet"
    )
    assert result.losses_match is True and result.generations == 2


async def test_a_standby_that_dies_during_its_preparation_is_replaced_by_the_next_one(drill: DrillOf) -> None:
    result = await drill("kill-machine", machine="m1", gone=True, standby="dies", **SMALL)
    assert (result.evicted[0], len(result.evicted)) == ("m1", 2)
    on_others(result, *result.evicted)


async def test_with_an_empty_pool_the_job_gets_the_first_new_machine(drill: DrillOf) -> None:
    on_others(await drill("kill-machine", machine="m1", gone=True, standby="late", **SMALL), "m1")


@pytest.mark.parametrize("part", CONTROL)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("stage", ["evict", "prepare"])
async def test_the_control_plane_dies_while_a_machine_is_replaced(
    drill: DrillOf, part: str, moment: str, stage: str
) -> None:
    """In the first drill, the machine is lost. In the second, it has a fault while its ranks still step."""
    strike: dict[str, Any] = {"in_stage": stage, "moment": moment, "machine": "m1", **SMALL}
    on_others(await drill(part, during="kill-machine", gone=True, **strike), "m1")
    on_others(await drill(part, during="gpu-lost", **(strike | STEPPING)), "m1")


@pytest.mark.parametrize("part", CONTROL)
@pytest.mark.parametrize("moment", MOMENTS[:2])
async def test_the_control_plane_dies_while_a_job_waits_for_a_machine(drill: DrillOf, part: str, moment: str) -> None:
    strike: dict[str, Any] = {"in_stage": "await", "moment": moment, "machine": "m1", **SMALL}
    on_others(await drill(part, during="kill-machine", gone=True, standby="late", **strike), "m1")


def nobody_left(result: DrillResult, resolution: str, incidents: int) -> None:
    """Check that the job continued, and no machine left it."""
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution) == (True, True, resolution)
    assert (result.evicted, result.losses_match, result.leaked) == ([], True, [])
    assert len(result.incidents) == incidents


@KERNEL_LOG
@pytest.mark.parametrize(("code", "incidents"), [(45, 0), (31, 0), (63, 0), (94, 1)])
async def test_an_xid_on_all_machines_evicts_no_machine(drill: DrillOf, code: int, incidents: int) -> None:
    """A program caused the Xid, its cause is unknown, or the GPU contained it. So its verdict is unknown or unsure."""
    nobody_left(await drill("xid", code=code, everywhere=True, **FOUR), "observed", incidents)


@KERNEL_LOG
async def test_a_sure_fault_that_all_machines_have_evicts_no_machine(drill: DrillOf) -> None:
    nobody_left(await drill("machine-fault", reason="xid-79", everywhere=True, **FOUR), "observed", 1)


@KERNEL_LOG
@pytest.mark.parametrize("code", [31, 45])
async def test_a_dead_rank_with_an_unknown_verdict_is_tried_again(drill: DrillOf, code: int) -> None:
    result = await drill("xid", machine="m1", code=code, then="kill-rank", **(SMALL | {"steps": 40}))
    nobody_left(result, "reattempt", 1)


@pytest.mark.parametrize("seconds", [4.0, 12.0])
async def test_if_a_third_of_the_agents_is_silent_the_breaker_prevents_evictions(
    drill: DrillOf, seconds: float
) -> None:
    """The job continues without an operator as soon as the agents answer."""
    nobody_left(await drill("hang-agents", count=3, seconds=seconds, **TEN), "reattempt", 1)


async def test_a_dead_agent_on_a_machine_that_steps_evicts_no_machine(drill: DrillOf) -> None:
    sizes = {name: value for name, value in SMALL.items() if name != "steps"}
    nobody_left(await drill("kill-agent", machine="m1", gone=True, **sizes), "absorbed", 0)


async def test_a_hanging_agent_on_a_machine_that_steps_evicts_no_machine(drill: DrillOf) -> None:
    nobody_left(await drill("hang-peer", machine="m1", seconds=15.0, **(SMALL | {"steps": 130})), "absorbed", 0)
