"""Machines leave a job and are replaced, on a real server. Each workflow task replays the history from the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from activities.agents.stop_ranks import StopRanks
from controlplane.client import Control
from controlplane.queries.explanation import from_workflow
from controlplane.references import parse_incident
from everstep.decisions.act.evict.explain import Explanation
from everstep.model.eviction import EvictMode
from everstep.model.evidence import Evidence
from everstep.model.finding import Finding, MachineFinding
from everstep.model.incident import Anomaly, Symptom
from everstep.model.machine import Machine
from tests.workflows.asking import ASK_S
from tests.workflows.conftest import anomaly, exits, held
from tests.workflows.test_observed import fault
from workflows import attributes
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow

STANDBYS = [Machine(name="m2", address="127.0.0.13:1"), Machine(name="m3", address="127.0.0.14:1")]
POLICY = {"silence": {"evict_s": 0.0}}
WHO = {"operator": "ada", "note": "it is the switch"}


def gone(*machines: str) -> Callable[[StopRanks], Evidence]:
    """Answer a stop with evidence in which these machines do not answer."""

    def evidence(given: StopRanks) -> Evidence:
        silent = [machine.name for machine in given.job.machines if machine.name in machines]
        return Evidence(
            generation=given.generation, exits=exits(20) if not silent else [], held=held(20), unreachable=silent
        )

    return evidence


def faulty(machine: str) -> Callable[[StopRanks], Evidence]:
    """Answer a stop with evidence of a sure fault of one machine."""

    def evidence(given: StopRanks) -> Evidence:
        finding = Finding(inspection="gpu", reason="gpu-lost", item="GPU 3", text="lost", since_ns=5, sure=True)
        found = [MachineFinding(machine=machine, finding=finding)]
        ours = machine in [one.name for one in given.job.machines]
        return Evidence(generation=given.generation, exits=exits(20), held=held(20), findings=found if ours else [])

    return evidence


def sure_fault() -> Anomaly:
    """Return a sure fault of m1, whose ranks continue."""
    told = fault()
    [found] = told.findings
    sure = found.model_copy(update={"finding": found.finding.model_copy(update={"sure": True})})
    return told.model_copy(update={"findings": [sure]})


async def explanation_of(jobs: Any, incident: str) -> Explanation:
    """Return the incident's own explanation of its evictions."""
    job, number = parse_incident(incident)
    return await from_workflow(Control(jobs.client, None), job, number or 0, None, None)


async def failed(jobs: Any, **policy: object) -> Any:
    handle = await jobs.running(**{**POLICY, **policy})
    await handle.execute_update(JobWorkflow.report, anomaly())
    return handle


async def test_a_machine_that_is_gone_is_replaced_by_a_standby(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1")
    handle = await failed(jobs)
    state = await jobs.until_runs(handle, 2)

    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    assert (state.left, state.evicted_ns) == (["m1"], []), "a lost machine does not count for the breaker"
    [incident] = state.incidents
    assert incident.resolution == "eviction"
    report = jobs.report
    assert report.evicted == ["m1"]
    assert [machine.name for machine in report.machines] == ["m0", "m2"]
    assert "by eviction of m1" in report.headline
    assert "m1 is gone, with rank 1" in report.headline
    assert [(answer.rule, answer.machine) for answer in report.asked if answer.yes] == [("gone-machine", "m1")]
    calls = jobs.cluster.calls
    assert calls.index("replace m1") < calls.index("prepare m2") < calls.index("launch 2 from 20")
    shown = (await jobs.client.get_workflow_handle(incident.id).describe()).typed_search_attributes
    assert shown.get(attributes.EVICTED) == ["m1"]


async def test_a_machine_whose_agent_refuses_the_worker_is_waited_for(jobs: Any) -> None:
    """Its token or its certificate is being changed, so the machine works: a standby must not replace it."""
    refusals = ["no valid token"]

    def refusing(given: StopRanks) -> Evidence:
        if not refusals:
            return gone()(given)
        return gone("m1")(given).model_copy(update={"refusing": {"m1": refusals.pop()}})

    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), refusing
    handle = await failed(jobs)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert state.incidents[0].resolution == "reattempt"


async def test_a_machine_that_is_surely_at_fault_is_replaced_when_its_job_failed(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), faulty("m0")
    handle = await failed(jobs)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m2", "m1"]
    assert jobs.report.evicted == ["m0"]


