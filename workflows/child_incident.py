"""Starts the workflow of an incident as a child of its job, and waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.recover.climbed import Climbed
    from everstep.decisions.act.recover.incident_state import IncidentPage, IncidentState
    from everstep.decisions.act.versions.book import VersionBook
    from everstep.model.incident import Anomaly, IncidentReport
    from everstep.model.job_state import JobState, incident_workflow_id
    from workflows import attributes, web_ui
    from workflows.incident.workflow import IncidentWorkflow
    from workflows.options import TASK_TIMEOUT

Child = workflow.ChildWorkflowHandle[IncidentWorkflow, IncidentReport]


async def open_incident(state: JobState, number: int, anomaly: Anomaly, *, only_tells: bool = False) -> Child:
    """Start the incident with a number; ``only_tells``: the job continues meanwhile, whatever the result is.

    Raises:
        WorkflowAlreadyStartedError: an incident with this number is open.
    """
    opened = IncidentState(
        number=number,
        anomaly=anomaly,
        opened_ns=workflow.time_ns(),
        spec=state.spec,
        machines=state.machines,
        run=state.run,
        origin_runs=state.origin_runs,
        first_step_s=state.first_step_s,
        alerts=state.alerts,
        evicted_ns=state.evicted_ns,
        only_tells=only_tells,
        generation=state.generation,
        resume_step=state.resume_step,
        lineage=state.lineage,
        folder=state.resume_path,
        folder_step=state.resume_path_step,
        emptied=set(state.emptied),
        showing=state.showing,
        history=state.failures,
        hold=state.hold,
        book=VersionBook.of([] if only_tells else state.versions, state.spec.version),
        ladder=Climbed(remembered=state.tried),
        page=IncidentPage(headline=anomaly.headline),
    )
    return await workflow.start_child_workflow(
        IncidentWorkflow.run,
        opened,
        id=incident_workflow_id(state.spec.name, number),
        task_timeout=TASK_TIMEOUT,
        static_summary=web_ui.incident_title(number, anomaly),
        search_attributes=attributes.search_attributes(
            {
                attributes.JOB_NAME: state.spec.name,
                attributes.SYMPTOM: str(anomaly.symptom),
                attributes.STAGE: "open",
                attributes.SEVERITY: "info",
            }
        ),
    )


async def end_of(child: Child, *, cancelled: Callable[[], object]) -> IncidentReport:
    """Wait for an incident's report.

    Temporal's own way to pass on a cancellation, which is to cancel the child, fails the job's task for ever if the
    child ends at the same moment. So the job calls ``cancelled``, which informs the incident of the job's end.
    """
    try:
        return await asyncio.shield(child)
    except asyncio.CancelledError:
        cancelled()
        return await child
