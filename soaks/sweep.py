"""The sweep: kills the worker at every event of an incident's history in turn.

For each event n, one short job runs on a cluster. The cluster has only one worker, so that each kill stops the complete
control plane except Temporal. A fault strikes the job: a rank is killed, a machine is lost for good or computes
wrongly, or the code is updated. While the incident is under way, the worker is killed as soon as it can know that event
n is durable (``drills/inject/control_plane.py``), and its supervisor starts it again. Each time the decision and the
outcome must be the same: there is one incident, no step is lost except the one under way, losses are equal bit for bit,
no rank has two processes, and nothing is left behind.

The sweep covers all events of the incident's history, or of its replay's history. Histories differ in length; the sweep
ends at the last event of the longest one. Temporal writes several events in one transaction, and no worker can die
between them (``drills/observe/transactions.py``). So a kill is in time for every event of the transaction that was the
newest when the worker died. A kill that was late is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent

from drills.clusters.local import DrillCluster, Say, silent
from drills.faults.all import drill_request
from drills.faults.control_plane import KillWorker
from drills.judge.facts import incidents
from drills.judge.result import DrillResult
from drills.observe import transactions
from drills.runner import Drill, References
from drills.spec.request import DrillRequest
from everstep.errors import ClusterError
from everstep.model.incident import IncidentReport, Symptom
from everstep.rank import drill_faults as faults

JOB = {"machines": 2, "ranks_per_machine": 2, "tp": 2, "pp": 1, "standbys": 0, "steps": 14, "at_step": 5}
"""The swept job: small and short, since the incident's history does not depend on its size."""
SWEPT: dict[str, dict[str, Any]] = {
    "crash": {"fault": "kill-rank"},
    "eviction": {"fault": "kill-machine", "machine": "m1", "gone": True, "standbys": 1},
    "update": {"fault": "update", "steps": 60},
    "rollback": {"fault": "bad-version", "fails_after": 0, "steps": 60},
    "replay": {
        "fault": "bitflip",
        "only_in_job": True,
        "machine": "m1",
        "machines": 4,
        "ranks_per_machine": 1,
        "tp": 1,
        "standbys": 1,
        "at_step": 12,
        "steps": 40,
    },
}
"""Name of a sweep → the fault that opens the swept incident, and sizes of the job. An updated job has more steps,
since it must run until the worker has started again."""
TRIES = 3
"""The largest number of runs for one event: a run is repeated if the kill was late, or if its history did not have the
event."""
CLOSES = (EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW)
"""Types of the last event of a history."""


class SweepRow(BaseModel):
    """The result of the kill at one event."""

    event: int
    kind: str
    """Type of the event."""
    place: str = ""
    """The check of ``drills/inject/control_plane.py`` that killed the worker."""
    events: int = 0
    """Number of events in this run's history; it varies, since a workflow task may process several results."""
    newest: int | None = None
    """Newest durable event at the kill; None: not known."""
    since: int | None = None
    """The first event that was written together with ``newest``, or by the server just before it: no worker did
    anything between the two."""
    closes: bool = False
    """Whether ``newest`` is the last event of the history."""
    in_time: bool = False
    """Whether the kill was in time. This is so if the event is one from ``since`` to ``newest``. It is also so if the
    event is the start of an activity, and the worker was killed before the activity's end was reported: both are
    written together."""
    decision: str = ""
    outcome: str = ""
    recovered_s: float | None = None
    ok: bool = False
    problems: list[str] = Field(default_factory=list)


class SweepResult(BaseModel):
    """The result of a sweep."""

    events: int
    """Number of events in the longest history."""
    decision: str
    outcome: str
    rows: list[SweepRow]
    leaked: list[str] = Field(default_factory=list)

    @property
    def late(self) -> list[int]:
        """The events at which no worker was killed in time."""
        return [row.event for row in self.rows if not row.in_time]

    @property
    def ok(self) -> bool:
        """Whether decision and outcome were the same at each event, and nothing was left behind."""
        same = all(row.ok and (row.decision, row.outcome) == (self.decision, self.outcome) for row in self.rows)
        return bool(self.rows) and same and not self.leaked


async def run_sweep(
    *,
    first: int = 1,
    last: int | None = None,
    every: int = 1,
    workers: int = 1,
    of: str = "crash",
    say: Say = silent,
    each: Callable[[SweepRow], None] = lambda _: None,
) -> SweepResult:
    """Sweep events ``first`` to ``last`` (None: to the end of the history) of an incident of ``SWEPT``.

    Args:
        first: Number of the first event.
        last: Number of the last event.
        every: Only every N-th event is swept.
        workers: Number of worker processes.
        of: A key of ``SWEPT``.
        say: Shows lines of progress.
        each: Gets each row.

    Raises:
        ClusterError: the cluster does not come up, or the job does not recover even without a kill.
    """
    options = JOB | SWEPT[of]
    cluster = DrillCluster(machines=options["machines"], standbys=options["standbys"], workers=workers, say=say)
    async with cluster:
        references = References()
        clean = await Drill(cluster, drill_request(**options), references).run()
        if not clean.ok:
            raise ClusterError(f"the job does not recover even without a kill: {'; '.join(clean.problems)}")
        events = len(await history(cluster, drill_request(**options).opening.swept(clean.job)))
        decision, outcome = await signature(cluster, clean)
        result = SweepResult(events=events, decision=decision, outcome=outcome, rows=[])
        event = first
        while event <= (last or result.events):
            struck = {"fault": "kill-worker", "during": options["fault"], "at_event": event}
            request = drill_request(**(options | struck))
            for _ in range(TRIES):
                row = await _row(cluster, await Drill(cluster, request, references).run(), request)
                _compare(row, decision, outcome)
                if row.in_time or not _only_missed(row, result):
                    break
                say(f"event {event} is repeated: {_why_missed(row)}")
            result.rows.append(row)
            each(row)
            if row.newest is not None:
                result.events = max(result.events, row.newest if row.closes else row.newest + 1)
            event += every
    result.leaked = cluster.leaked
    return result


