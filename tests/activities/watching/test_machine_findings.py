"""A watcher reports the findings of inspections to the workflows of jobs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import structlog
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.watching.job_view import JobView
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.machine_fault import FINDINGS_KEPT
from everstep.model.incident import Anomaly, Symptom
from tests.activities.watching.test_job_view import S, anomalies, show, watched


def finding(number: int = 7, *, over: bool = False, since_s: float = 1) -> pb.Observation:
    since_ns = round(since_s * S)
    found = pb.Finding(
        inspection="gpu", reason="gpu-hot", verdict="faulty", item="GPU 3", text="hot", since_ns=since_ns
    )
    told = pb.MachineFinding(finding=found, over=over)
    return pb.Observation(sequence=number, id=f"m1-{number}", machine="m1", machine_finding=told)


def test_a_fault_is_reported_once_and_not_if_it_is_over() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.found("m1", finding(), 100 * S)
    assert anomalies(job, 100 * S) == []
    [told] = anomalies(job, 102 * S)
    assert (told.rule, told.symptom, told.id) == ("machine-fault", Symptom.MACHINE_FAULT, "m1-7")
    job.accepted(told, 103 * S)
    assert anomalies(job, 103 * S) == []
    assert job.reported == set()

    job.found("m1", finding(8), 103 * S)
    job.found("m1", finding(9, over=True), 104 * S)
    assert anomalies(job, 110 * S) == []


def test_a_fault_whose_verdict_became_unknown_is_not_reported() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.found("m1", finding(), 100 * S)
    doubtful = finding(8)
    doubtful.machine_finding.finding.verdict = "unknown"
    job.found("m1", doubtful, 100 * S)
    assert anomalies(job, 110 * S) == []


class RefusingClient:
    """A client of Temporal whose updates fail with ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def get_workflow_handle(self, _: str) -> RefusingClient:
        return self

    async def execute_update(self, *_: Any, **__: Any) -> str:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        WorkflowUpdateFailedError(ApplicationError("the run has ended")),
        RPCError("away", RPCStatusCode.UNAVAILABLE, b""),
    ],
)
async def test_a_failed_report_of_a_machine_fault_delays_no_other_report(error: Exception) -> None:
    job, client = watched(), RefusingClient(error)
    show(job, 100 * S, 20)
    job.found("m1", finding(since_s=90), 100 * S)
    [fault] = anomalies(job, 110 * S)
    watcher = Watcher(cast(Client, client), AgentClients(), "queue")
    async with asyncio.timeout(10):
        assert await watcher._report(job, fault)
    assert (client.asked, watcher.reported["observe"]) == (1, 0)
    assert anomalies(job, 111 * S), "the fault is reported again later"