async def test_a_faulty_machine_whose_ranks_go_on_is_replaced_standby_first(jobs: Any) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    handle = await jobs.running(**POLICY)
    assert await handle.execute_update(JobWorkflow.observe, sure_fault()) == "accepted"
    state = await jobs.until_runs(handle, 2)

    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    calls = jobs.cluster.calls
    assert calls.index("replace m1") < calls.index("align 1") < calls.index("stop 1"), (
        "the standby is ready before the job is stopped"
    )
    assert [asked.backed_up for asked in jobs.cluster.aligned] == [[1]], "the ranks of m1 continue from their backups"
    assert jobs.report.evicted == ["m1"]
    assert state.incidents[-1].resolution == "eviction"


async def test_without_a_standby_the_job_goes_on_with_its_faulty_machine(jobs: Any) -> None:
    handle = await jobs.running(**POLICY)
    await handle.execute_update(JobWorkflow.observe, sure_fault())
    state = await jobs.until(handle, lambda state: state.incidents and state.incidents[0].resolution)

    assert (state.incidents[0].resolution, state.status, state.generation) == ("observed", "running", 1)
    assert "stop 1" not in jobs.cluster.calls
    assert any(answer.yes for answer in jobs.report.asked)
    await handle.execute_update(JobWorkflow.report, anomaly())
    await jobs.until(handle, lambda state: state.generation == 2)


async def test_ranks_that_end_while_a_standby_is_sought_are_not_forgotten(jobs: Any) -> None:
    jobs.cluster.blocked.add("replace")
    handle = await jobs.running(**POLICY)
    await handle.execute_update(JobWorkflow.observe, sure_fault())
    await jobs.until(handle, lambda state: state.status == "recovering")
    assert "accepted" in await handle.execute_update(JobWorkflow.report, anomaly())
    assert await handle.execute_update(JobWorkflow.observe, fault(9, machine="m0", reason="disk-full")) == "accepted"
    jobs.cluster.blocked.clear()
    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")
    assert [incident.resolution for incident in state.incidents] == ["observed", "reattempt"]


