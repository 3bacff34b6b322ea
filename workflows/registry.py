"""All workflows, and the sandbox that they run in: for workers, tests and replays alike."""

from __future__ import annotations

from temporalio.converter import StorageDriverStoreContext, WorkflowSerializationContext
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow
from workflows.notice import NoticeWorkflow
from workflows.pool import StandbyPoolWorkflow
from workflows.replay import ReplayWorkflow

WORKFLOWS = (JobWorkflow, IncidentWorkflow, NoticeWorkflow, StandbyPoolWorkflow, ReplayWorkflow)

OUR_MODULES = ("everstep", "activities", "agent", "workflows", "structlog")


class _Runner(SandboxedWorkflowRunner):
    """The sandbox, with the context of payload conversion computed once instead of for each payload.

    Ours are converted alike in all of them, and the SDK (1.35) enters the sandbox for each
    answer, six times a payload: over a third of what a replay computes.
    """

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = super().create_instance(det)
        context = WorkflowSerializationContext(namespace=det.info.namespace, workflow_id=det.info.workflow_id)
        nowhere = StorageDriverStoreContext(target=None)
        instance.get_serialization_context = lambda _: context  # type: ignore[assignment,method-assign]
        instance.get_external_store_context = lambda _: nowhere  # type: ignore[assignment,method-assign]
        return instance


def sandbox() -> SandboxedWorkflowRunner:
    """The workflow sandbox, with our modules passed through: they are pure, and loaded once."""
    return _Runner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*OUR_MODULES))
