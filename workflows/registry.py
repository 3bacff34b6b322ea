"""All workflows, and the sandbox that they run in: for workers, tests and replays alike."""

from __future__ import annotations

from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workflows.incident import IncidentWorkflow
from workflows.job import JobWorkflow

WORKFLOWS = (JobWorkflow, IncidentWorkflow)

OUR_MODULES = ("everstep", "activities", "agent", "workflows", "structlog")


def sandbox() -> SandboxedWorkflowRunner:
    """The workflow sandbox, with our modules passed through: they are pure, and loaded once."""
    return SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*OUR_MODULES))
