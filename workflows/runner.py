"""Runs workflows in the SDK's sandbox, and never ahead of their histories.

A query that no workflow task carries (a "direct" query) is answered from the history that the server has at that
moment. This history may end with an incomplete workflow task, because its worker died, or because an update or a signal
arrived at the same moment and the task is under way. The SDK (1.35) lets the workflow process these events, answers,
and keeps the run in its cache. When the task itself arrives, the cached run gets only the events that are new to it.
The commands of the run are then recorded in an order that no later execution repeats, an update is refused as unknown,
and the workflow is lost ("TMPRL1100 Nondeterminism error"). So a run that may be ahead of its history is dropped from
the cache after a direct query. Its next task executes it from the start.

The last activation before the query processed the history up to ``history_length``, the beginning of a task. There are
two cases. First, the history still has this length at the query. Then the run is certainly not ahead only if that
activation was a replay. Otherwise the task is completed, or it arrived with the query, and the two look alike. Second,
the history has become longer. Then the run is certainly not ahead only if the new events are exactly the end of that
task and the events of its commands, which are counted here.
"""

from __future__ import annotations

from collections.abc import Callable

from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.converter import StorageDriverStoreContext, WorkflowSerializationContext
from temporalio.worker import Worker, WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

DIRECT = "legacy_query"
"""The id of the SDK's queries that no workflow task carries."""
ONE_EVENT = {
    "schedule_activity",
    "start_timer",
    "start_child_workflow_execution",
    "signal_external_workflow_execution",
    "upsert_workflow_search_attributes",
    "modify_workflow_properties",
}
"""Commands that always become exactly one event."""


Activate = Callable[[WorkflowActivation], WorkflowActivationCompletion]


def events_of(completion: WorkflowActivationCompletion) -> int | None:
    """Return how many events the commands of a task become; None: that cannot be determined."""
    count = 0
    for command in completion.successful.commands:
        kind = command.WhichOneof("variant")
        if kind in ONE_EVENT:
            count += 1
        elif kind == "update_response":  # it is accepted or completed; a refused update leaves no trace
            count += not command.update_response.HasField("rejected")
        else:
            return None
    return count


def dropping(activate: Activate, drop: Callable[[str], None]) -> Activate:
    """Return an ``activate`` that drops a run from the cache if it may be ahead of its history after a direct query.

    Args:
        activate: Activates the run.
        drop: Drops the run with an id, once the query is answered.
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
    """A sandbox. Its worker drops a run from the cache if the run may be ahead of its history after a direct query.

    The context of payload conversion is computed once instead of for each payload. Everstep converts payloads in the
    same way in all contexts. The SDK (1.35) would enter the sandbox six times for each payload, which takes over a
    third of the CPU time when a history is replayed.
    """

    _worker: Worker | None = None

    def drops_from(self, worker: Worker) -> None:
        """Set the worker whose cached runs are dropped; it must be the worker of this runner.

        A worker without a cache, and a replayer, need not call this.
        """
        self._worker = worker

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        """Return a run of a workflow that is new, or not in the cache."""
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
