"""The code of running jobs is updated. Good updates switch at one step, bad ones are undone, with the same bits.

Each update is requested by sending the same signal three times. A reference run, which changes the learning rate by
itself at the step that the job's record names, has the same losses.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from drills import DrillCluster, DrillResult
from everstep.model.version import VersionStatus

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

DrillOf = Callable[..., Awaitable[DrillResult]]
wide = pytest.mark.wide
JOB: dict[str, Any] = {"steps": 36}


def updated(result: DrillResult, resolution: str = "update", *, incidents: int = 1) -> None:
    """Check what must be true for every update; the drill's judge has already checked versions and steps."""
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution, len(result.incidents)) == (True, True, resolution, incidents)
    assert result.losses_match is True and result.state_match is True
    assert result.leaked == [] and result.duplicates == 0


async def test_an_urgent_one_loses_nothing(drill: DrillOf) -> None:
    result = await drill("update", **JOB)
    updated(result)
    assert (result.steps_lost, result.steps_redone) == (0, 0)
    assert [name for name, _ in result.stages] == ["align", "stop", "decide", "reattempt", "confirm"]


@wide
@pytest.mark.parametrize(
    ("rides_on", "resolution"),
    [
        pytest.param({"then": "kill-rank"}, "update", id="crash"),
        pytest.param({"then": "kill-machine", "machine": "m1", "gone": True}, "eviction", id="eviction"),
        pytest.param({"then": "kill-forkserver"}, "update", id="fork server"),
        pytest.param({"window": 3.0}, "update", id="window"),
    ],
)
async def test_a_lazy_one_rides_on_what_comes(drill: DrillOf, rides_on: dict[str, Any], resolution: str) -> None:
    updated(await drill("update", lazy=True, **rides_on, **JOB), resolution)


@wide
@pytest.mark.parametrize("during", ["kill-rank", "parked", "update", "kill-workers", "kill-temporal", "kill-agent"])
async def test_one_that_is_asked_for_in_the_middle_of_something(drill: DrillOf, during: str) -> None:
    updated(await drill("update", during=during, seconds=3.0, **JOB))


@wide
@pytest.mark.parametrize("part", ["kill-worker", "kill-temporal"])
@pytest.mark.parametrize("stage", ["make", "try", "align", "reattempt"])
async def test_the_control_plane_dies_while_one_is_tried_or_applied(drill: DrillOf, part: str, stage: str) -> None:
    updated(await drill(part, in_stage=stage, during="update", **JOB))


@wide
async def test_what_fails_at_its_import_costs_nothing(drill: DrillOf, cluster: DrillCluster) -> None:
    result = await drill("bad-version", at_start=True, **JOB)
    updated(result, "absorbed", incidents=0)
    assert (result.generations, result.steps_redone) == (1, 0)
    _, refused = (await cluster.control.state(result.job)).versions
    assert refused.status is VersionStatus.REFUSED
    assert "ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in refused.why


@pytest.mark.parametrize(
    ("how", "incidents"),
    [
        pytest.param({"fails_after": 0}, 1, id="at once", marks=wide),
        pytest.param({"fails_after": 1}, 2, id="after a step"),
        pytest.param({"fails_after": 5}, 2, id="after five steps", marks=wide),
        pytest.param({"changes_state": True}, 1, id="in its restore", marks=wide),
        pytest.param({"fails_after": 0, "lazy": True, "then": "kill-rank"}, 1, id="lazy", marks=wide),
    ],
)
async def test_what_fails_later_is_taken_back(
    drill: DrillOf, cluster: DrillCluster, how: dict[str, Any], incidents: int
) -> None:
    result = await drill("bad-version", **how, **JOB)
    updated(result, "rollback", incidents=incidents)
    if "fails_after" in how:
        failure = (await cluster.control.state(result.job)).failures[-1]
        assert failure.classification is not None
        assert re.search(r"/gpt\.py:\d+ in \w+$", failure.classification.place), "the place in the user's code is named"
