"""All workflows, and their sandbox, for workers, tests and history tests."""

from __future__ import annotations

from temporalio.worker.workflow_sandbox import SandboxRestrictions

from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow
from workflows.notice import NoticeWorkflow
from workflows.pool import StandbyPoolWorkflow
from workflows.replay import ReplayWorkflow
from workflows.runner import WorkflowRunner

WORKFLOWS = (JobWorkflow, IncidentWorkflow, NoticeWorkflow, StandbyPoolWorkflow, ReplayWorkflow)

OUR_MODULES = ("everstep", "activities", "agent", "workflows", "structlog")


def sandbox() -> WorkflowRunner:
    """Return the workflow sandbox. Everstep's modules are loaded only once, outside of it, because they are pure.

    A worker that caches runs must call ``WorkflowRunner.drops_from``.
    """
    return WorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*OUR_MODULES))
