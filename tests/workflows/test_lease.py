"""A job has its machines before it does anything on them, and gives them back when nothing of it is left there."""

from __future__ import annotations

from typing import Any

from tests.workflows.conftest import MACHINES


async def test_a_job_leases_its_machines_first_and_gives_them_back_last(jobs: Any) -> None:
    handle = await jobs.start()
    state = await jobs.until(handle, lambda state: state.status == "running")
    (lease,) = jobs.cluster.leases
    assert (lease.job, lease.run, lease.machines) == (state.spec.name, state.run, MACHINES)
    assert not jobs.cluster.given_back

    await handle.signal("stop", {"operator": "me"})
    await handle.result()

    (back,) = jobs.cluster.given_back
    assert (back.job, back.run) == (state.spec.name, state.run)
    assert jobs.cluster.calls[-1] == "release"


async def test_a_job_whose_machines_another_one_has_touches_none_of_them(jobs: Any) -> None:
    jobs.cluster.refused = {f"m{number}": "job gpt has it" for number in range(6)}
    handle = await jobs.start()

    result = await handle.result()

    assert result.outcome == "failed"
    assert "m0: job gpt has it; m1: job gpt has it" in result.headline
    assert result.headline.endswith("and 2 more")
    assert jobs.cluster.calls == ["release"]
