"""Storage that does not answer is not treated as empty. It is asked again, and then an operator decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence, RankExit, Unlisted
from everstep.model.incident import IncidentReport
from everstep.model.job_state import incident_workflow_id
from everstep.model.state_copy import Restored, Tier
from tests.workflows.conftest import anomaly
from tests.workflows.test_restore import after_stop, copy
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow

DISK = CheckpointPolicy(disk_path="/mnt/runs", disk_every_steps=10)
SILENT = Unlisted(tier=Tier.DISK, machines=["m1"], reason="/mnt/runs cannot be listed: no answer for 5 s")
KILLED = RankExit(rank=1, machine="m1", signal=9, time_ns=5, completed_steps=26)
OWN = [copy(0, 25, Tier.OWN, "m0"), copy(0, 26, Tier.OWN, "m0"), copy(0, 20, Tier.DISK, "m0")]
"""The copies of rank 0, which are all that is left: m1 came back empty, and there were no backups."""


def m1_lost(given: StopRanks) -> Evidence:
    emptied = ["m1"] if given.generation == 1 else []
    return Evidence(generation=given.generation, exits=[KILLED], held=OWN, emptied=emptied, disk_asked=0)


async def lose(jobs: Any, checkpoint: CheckpointPolicy = DISK, **policy: object) -> tuple[Any, Any]:
    handle = await jobs.running(checkpoint=checkpoint, **policy)
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.incidents != [])
    incident = incident_workflow_id(state.spec.name, 1)
    return handle, jobs.client.get_workflow_handle_for(IncidentWorkflow.run, incident)


def hanging(until: Callable[[], bool]) -> Callable[[FindCheckpoints], Evidence]:
    """Return an answer of m1's disk: no answer until ``until`` holds, and then rank 1's file of step 20."""

    def find(given: FindCheckpoints) -> Evidence:
        if until():
            return Evidence(generation=0, held=[copy(1, 20, Tier.DISK, "m1")])
        return Evidence(generation=0, unlisted=[SILENT])

    return find


async def test_storage_that_answers_late_is_waited_for(jobs: Any) -> None:
    jobs.cluster.evidence = m1_lost
    jobs.cluster.found = hanging(lambda: jobs.cluster.calls.count("find") > 2)
    _, incident = await lose(jobs)

    report: IncidentReport = await incident.result()

    assert after_stop(jobs) == [
        *("stop 1", "find", "find", "find"),
        *("restore 0 from disk on m0, 1 from disk on m1", "launch 2 from 20", "confirm 2"),
    ]
    assert report.resume_step == 20
    waited = [note.text for note in jobs.cluster.notes if note.stage == "find"]
    assert len(waited) == 2
    assert "step 20 may exist: disk of m1 (/mnt/runs cannot be listed: no answer for 5 s)" in waited[0]
    assert "asked again in 0.05 s" in waited[0]


async def test_storage_that_stays_silent_parks_the_job_and_an_operator_asks_it_again(jobs: Any) -> None:
    back = False
    jobs.cluster.evidence = m1_lost
    jobs.cluster.found = hanging(lambda: back)
    handle, incident = await lose(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")

    assert after_stop(jobs) == ["stop 1", "find", "find", "find"]
    parked = jobs.cluster.notes[-1].text
    assert parked.startswith("park: step 20 may exist: disk of m1 (/mnt/runs cannot be listed: no answer for 5 s)")
    assert "no step is certain" in parked

    await incident.signal("resume", {"operator": "ada"})
    await jobs.until(handle, lambda state: state.status == "recovering")
    await jobs.until(handle, lambda state: state.status == "parked")
    assert not [call for call in jobs.cluster.calls if call.startswith("launch 2")]

    back = True
    await incident.signal("resume", {"operator": "ada", "note": "mounted again"})
    report: IncidentReport = await incident.result()
    assert (report.resume_step, report.recovered, report.accepted_loss) == (20, True, "")


@pytest.mark.history("incident-loss-accepted")
async def test_an_operator_may_accept_what_may_be_lost_and_that_is_recorded(jobs: Any) -> None:
    jobs.cluster.evidence = m1_lost
    jobs.cluster.found = hanging(lambda: False)
    handle, incident = await lose(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    await incident.signal("resume", {"operator": "ada", "note": "the share is gone", "accept_loss": True})

    report: IncidentReport = await incident.result()

    assert report.resume_step == 0
    assert report.accepted_loss == (
        "ada (the share is gone) lets the job resume from step 0, although step 20 may exist: "
        "disk of m1 (/mnt/runs cannot be listed: no answer for 5 s)"
    )
    assert "after an operator accepted a loss" in report.headline
    assert [note.text for note in jobs.cluster.notes if note.stage == "accepted"] == [report.accepted_loss]
    assert "launch 2 from 0" in jobs.cluster.calls


async def test_what_was_accepted_covers_no_larger_loss(jobs: Any) -> None:
    backup = copy(1, 25, Tier.BACKUP, "m0")

    def evidence(given: StopRanks) -> Evidence:
        stops = jobs.cluster.calls.count("stop 1")
        held = [*OWN, backup] if stops == 1 else OWN
        return m1_lost(given).model_copy(update={"held": held, "disk_asked": 26})

    jobs.cluster.evidence = evidence
    jobs.cluster.found = hanging(lambda: False)
    handle, incident = await lose(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    assert "step 26 may exist" in jobs.cluster.notes[-1].text
    assert "only step 25 is certain" in jobs.cluster.notes[-1].text
    await incident.signal("resume", {"operator": "ada", "accept_loss": True})
    await jobs.until(handle, lambda state: state.status == "recovering")

    await jobs.until(handle, lambda state: state.status == "parked")
    assert "no step is certain" in jobs.cluster.notes[-1].text
    assert not [call for call in jobs.cluster.calls if call.startswith("launch 2")]


async def test_nobody_waits_for_storage_that_cannot_have_anything_newer(jobs: Any) -> None:
    """m1 is lost with its disk, but the backup of its rank is at least as new as any file on a disk."""
    jobs.cluster.evidence = lambda given: m1_lost(given).model_copy(
        update={"held": [*OWN, copy(1, 25, Tier.BACKUP, "m0")]}
    )
    jobs.cluster.found = hanging(lambda: False)
    _, incident = await lose(jobs)

    assert (await incident.result()).resume_step == 25
    assert after_stop(jobs) == ["stop 1", "restore 1 from backup on m0", "launch 2 from 25", "confirm 2"]


@pytest.mark.parametrize("accept", [False, True])
async def test_a_find_that_fails_is_no_answer(jobs: Any, accept: bool) -> None:
    def fails(given: FindCheckpoints) -> Evidence:
        raise ApplicationError("m1: the agent refused", non_retryable=True)

    jobs.cluster.evidence = m1_lost
    jobs.cluster.found = fails
    handle, incident = await lose(jobs, storage={"tries": 1})
    await jobs.until(handle, lambda state: state.status == "parked")
    assert "could not be asked: m1: the agent refused" in jobs.cluster.notes[-1].text
    if accept:
        await incident.signal("resume", {"operator": "ada", "accept_loss": True})
        assert (await incident.result()).resume_step == 0
    else:
        jobs.cluster.found = hanging(lambda: True)
        await incident.signal("resume", {"operator": "ada"})
        assert (await incident.result()).resume_step == 20


async def test_copies_that_cannot_be_brought_are_tried_again_before_anything_older(jobs: Any) -> None:
    tries = 0

    def stuck_twice(given: RestoreCheckpoints) -> Restored:
        nonlocal tries
        tries += 1
        stuck = [one.changed(valid=False, reason="the data port is shut") for one in given.copies]
        return Restored(unreached=stuck) if tries <= 2 else Restored(moved=given.copies)

    jobs.cluster.restored = stuck_twice
    jobs.cluster.evidence = lambda given: m1_lost(given).model_copy(
        update={"held": [*OWN, copy(1, 25, Tier.BACKUP, "m0"), copy(1, 20, Tier.DISK, "m1")]}
    )
    _, incident = await lose(jobs, CheckpointPolicy())

    assert (await incident.result()).resume_step == 25
    assert [call for call in after_stop(jobs) if "restore" in call] == ["restore 1 from backup on m0"] * 3