async def _row(cluster: DrillCluster, run: DrillResult, request: DrillRequest) -> SweepRow:
    assert isinstance(request.fault, KillWorker)
    event = request.fault.at_event
    assert event is not None
    mark = faults.fired(cluster.worker_plan, {"id": f"kill-worker-{run.job}"})
    found = await history(cluster, request.opening.swept(run.job)) if run.incidents else []
    decision, outcome = await signature(cluster, run)
    row = SweepRow(
        event=event,
        kind=kind_name(found[event - 1].event_type) if event <= len(found) else "",
        events=len(found),
        decision=decision,
        outcome=outcome,
        recovered_s=run.recovered_s,
        ok=run.ok,
        problems=run.problems,
    )
    if mark and mark.get("newest"):
        place, newest = str(mark["place"]), max(int(mark["newest"]), written_by(found, mark["time_ns"]))
        since = newest  # only the database of a local Temporal server can be read
        if cluster.file.database.exists():
            begins = transactions.begins(cluster.file.database, await _run_id(cluster, request.opening.swept(run.job)))
            since = transactions.since(found, begins, newest)
        starts = place.startswith("end") and newest == event - 1
        row.place, row.newest, row.since, row.in_time = place, newest, since, starts or since <= event <= newest
        row.closes = found[newest - 1].event_type in CLOSES
    else:
        row.ok = False
        row.problems.append("there is no mark of the kill")
    return row


def _compare(row: SweepRow, decision: str, outcome: str) -> None:
    if row.ok and (row.decision, row.outcome) != (decision, outcome):
        row.ok = False
        row.problems.append(f"{row.decision}; {row.outcome}; expected: {decision}; {outcome}")


def _only_missed(row: SweepRow, result: SweepResult) -> bool:
    """Return whether the only problem is that the kill was late, or that the history did not have the event."""
    ended = row.newest is None and row.events < row.event
    return row.ok or (ended and (row.decision, row.outcome) == (result.decision, result.outcome))


def _why_missed(row: SweepRow) -> str:
    if row.newest is None:
        return f"the history ended after {row.events} events"
    return f"the worker was killed after event {row.newest}"


async def _run_id(cluster: DrillCluster, workflow_id: str) -> str:
    return (await cluster.control.client.get_workflow_handle(workflow_id).describe()).run_id


async def history(cluster: DrillCluster, workflow_id: str) -> list[HistoryEvent]:
    """Return all events of a workflow's history."""
    handle = cluster.control.client.get_workflow_handle(workflow_id)
    return [event async for event in handle.fetch_history_events()]


def written_by(events: list[HistoryEvent], time_ns: int) -> int:
    """Return the newest event that was written by this time. Starts of activities do not count, since they are written
    later."""
    started = EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED
    before = (e.event_id for e in events if e.event_type != started and e.event_time.ToNanoseconds() <= time_ns)
    return max(before, default=0)


async def signature(cluster: DrillCluster, run: DrillResult) -> tuple[str, str]:
    """Return the decision and outcome of a run, in words that must be equal after each kill."""
    found = [incident.report for incident in await incidents(cluster, run.job) if incident.report]
    decision = " / ".join(_decision(report) for report in found)
    # A loss that is not finite is detected some steps later; the judge of drills limits how many steps may be lost.
    symptoms = {failure.symptom for report in found for failure in report.failures}
    within = run.steps_lost in (0, 1) or Symptom.NOT_FINITE in symptoms
    lost = "steps lost within the limit" if within else f"{run.steps_lost} steps lost"
    losses = {True: "losses equal", False: "losses differ", None: "no losses"}[run.losses_match]
    recovered = "recovered" if found and all(report.recovered for report in found) else "not recovered"
    return decision, f"{recovered}, {lost}, {losses}, {len(run.incidents)} incident, generation {run.generations}"


def _decision(report: IncidentReport) -> str:
    failed = ", ".join(f"{failure.symptom} {failure.cause}" for failure in report.failures)
    left = f", {' and '.join(report.evicted)} left" if report.evicted else ""
    return f"{report.resolution} after {failed}, {len(report.failures)} attempt{left}"


def kind_name(kind: EventType.ValueType) -> str:
    """Return the name of a type of event, such as ``ActivityTaskScheduled``."""
    return EventType.Name(kind).removeprefix("EVENT_TYPE_").title().replace("_", "")
