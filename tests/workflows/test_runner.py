"""Which direct queries drop a run from the cache."""

from __future__ import annotations

from temporalio.bridge.proto.workflow_activation import (
    FireTimer,
    QueryWorkflow,
    WorkflowActivation,
    WorkflowActivationJob,
)
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion

from workflows.runner import DIRECT, dropping


def goes_on(*, replaying: bool) -> WorkflowActivation:
    timer = WorkflowActivationJob(fire_timer=FireTimer(seq=1))
    return WorkflowActivation(run_id="run", is_replaying=replaying, jobs=[timer])


def asked(query: str) -> WorkflowActivation:
    """The SDK says of all queries that they are replays."""
    job = WorkflowActivationJob(query_workflow=QueryWorkflow(query_id=query, query_type="state"))
    return WorkflowActivation(run_id="run", is_replaying=True, jobs=[job])


def dropped(*activations: WorkflowActivation) -> list[str]:
    found: list[str] = []
    activate = dropping(lambda one: WorkflowActivationCompletion(run_id=one.run_id), found.append)
    for activation in activations:
        assert activate(activation).run_id == "run"
    return found


def test_a_run_that_may_be_ahead_is_dropped() -> None:
    assert dropped(goes_on(replaying=True), goes_on(replaying=False), asked(DIRECT)) == ["run"]


def test_a_run_as_its_completed_tasks_left_it_stays_however_often_it_is_asked() -> None:
    assert dropped(goes_on(replaying=True), asked(DIRECT), asked(DIRECT)) == []


def test_a_query_that_a_task_carries_drops_nothing() -> None:
    assert dropped(goes_on(replaying=False), asked("1")) == []
