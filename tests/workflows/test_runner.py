"""The direct queries after which the cache drops a run."""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.bridge.proto.workflow_activation import (
    FireTimer,
    QueryWorkflow,
    WorkflowActivation,
    WorkflowActivationJob,
)
from temporalio.bridge.proto.workflow_commands import (
    CancelTimer,
    ScheduleActivity,
    StartTimer,
    UpdateResponse,
    WorkflowCommand,
)
from temporalio.bridge.proto.workflow_completion import Success, WorkflowActivationCompletion

from workflows.runner import DIRECT, dropping

TIMER = WorkflowCommand(start_timer=StartTimer(seq=1))
ACTIVITY = WorkflowCommand(schedule_activity=ScheduleActivity(seq=1))
ACCEPTED = WorkflowCommand(update_response=UpdateResponse(accepted=Empty()))
COMPLETED = WorkflowCommand(update_response=UpdateResponse(completed=Payload()))
REJECTED = WorkflowCommand(update_response=UpdateResponse(rejected=Failure()))
CANCELLED = WorkflowCommand(cancel_timer=CancelTimer(seq=1))

Step = tuple[WorkflowActivation, WorkflowActivationCompletion]


def goes_on(*commands: WorkflowCommand, to: int, replaying: bool) -> Step:
    """Return a step that takes the run up to the event ``to``, after which the run returns these commands."""
    timer = WorkflowActivationJob(fire_timer=FireTimer(seq=1))
    activation = WorkflowActivation(run_id="run", history_length=to, is_replaying=replaying, jobs=[timer])
    return activation, WorkflowActivationCompletion(run_id="run", successful=Success(commands=commands))


def asked(query: str, *, at: int) -> Step:
    """Return a step that asks the run a query; the SDK marks all queries as replays."""
    job = WorkflowActivationJob(query_workflow=QueryWorkflow(query_id=query, query_type="state"))
    activation = WorkflowActivation(run_id="run", history_length=at, is_replaying=True, jobs=[job])
    return activation, WorkflowActivationCompletion(run_id="run", successful=Success())


def dropped(*steps: Step) -> list[str]:
    found: list[str] = []
    answers = [completion for _, completion in steps]
    activate = dropping(lambda _: answers.pop(0), found.append)
    for activation, completion in steps:
        assert activate(activation) is completion
    return found


def test_a_run_that_may_be_ahead_is_dropped() -> None:
    assert dropped(goes_on(to=4, replaying=True), goes_on(TIMER, to=8, replaying=False), asked(DIRECT, at=8)) == ["run"]


def test_a_run_as_its_completed_tasks_left_it_stays_however_often_it_is_asked() -> None:
    assert dropped(goes_on(to=4, replaying=True), asked(DIRECT, at=4), asked(DIRECT, at=4)) == []


def test_a_query_that_a_task_carries_drops_nothing() -> None:
    assert dropped(goes_on(to=4, replaying=False), asked("1", at=4)) == []
    assert dropped(goes_on(to=4, replaying=True), asked("1", at=6)) == []


def test_the_end_of_the_last_task_and_the_events_of_its_commands_are_no_further_task() -> None:
    ends = goes_on(TIMER, ACCEPTED, ACTIVITY, COMPLETED, REJECTED, to=4, replaying=True)
    assert dropped(ends, asked(DIRECT, at=9)) == []
    assert dropped(ends, asked(DIRECT, at=9), asked(DIRECT, at=9)) == []


def test_the_commands_of_all_activations_of_a_task_are_counted() -> None:
    begins, ends = goes_on(TIMER, to=4, replaying=True), goes_on(ACTIVITY, to=4, replaying=True)
    assert dropped(begins, ends, asked(DIRECT, at=7)) == []
    assert dropped(begins, goes_on(ACTIVITY, to=8, replaying=True), asked(DIRECT, at=11)) == ["run"]


def test_a_further_task_that_came_with_a_query_drops_the_run() -> None:
    """The begin of a task has two events: scheduled and started."""
    for at in (7, 8):
        assert dropped(goes_on(TIMER, to=4, replaying=True), asked(DIRECT, at=at)) == ["run"]
    assert dropped(goes_on(to=4, replaying=True), asked(DIRECT, at=6)) == ["run"]


def test_a_run_with_commands_of_which_some_become_no_event_is_dropped_in_doubt() -> None:
    assert dropped(goes_on(TIMER, CANCELLED, to=4, replaying=True), asked(DIRECT, at=7)) == ["run"]
    assert dropped(goes_on(CANCELLED, to=4, replaying=True), asked(DIRECT, at=4)) == []


def test_a_query_leaves_what_is_known_of_the_run_as_it_was() -> None:
    begins = goes_on(TIMER, to=4, replaying=True)
    assert dropped(begins, asked("1", at=6), asked(DIRECT, at=6)) == []
    assert dropped(begins, asked(DIRECT, at=6), asked(DIRECT, at=8)) == ["run"]
