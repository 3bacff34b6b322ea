"""Start the workflow of an incident, as a child of its job's, and wait for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.model.incident import Anomaly, IncidentReport
    from everstep.model.job_state import JobState, incident_workflow_id
    from workflows import attributes, web_ui
    from workflows.incident.workflow import IncidentWorkflow
    from workflows.messages import IncidentInput
    from workflows.options import TASK_TIMEOUT

Child = workflow.ChildWorkflowHandle[IncidentWorkflow, IncidentReport]


async def open_incident(state: JobState, number: int, anomaly: Anomaly, *, only_tells: bool = False) -> Child:
    """Start the incident with a number; ``only_tells``: the job goes on meanwhile, whatever it says.

    Raises:
        WorkflowAlreadyStartedError: one of this number is open.
    """
    input = IncidentInput(
        job=state.spec.name,
        number=number,
        anomaly=anomaly,
        generation=state.generation,
        resume_step=state.resume_step,
        spec=state.spec,
        machines=state.machines,
        history=state.failures,
        opened_ns=workflow.time_ns(),
        lineage=state.lineage,
        resume_path=state.resume_path,
        resume_path_step=state.resume_path_step,
        run=state.run,
        origin_runs=state.origin_runs,
        showing=state.showing,
        first_step_s=state.first_step_s,
        hold=state.hold,
        emptied=state.emptied,
        alerts=state.alerts,
        evicted_ns=state.evicted_ns,
        tried=state.tried,
        only_tells=only_tells,
        versions=[] if only_tells else state.versions,
    )
    return await workflow.start_child_workflow(
        IncidentWorkflow.run,
        input,
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

    Temporal's own way to pass a cancellation on, to cancel the child, fails the
    job's task for ever where the child has ended at that moment. So the job calls
    ``cancelled``, which lets the incident hear of it as of any other end.
    """
    try:
        return await asyncio.shield(child)
    except asyncio.CancelledError:
        cancelled()
        return await child
