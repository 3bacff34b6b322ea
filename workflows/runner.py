"""How workflows run: in the SDK's sandbox, and never ahead of their histories.

A query that no workflow task carries ("direct") is answered from the history as it stands when a worker takes it. Where
a worker died, that history may end with a workflow task that nobody completed: a timer fired, a child ended. The SDK
(1.35) lets the workflow take that in, answers, and keeps the run in its cache. When the task itself comes next, with an
update or a signal beside those events, the cached run takes only what is new: its commands are recorded in an order in
which no replay gives them, and the workflow is lost ("TMPRL1100 Nondeterminism error"). So after a direct query a run
that may be ahead of its history is dropped from the cache: its next task replays it from the start, as any other.
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


Activate = Callable[[WorkflowActivation], WorkflowActivationCompletion]


def dropping(activate: Activate, drop: Callable[[str], None]) -> Activate:
    """What lets a run go on; a direct query drops a run whose newest events were new to the SDK too.

    It cannot be told whether they came with a task, which is completed, or with a query. So in doubt a run that is
    asked is replayed once more after each task.

    Args:
        activate: Lets it go on.
        drop: Takes the run's id; it is dropped once the query is answered.
    """
    new_events = False

    def activated(activation: WorkflowActivation) -> WorkflowActivationCompletion:
        nonlocal new_events
        queries = [job.query_workflow.query_id for job in activation.jobs if job.HasField("query_workflow")]
        if not queries:
            new_events = not activation.is_replaying
        elif new_events and DIRECT in queries:
            drop(activation.run_id)
        return activate(activation)

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