async def test_a_standby_that_cannot_be_made_ready_gives_way_to_the_next_one(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1")
    jobs.cluster.blocked.add("prepare m2")
    handle = await failed(jobs)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m3"]
    assert jobs.report.evicted == ["m1", "m2"]
    asked = [(given.job.machines[0].name, [one.name for one in given.like]) for given in jobs.cluster.prepares[1:]]
    assert asked == [("m2", ["m0"]), ("m3", ["m0"])], "the replacements need the libraries of the machine that stays"


async def test_a_standby_that_cannot_be_made_ready_is_not_launched_on_after_a_wait(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = STANDBYS[:1], gone("m1")
    jobs.cluster.blocked.add("prepare m2")
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    jobs.cluster.standbys.append(STANDBYS[1])
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m3"]
    assert jobs.report.evicted == ["m1", "m2"]


async def test_an_operator_lets_a_job_go_on_with_a_standby_that_is_not_fit(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = STANDBYS[:1], gone("m1")
    jobs.cluster.blocked.add("prepare m2")
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    incident = (await handle.query(JobWorkflow.current_state)).incidents[0].id
    await jobs.client.get_workflow_handle(incident).signal(IncidentWorkflow.resume, WHO)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]


async def test_a_job_that_steps_is_not_stopped_for_standbys_that_are_not_fit(jobs: Any) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    jobs.cluster.blocked |= {"prepare m2", "prepare m3"}
    handle = await jobs.running(**POLICY)
    await handle.execute_update(JobWorkflow.observe, sure_fault())
    state = await jobs.until(handle, lambda state: state.incidents and state.incidents[0].resolution)

    assert (state.incidents[0].resolution, state.status, state.generation) == ("observed", "running", 1)
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert [call for call in jobs.cluster.calls if call.startswith("replace")] == [
        "replace m1",
        "replace m2",
        "replace m3",
    ]
    assert "stop 1" not in jobs.cluster.calls
    assert any("m3 (standby-unfit) cannot join" in note.text for note in jobs.cluster.notes)


async def test_the_next_standby_takes_the_place_before_the_job_is_stopped(jobs: Any) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    jobs.cluster.blocked.add("prepare m2")
    handle = await jobs.running(**POLICY)
    await handle.execute_update(JobWorkflow.observe, sure_fault())
    state = await jobs.until_runs(handle, 2)

    assert [machine.name for machine in state.machines] == ["m0", "m3"]
    calls = jobs.cluster.calls
    assert calls.index("replace m2") < calls.index("prepare m3") < calls.index("stop 1")


async def test_a_standby_that_dies_meanwhile_gives_way_to_the_next_one(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1", "m2")
    handle = await failed(jobs)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m3"]


@pytest.mark.history("incident-evicted")
async def test_where_there_is_no_standby_the_job_waits_for_one_or_for_its_machine(jobs: Any) -> None:
    jobs.cluster.evidence = gone("m1")
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    stage = await jobs.client.get_workflow_handle(
        (await handle.query(JobWorkflow.current_state)).incidents[0].id
    ).query(IncidentWorkflow.current_stage)
    assert "m1 (silent-machine) leaves the job once there is a machine in its place: no standby is left" in stage.found
    assert {"await m1", "await 1 to spare"} <= set(jobs.cluster.calls)
    jobs.cluster.standbys.append(STANDBYS[0])
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]


async def test_a_job_that_is_short_of_machines_is_ended_by_a_stop(jobs: Any) -> None:
    jobs.cluster.evidence = gone("m1")
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    assert (await handle.result()).outcome == "stopped"
    [incident] = (await handle.query(JobWorkflow.current_state)).incidents
    assert incident.resolution == "abandoned"


async def test_a_machine_that_comes_before_the_job_is_parked_takes_the_place_at_once(jobs: Any) -> None:
    jobs.cluster.evidence, jobs.cluster.silent_s = gone("m1"), 0.0
    handle = await failed(jobs)
    while "await 1 to spare" not in jobs.cluster.calls:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(ASK_S)
    jobs.cluster.standbys.append(STANDBYS[0])
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    assert not [stage for stage in jobs.report.stages if stage.startswith("parked")]


async def test_a_machine_that_comes_back_while_there_is_no_standby_goes_on(jobs: Any) -> None:
    jobs.cluster.evidence = gone("m1")
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    jobs.cluster.evidence = gone()
    jobs.cluster.back.set()
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert state.incidents[0].resolution == "reattempt"


async def test_the_breaker_of_the_cluster_has_an_operator_asked(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1")
    jobs.cluster.held = "9 machines of 3 jobs would leave"
    handle = await failed(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    incident = (await handle.query(JobWorkflow.current_state)).incidents[0].id
    told = await explanation_of(jobs, incident)
    assert told.outcome.startswith("open, parked: m1 (silent-machine): an operator has to approve")
    assert jobs.cluster.held in told.outcome
    await jobs.client.get_workflow_handle(incident).signal(IncidentWorkflow.approve, WHO)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    assert state.evicted_ns == [], "an operator approved the eviction, so it does not count"


async def test_the_breaker_has_an_operator_asked(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1")
    handle = await failed(jobs, evict={"share": 0.0, "at_least": 0})
    await jobs.until(handle, lambda state: state.status == "parked")
    assert not [call for call in jobs.cluster.calls if call.startswith("replace")]
    incident = (await handle.query(JobWorkflow.current_state)).incidents[0].id
    told = await explanation_of(jobs, incident)
    assert [(one.rule, one.machine, one.result) for one in told.answers] == [
        ("gone-machine", "m1", "it has not left the job yet"),
        ("breaker", "", "an operator had to approve"),
    ]
    assert told.outcome.startswith("open, parked: m1 (silent-machine): an operator has to approve")
    at_hand = await jobs.client.get_workflow_handle(incident).query(IncidentWorkflow.current_stage)
    assert "1 machines of 2 would be evicted" in at_hand.tripped
    assert (at_hand.name, at_hand.machines) == ("parked", ["m1"])
    assert 0 < at_hand.opened_ns <= at_hand.since_ns
    await jobs.client.get_workflow_handle(incident).signal(IncidentWorkflow.approve, WHO)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    assert state.evicted_ns == [], "the breaker does not count evictions by an operator"
    told = await explanation_of(jobs, incident)
    assert (told.over, told.evicted, told.answers[0].result) == (
        True,
        ["m1"],
        f"it left the job, approved by {WHO['operator']} ({WHO['note']})",
    )
    assert told.outcome.startswith("recovered: Recovered in ")


async def test_what_an_operator_approved_holds_until_there_is_a_machine(jobs: Any) -> None:
    jobs.cluster.evidence = gone("m1")
    handle = await failed(jobs, evict={"share": 0.0, "at_least": 0})
    await jobs.until(handle, lambda state: state.status == "parked")
    incident = (await handle.query(JobWorkflow.current_state)).incidents[0].id
    await jobs.client.get_workflow_handle(incident).signal(IncidentWorkflow.approve, WHO)
    while "await 1 to spare" not in jobs.cluster.calls:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(ASK_S)
    jobs.cluster.standbys.append(STANDBYS[0])
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    assert state.evicted_ns == [], "the breaker does not count evictions by an operator"


async def test_an_eviction_that_a_rule_decided_counts_for_the_breaker(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), faulty("m1")
    state = await jobs.until_runs(await failed(jobs), 2)
    assert state.left == ["m1"]
    assert len(state.evicted_ns) == 1


@pytest.mark.parametrize("mode", [EvictMode.SHADOW, EvictMode.OFF])
async def test_in_shadow_mode_nobody_leaves(jobs: Any, mode: EvictMode) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), faulty("m1")
    handle = await failed(jobs, evict={"mode": mode})
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert jobs.cluster.standbys == STANDBYS
    assert any(answer.yes for answer in jobs.report.asked) == (mode is EvictMode.SHADOW)


@pytest.mark.parametrize("mode", [EvictMode.SHADOW, EvictMode.APPROVE])
async def test_what_would_be_done_is_kept_where_a_fault_is_only_told(jobs: Any, mode: EvictMode) -> None:
    jobs.cluster.standbys = list(STANDBYS)
    handle = await jobs.running(**POLICY, evict={"mode": mode})
    assert await handle.execute_update(JobWorkflow.observe, sure_fault()) == "accepted"
    state = await jobs.until(handle, lambda state: state.incidents and state.incidents[0].resolution)

    assert (state.incidents[0].resolution, state.status, state.generation) == ("observed", "running", 1)
    assert jobs.cluster.standbys == STANDBYS
    report = jobs.report
    assert [(one.rule, one.machine, one.yes, one.mode) for one in report.asked] == [
        ("sure-machine-fault", "m1", True, mode)
    ]
    assert report.evicted == []


async def test_an_operator_lets_the_job_go_on_with_a_faulty_machine(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), faulty("m1")
    handle = await failed(jobs, evict={"rules": {"sure-machine-fault": EvictMode.APPROVE}})
    await jobs.until(handle, lambda state: state.status == "parked")
    incident = (await handle.query(JobWorkflow.current_state)).incidents[0].id
    await jobs.client.get_workflow_handle(incident).signal(IncidentWorkflow.resume, WHO)
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m1"]
    assert jobs.cluster.standbys == STANDBYS


async def test_a_silent_machine_of_a_job_that_goes_on_is_an_incident_of_its_own(jobs: Any) -> None:
    jobs.cluster.standbys, jobs.cluster.evidence = list(STANDBYS), gone("m1")
    handle = await jobs.running(**POLICY)
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=Symptom.MACHINE_SILENT))
    state = await jobs.until_runs(handle, 2)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]


async def test_a_machine_that_is_lost_before_or_after_the_launch_is_not_waited_for(jobs: Any) -> None:
    """The job does not wait for the minutes that a launch or a first step may take; another machine replaces it."""
    jobs.cluster.standbys = list(STANDBYS)
    jobs.cluster.evidence = lambda given: gone("m1", *(["m2"] if given.generation > 1 else []))(given)
    jobs.cluster.refused_launches.append("1 of 2 agents answered; m2 did not")
    handle = await failed(jobs, silence={"evict_s": 0.0, "detect_s": 7.0})
    state = await jobs.until_runs(handle, 3)
    assert [machine.name for machine in state.machines] == ["m0", "m3"]
    asked = [(given.patience_s, given.probed) for given in jobs.cluster.launches[1:]]
    assert asked == [(0.0, True)] * 2
    assert [given.silent_s for given in jobs.cluster.confirms[1:]] == [7.0]
