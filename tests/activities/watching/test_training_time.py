"""The share of its time that a job trained. Its workflow and Prometheus show it, no matter which worker computed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle

from activities.ledger.ledger import Ledger
from activities.ledger.records import NumbersUsed
from activities.watching.job_view import JobView
from activities.watching.training_time import TrainingTimes
from activities.write_to_ledger import RecordJob
from everstep.model.job import JobSpec
from everstep.model.job_state import ShareTrained
from tests.activities.performing import perform
from tests.workflows.conftest import Jobs, jobs_on
from workflows import attributes

S = 10**9


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as opened:
        yield opened


def trained(ledger: Ledger, spec: JobSpec, *, started_s: float, stepped_s: float) -> None:
    """Record a job that was started, and stepped for the first time, this many seconds ago."""
    now_ns = time.time_ns()
    ledger.job_started(spec, started_ns=now_ns - round(started_s * S))
    ledger.generation_launched(spec.name, 1, resume_step=0, launched_ns=now_ns - round(started_s * S))
    ledger.generation_stepped(spec.name, 1, stepped_ns=now_ns - round(stepped_s * S))


async def shown(handle: WorkflowHandle[Any, Any]) -> tuple[float | None, float | None]:
    found = (await handle.describe()).typed_search_attributes
    return found.get(attributes.ETTR), found.get(attributes.ETTR_LAST_HOUR)


async def running(jobs: Jobs) -> tuple[WorkflowHandle[Any, Any], JobView]:
    handle = await jobs.start()
    state = await jobs.until(handle, lambda state: state.status == "running")
    job = JobView(state.spec, state.machines)
    job.note_running(1, 1, 0)
    return handle, job


async def test_a_job_shows_which_share_of_its_time_it_trained(temporal: Client, ledger: Ledger) -> None:
    async with jobs_on(temporal) as jobs:
        handle, job = await running(jobs)
        assert await shown(handle) == (None, None)
        trained(ledger, job.spec, started_s=7200.0, stepped_s=1800.0)
        watched = {handle.id: job}
        several = [TrainingTimes(temporal, ledger, watched) for _ in range(3)]
        await asyncio.gather(*(one.look() for one in several))

        assert await shown(handle) == (0.25, 0.5)
        spent = several[0].spent[handle.id]
        assert [round(one.causes["start"]) for one in spent] == [5400, 1800]
        await asyncio.gather(*(TrainingTimes(temporal, ledger, watched).look() for _ in range(3)))
        history = (await handle.fetch_history()).events
        taken = [
            event for event in history if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED
        ]
        assert len(taken) == 1, "the workflow accepts only one update, since the others would change nothing"
        state = await jobs.until(handle, lambda state: state.ettr is not None)
        assert (state.ettr, state.ettr_last_hour) == (0.25, 0.5)

        jobs.cluster.used = NumbersUsed(ettr=0.27, ettr_last_hour=0.55)
        await handle.signal("stop", {"operator": "ada"})
        await handle.result()
        assert await shown(handle) == (0.27, 0.55), "the last values are those of the complete run"


async def test_one_job_that_cannot_be_told_holds_up_no_other(temporal: Client, ledger: Ledger) -> None:
    async with jobs_on(temporal) as jobs:
        handle, job = await running(jobs)
        new = JobView(job.spec.model_copy(update={"name": "new"}), job.machines)
        over = JobView(job.spec.model_copy(update={"name": "over"}), job.machines)
        over.note_running(1, 1, 0)
        for spec in (job.spec, new.spec, over.spec):
            trained(ledger, spec, started_s=100.0, stepped_s=50.0)
        watched = {"job/new": new, "job/over": over, handle.id: job}
        times = TrainingTimes(temporal, ledger, watched)
        await times.look()

        assert await shown(handle) == (0.5, 0.5)
        assert times.spent.keys() == {handle.id, "job/over"}, (
            "job/new has not run yet, so the ledger's rows are of an earlier run"
        )
        watched.clear()
        await times.look()
        assert times.spent == {}


async def test_time_without_a_step_does_not_count(temporal: Client, ledger: Ledger) -> None:
    async with jobs_on(temporal) as jobs:
        handle, job = await running(jobs)
        trained(ledger, job.spec, started_s=100.0, stepped_s=100.0)
        now_ns = 0
        for now_ns in range(0, 41 * S, S // 2):
            job.facts(1, now_ns)
        assert job.quiet_s == pytest.approx(40.0, abs=1.0)
        await TrainingTimes(temporal, ledger, {handle.id: job}).look()
        assert await shown(handle) == (0.6, 0.6)


def test_shares_are_shown_in_whole_percent() -> None:
    assert ShareTrained.shown(0.98765, None) == ShareTrained(ettr=0.99)


async def test_the_end_of_a_job_is_written_with_its_share(ledger: Ledger) -> None:
    spec = JobSpec(name="gpt", script="/train.py")
    trained(ledger, spec, started_s=7200.0, stepped_s=1800.0)
    entry = RecordJob(spec=spec, time_ns=time.time_ns(), outcome="stopped by ada")
    used = await asyncio.to_thread(_write, ledger, entry)
    assert (used.ettr, used.ettr_last_hour) == (0.25, 0.5)
    assert (await asyncio.to_thread(_write, ledger, entry)) == used


def _write(ledger: Ledger, entry: RecordJob) -> NumbersUsed:
    return asyncio.run(perform(entry, ledger=ledger))
