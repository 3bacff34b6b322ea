"""Faults despite which a job continues, on a real server. Each workflow task replays the history from the start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from everstep.model.evidence import Evidence
from everstep.model.finding import Finding, MachineFinding
from everstep.model.incident import Anomaly, Symptom
from tests.workflows.conftest import exits, held
from tests.workflows.test_job import anomaly
from workflows.job import JobWorkflow
from workflows.job_incidents import MOST_WAITING


def fault(number: int = 1, *, machine: str = "m1", reason: str = "gpu-hot") -> Anomaly:
    finding = Finding(inspection="gpu", reason=reason, item="GPU 3", text="it is too hot", since_ns=5)
    found = MachineFinding(machine=machine, finding=finding)
    return Anomaly(
        id=f"{machine}-{number}",
        generation=1,
        symptom=Symptom.MACHINE_FAULT,
        headline=found.headline,
        machines=[machine],
        seen_ns=5,
        findings=[found],
    )


@pytest.mark.history("incident-observed")
async def test_it_is_told_by_an_incident_that_does_nothing(jobs: Any) -> None:
    handle = await jobs.running()
    before = list(jobs.cluster.calls)
    assert await handle.execute_update(JobWorkflow.observe, fault()) == "accepted"
    state = await jobs.until(handle, lambda state: state.incidents and state.incidents[0].resolution)

    [incident] = state.incidents
    assert (incident.resolution, incident.lost_steps, state.status, state.generation) == ("observed", 0, "running", 1)
    assert incident.headline == "Observed, the job continues: m1: GPU 3: it is too hot (gpu-hot)"
    assert jobs.cluster.calls == before
    assert [(note.stage, note.report.findings[0].finding.reason) for note in jobs.cluster.notes] == [
        ("closed", "gpu-hot")
    ]
    await handle.signal(JobWorkflow.stop, {"operator": "test"})
    assert (await handle.result()).outcome == "stopped"


async def test_the_same_fault_is_told_once_and_others_are_told_beside_it(jobs: Any) -> None:
    handle = await jobs.running()
    faults = [fault(1), fault(2), fault(3, machine="m0"), fault(4, reason="disk-full")]
    answers = [await handle.execute_update(JobWorkflow.observe, found) for found in faults]
    state = await jobs.until(handle, lambda state: sum(bool(one.resolution) for one in state.incidents) == 3)

    assert answers == ["accepted", "already reported", "accepted", "accepted"]
    assert [one.number for one in state.incidents] == [1, 2, 3]
    await handle.execute_update(JobWorkflow.finished, 1)
    assert (await handle.result()).outcome == "finished"


async def test_many_faults_together_are_one_incident_of_what_is_not_told_yet(jobs: Any) -> None:
    handle = await jobs.running()
    one, other = fault(1), fault(2, machine="m0")
    both = one.model_copy(update={"id": "both", "findings": one.findings + other.findings, "machines": ["m0", "m1"]})
    answers = [await handle.execute_update(JobWorkflow.observe, found) for found in (one, both, other)]
    state = await jobs.until(handle, lambda state: sum(bool(one.resolution) for one in state.incidents) == 2)

    assert answers == ["accepted", "accepted", "already reported"]
    assert state.incidents[1].headline == "Observed, the job continues: m0: GPU 3: it is too hot (gpu-hot)"
    await handle.execute_update(JobWorkflow.finished, 1)
    await handle.result()


async def test_a_crash_is_not_held_up_and_what_comes_in_a_recovery_is_part_of_it(jobs: Any) -> None:
    found = fault().findings
    jobs.cluster.evidence = lambda given: Evidence(
        generation=given.generation, exits=exits(20), held=held(20), findings=found
    )
    jobs.cluster.blocked.add("launch 2")
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly())
    await jobs.until(handle, lambda state: state.status == "recovering")
    answer = await handle.execute_update(JobWorkflow.observe, fault())
    jobs.cluster.blocked.clear()
    state = await jobs.until_runs(handle, 2)

    assert answer.startswith("an incident is open")
    [incident] = state.incidents
    assert incident.resolution == "reattempt"
    report = next(note.report for note in jobs.cluster.notes if note.report)
    assert report.findings == found
    await handle.signal(JobWorkflow.stop, {"operator": "test"})
    await handle.result()


async def test_a_flood_of_faults_is_bounded(jobs: Any) -> None:
    handle = await jobs.running()
    many = [fault(number, reason=f"reason-{number}") for number in range(2 * MOST_WAITING)]

    async def observe(found: Anomaly) -> str:
        """Repeat an update as a watcher does, since the job takes no updates while it continues as new."""
        while True:
            try:
                return str(await handle.execute_update(JobWorkflow.observe, found))
            except RPCError as error:
                if error.status not in {RPCStatusCode.RESOURCE_EXHAUSTED, RPCStatusCode.UNAVAILABLE}:
                    raise
                await asyncio.sleep(0.1)

    answers = await asyncio.gather(*map(observe, many))
    await handle.execute_update(JobWorkflow.finished, 1)

    assert (await handle.result()).outcome == "finished"
    assert answers.count("accepted") >= MOST_WAITING
