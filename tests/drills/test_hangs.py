"""Hangs: the machine at fault leaves the job, the result is equal bit for bit, and the ledger keeps the samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from drills import DrillCluster, DrillResult

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

Recovered = Callable[..., None]
DrillOf = Callable[..., Awaitable[DrillResult]]


def left(result: DrillResult, *machines: str) -> None:
    """Check that exactly these machines left the job, in one incident, and that the result is right."""
    assert result.problems == []
    assert (result.resolution, result.evicted) == ("eviction", sorted(machines))
    assert [name for name, _ in result.stages][:3] == ["trace", "stop", "evict"]
    assert result.losses_match and result.state_match
    assert (len(result.incidents), result.leaked, result.duplicates) == (1, [], 0)


async def test_a_rank_that_is_stopped(drill: DrillOf) -> None:
    left(await drill("stop-rank", ranks=[2]), "m1")


async def test_a_rank_skips_a_collective_and_the_ledger_has_the_samples(drill: DrillOf, cluster: DrillCluster) -> None:
    result = await drill("skip-collective", ranks=[1])
    left(result, "m0")
    ledger = await cluster.control.ledger()
    assert ledger is not None
    looks = ledger.looks(result.incidents[0])
    assert {(number, machine) for number, machine, _, _ in looks} >= {(1, "m0"), (1, "m1"), (2, "m0"), (2, "m1")}


@pytest.mark.wide
@pytest.mark.parametrize(("fault", "rank"), [("deadlock", 3), ("hang-dataloader", 0), ("spin", 2)])
async def test_a_rank_waits_or_computes_for_ever(drill: DrillOf, fault: str, rank: int) -> None:
    left(await drill(fault, ranks=[rank]), f"m{rank // 2}")


@pytest.mark.wide
async def test_a_wrong_order_of_collectives_evicts_no_machine(drill: DrillOf, recovered: Recovered) -> None:
    result = await drill("wrong-order")
    recovered(result)
    assert result.evicted == []