@pytest.mark.parametrize(
    ("error", "fewer"),
    [
        (WorkflowUpdateFailedError(ApplicationError("no such generation")), True),
        (RPCError("away", RPCStatusCode.UNAVAILABLE, b""), False),
    ],
)
async def test_a_report_that_fails_is_sent_again_and_logged_once(
    error: Exception, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    job, client = watched(), RefusingClient(error)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 20:
            client.error = RPCError("gone", RPCStatusCode.NOT_FOUND, b"")

    monkeypatch.setattr("activities.watching.watcher.asyncio.sleep", sleep)
    with structlog.testing.capture_logs() as logged:
        assert not await Watcher(cast(Client, client), AgentClients(), "queue")._report(job, crash())

    assert client.asked == 21
    assert [line["log_level"] for line in logged] == ["warning"]
    longest = job.spec.policy.silence.retry_max_s
    assert (max(waits) > longest / 2) is fewer, (
        "a refused report is repeated less often than a report that did not reach Temporal"
    )


def test_a_burst_of_findings_is_one_report() -> None:
    job = watched()
    show(job, 100 * S, 20)
    for machine in ("m0", "m1"):
        for number in range(FINDINGS_KEPT // 2):
            observation = finding(number + 1)
            observation.id, observation.machine_finding.finding.item = f"{machine}-{number}", f"GPU {number}"
            job.found(machine, observation, 100 * S)
    assert anomalies(job, 105 * S) == []
    [told] = anomalies(job, 111 * S)
    assert (told.machines, len(told.findings) + told.more_findings) == (["m0", "m1"], FINDINGS_KEPT)
    job.found("m1", finding(FINDINGS_KEPT), 111 * S)
    job.accepted(told, 112 * S)
    assert [seen.id for seen in job.faults.all()] == [f"m1-{FINDINGS_KEPT}"]


def crash(generation: int = 1) -> Anomaly:
    return Anomaly(id="m0-1", generation=generation, symptom=Symptom.CRASH, headline="rank 0 ended")


def test_a_finding_from_before_a_crash_belongs_to_the_incident_of_the_crash() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.found("m1", finding(since_s=100), 100 * S)
    job.accepted(crash(), 101 * S)
    job.found("m1", finding(8, since_s=100), 111 * S)  # this finding is from before the crash, but is reported late
    show(job, 112 * S, 20, generation=2)
    assert anomalies(job, 120 * S) == []


def test_a_finding_from_during_an_incident_is_reported_when_the_job_runs_again() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.accepted(crash(), 101 * S)
    job.found("m1", finding(since_s=106), 106 * S)
    show(job, 120 * S, 20, generation=2)
    assert [told.id for told in anomalies(job, 120 * S)] == ["m1-7"]


def test_a_finding_from_before_the_start_of_a_job_is_reported() -> None:
    job = watched()
    job.found("m1", finding(since_s=5), 90 * S)
    show(job, 100 * S, 20)
    assert [told.id for told in anomalies(job, 100 * S)] == ["m1-7"]


def test_findings_with_unknown_verdicts_are_not_kept() -> None:
    job = watched()
    show(job, 100 * S, 20)
    for number in range(2 * FINDINGS_KEPT):
        observation = finding(number)
        observation.machine_finding.finding.item = f"GPU {number}"
        observation.machine_finding.finding.verdict = "unknown"
        job.found("m1", observation, 100 * S)
    assert len(job.facts(1, 100 * S).findings) == 0


def test_a_flood_of_findings_is_bounded() -> None:
    job = watched()
    show(job, 100 * S, 20)
    for number in range(2 * FINDINGS_KEPT):
        observation = finding(number)
        observation.machine_finding.finding.item = f"GPU {number}"
        job.found("m1", observation, 100 * S)
    assert len(job.facts(1, 100 * S).findings) == FINDINGS_KEPT


async def test_a_fault_is_acknowledged_only_after_the_workflow_accepted_it() -> None:
    job = watched()
    show(job, 100 * S, 20)
    for number, over in ((7, False), (8, False), (9, True)):
        hear(job, finding(number, over=over), 100 * S)
        if number == 7:
            assert job.needs_no_more("m1") == 6
    assert (job.needs_no_more("m1"), job.needs_no_more("m0"), job.needs_no_more("m9")) == (9, 0, None)

    hear(job, finding(10), 110 * S)
    [told] = anomalies(job, 120 * S)
    assert job.needs_no_more("m1") == 9
    job.accepted(told, 120 * S)
    assert job.needs_no_more("m1") == 10


async def test_a_stopped_job_delays_no_acknowledgement() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.accepted(crash(), 101 * S)
    hear(job, finding(since_s=105), 105 * S)
    assert job.needs_no_more("m1") == 7
    show(job, 120 * S, 20, generation=2)
    assert job.needs_no_more("m1") == 6


def hear(job: JobView, observation: pb.Observation, now_ns: int) -> None:
    """Apply an observation as the watcher does, with a ledger that stores it at once."""
    job.found("m1", observation, now_ns)
    written = asyncio.get_running_loop().create_future()
    written.set_result(None)
    job.acknowledgements.noted("m1", observation, written)


def active(machine: str = "m1", **fields: Any) -> pb.Observation:
    """Return a finding that was active when the stream began."""
    observation = finding()
    observation.machine_finding.finding.MergeFrom(pb.Finding(**fields))
    observation.sequence, observation.id = 0, f"{machine}-gpu-gpu-hot"
    return observation


def test_a_finding_that_is_active_when_the_watch_begins_is_reported_once() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.found("m1", active(), 100 * S)
    job.found("m0", active("m0", verdict="unknown"), 100 * S)
    [reported] = anomalies(job, 102 * S)
    assert (reported.id, reported.machines) == ("m1-gpu-gpu-hot", ["m1"])
    job.accepted(reported, 102 * S)
    assert anomalies(job, 110 * S) == []
    job.found("m1", active(), 120 * S)  # the stream began again
    assert anomalies(job, 130 * S) == []


def test_an_active_finding_that_is_also_observed_is_reported_once() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.found("m1", finding(number=7), 100 * S)
    job.found("m1", active(), 101 * S)
    assert job.faults.first("m1") == 7
    [reported] = anomalies(job, 103 * S)
    assert reported.id == "m1-7"


def test_an_active_finding_that_the_workflow_knows_is_not_reported_again() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.faults.known = {"m1 gpu gpu-hot GPU 3": 5 * S}
    job.found("m1", active(since_ns=5 * S), 100 * S)
    assert anomalies(job, 110 * S) == []
    job.found("m1", active(since_ns=6 * S), 100 * S)  # the finding ended and became active again
    assert len(anomalies(job, 110 * S)) == 1


def test_an_active_finding_that_is_over_is_not_reported() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.found("m1", active(), 100 * S)
    job.found("m1", finding(over=True), 100 * S)
    assert anomalies(job, 110 * S) == []
