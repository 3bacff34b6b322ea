"""How workflows run: in the SDK's sandbox, and never ahead of their histories.

A query that no workflow task carries ("direct") is answered from the history as it stands when a worker takes it. That
history may end with a workflow task that nobody completed: the worker that had it died, or an update or a signal came
at the same moment, and its task is under way. The SDK (1.35) lets the workflow take that in, answers, and keeps the run
in its cache. When the task itself comes next, the cached run takes only what is new to it: its commands are recorded in
an order in which no replay gives them, an update is refused as one that no worker knows, and the workflow is lost
("TMPRL1100 Nondeterminism error"). So after a direct query a run that may be ahead of its history is dropped from the
cache: its next task replays it from the start, as any other.

Which run may be ahead? With the activations before the query it took in the history as far as ``history_length``, to
the begin of a task. If that task was not a replay, it is completed, or came with the query: it cannot be told. What
came without an activation is no more than the task's end and the events of its commands, which are counted, or a
further task, in which nothing happened yet.
"""

from __future__ import annotations

from collections.abc import Callable

from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.converter import StorageDriverStoreContext, WorkflowSerializationContext
from temporalio.worker import Worker, WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

DIRECT = "legacy_query"
"""Id of the queries that no workflow task carries (the SDK's)."""
ONE_EVENT = {
    "schedule_activity",
    "start_timer",
    "start_child_workflow_execution",
    "signal_external_workflow_execution",
    "upsert_workflow_search_attributes",
    "modify_workflow_properties",
}
"""Commands that become one event each, and always."""


Activate = Callable[[WorkflowActivation], WorkflowActivationCompletion]


def events_of(completion: WorkflowActivationCompletion) -> int | None:
    """How many events the commands of a task become; None: it cannot be told."""
    count = 0
    for command in completion.successful.commands:
        kind = command.WhichOneof("variant")
        if kind in ONE_EVENT:
            count += 1
        elif kind == "update_response":  # accepted, or completed; one that is refused leaves no trace
            count += not command.update_response.HasField("rejected")
        else:
            return None
    return count


def dropping(activate: Activate, drop: Callable[[str], None]) -> Activate:
    """What lets a run go on, and drops it where it is ahead of its history after a direct query, or may be.

    Args:
        activate: Lets it go on.
        drop: Takes the run's id; it is dropped once the query is answered.
    """
    was_replay = True
    taken = 0
    commands: int | None = 0

    def activated(activation: WorkflowActivation) -> WorkflowActivationCompletion:
        nonlocal was_replay, taken, commands
        queries = [job.query_workflow.query_id for job in activation.jobs if job.HasField("query_workflow")]
        if queries:
            more = activation.history_length - taken
            as_completed = was_replay if more == 0 else commands is not None and more == 1 + commands
            if DIRECT in queries and not as_completed:
                drop(activation.run_id)
            return activate(activation)
        completion = activate(activation)
        before = commands if activation.history_length == taken else 0
        now = events_of(completion)
        was_replay, taken = activation.is_replaying, activation.history_length
        commands = None if before is None or now is None else before + now
        return completion

    return activated


class WorkflowRunner(SandboxedWorkflowRunner):
    """The sandbox, whose runs a worker drops where a direct query may have taken them ahead of their histories.

    The context of payload conversion is computed once instead of for each payload. Ours are converted alike in all of
    them, and the SDK (1.35) enters the sandbox for each answer, six times a payload: over a third of what a replay
    computes.
    """

    _worker: Worker | None = None

    def drops_from(self, worker: Worker) -> None:
        """Drop runs from the cache of this worker, the one that the runner was given to.

        A worker that caches nothing, and a replayer, need not say so.
        """
        self._worker = worker

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        """A run of a workflow that is new, or not in the cache."""
        instance = super().create_instance(det)
        context = WorkflowSerializationContext(namespace=det.info.namespace, workflow_id=det.info.workflow_id)
        nowhere = StorageDriverStoreContext(target=None)
        instance.get_serialization_context = lambda _: context  # type: ignore[assignment,method-assign]
        instance.get_external_store_context = lambda _: nowhere  # type: ignore[assignment,method-assign]
        instance.activate = dropping(instance.activate, self._drop)  # type: ignore[assignment,method-assign]
        return instance

    def _drop(self, run_id: str) -> None:
        if self._worker is not None:
            self._worker._bridge_worker.request_workflow_eviction(run_id)
