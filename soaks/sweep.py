"""The sweep: the worker killed at every event of an incident's history in turn.

One cluster with a single worker, so that each kill is the death of the whole control plane but Temporal; one short job
per event n. In each a rank is killed, a machine is lost for good or computes wrongly and another one takes its place,
or its code is updated; and while the incident is under way the worker dies as soon as it can know that event n is
durable (``drills/inject/control_plane.py`` says exactly when). Its supervisor starts it again. What must be the same
each time: the decision, the outcome, one incident, nothing lost but the step under way, losses equal bit for bit, no
rank twice, nothing left behind.

What is swept: all events that the incident's history, or its replay's, has when
nobody dies, and on to its last one where it is longer. For each, the row tells where the worker was
hit and which event was the newest durable one at that moment. Temporal writes several events in one
transaction, and between those nobody can die (``drills/observe/transactions.py``): a kill is in time
for all events of the transaction that was the newest. One that came later is tried again.
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
"""Whose incident is swept → the fault that opens it; a rollback comes with the incident that brought the version.
A job that is updated has to live until another worker has come."""
TRIES = 3
"""Most runs for one event, if a kill was late or the run's history did not have the event."""

CLOSES = (EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW)
"""Last events of a run's history."""


class SweepRow(BaseModel):
    """The result of one kill."""

    event: int
    kind: str
    """Type of that event."""
    place: str = ""
    """The place in the worker at which it was killed."""
    events: int = 0
    """Length of this run's history: a task that takes what two others took apart makes it shorter."""
    newest: int | None = None
    """Newest durable event at that moment; None: not known."""
    since: int | None = None
    """From that event until it no worker did anything: the first of its transaction."""
    closes: bool = False
    """Whether that is the history's last."""
    in_time: bool = False
    """Whether the event lies between those two; or is an activity's start, which the server writes down
    with its end, and the worker was hit before that end was reported."""
    decision: str = ""
    outcome: str = ""
    recovered_s: float | None = None
    ok: bool = False
    problems: list[str] = Field(default_factory=list)


class SweepResult(BaseModel):
    """All kills of a sweep."""

    events: int
    """Length of the history when nobody dies, or longer: one task may take the results of two activities, and where
    each came alone there are more."""
    decision: str
    outcome: str
    rows: list[SweepRow]
    leaked: list[str] = Field(default_factory=list)

    @property
    def late(self) -> list[int]:
        """The events at which no worker was killed in time, each time that it was tried."""
        return [row.event for row in self.rows if not row.in_time]

    @property
    def ok(self) -> bool:
        """Whether decision and outcome were equal at each event, and nothing was left."""
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
        last: Of the last one; None: until a worker was killed at the history's last.
        every: Only every so many.
        workers: Of the cluster.
        of: What is swept, one of ``SWEPT``.
        say: Takes a line for each step.
        each: Takes each row.

    Raises:
        ClusterError: the cluster does not come up, or the job does not recover when no worker dies.
    """
    options = JOB | SWEPT[of]
    cluster = DrillCluster(machines=options["machines"], standbys=options["standbys"], workers=workers, say=say)
    async with cluster:
        references = References()
        clean = await Drill(cluster, drill_request(**options), references).run()
        if not clean.ok:
            raise ClusterError(f"the job does not recover even when no worker dies: {'; '.join(clean.problems)}")
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
                if row.in_time or not _missed_only(row, result):
                    break
                say(f"event {event}: {_missed(row)}; again")
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
        since = newest  # a configured server's store cannot be read
        if cluster.file.database.exists():
            begins = transactions.begins(cluster.file.database, await _run_id(cluster, request.opening.swept(run.job)))
            since = transactions.since(found, begins, newest)
        starts = place.startswith("end") and newest == event - 1
        row.place, row.newest, row.since, row.in_time = place, newest, since, starts or since <= event <= newest
        row.closes = found[newest - 1].event_type in CLOSES
    else:
        row.ok = False
        row.problems.append("nobody knows where the worker was hit")
    return row


def _compare(row: SweepRow, decision: str, outcome: str) -> None:
    if row.ok and (row.decision, row.outcome) != (decision, outcome):
        row.ok = False
        row.problems.append(f"{row.decision}; {row.outcome}, and expected {decision}; {outcome}")


def _missed_only(row: SweepRow, result: SweepResult) -> bool:
    """Whether the only problem is that the kill was late, or that the history did not have the event."""
    ended = row.newest is None and row.events < row.event
    return row.ok or (ended and (row.decision, row.outcome) == (result.decision, result.outcome))


def _missed(row: SweepRow) -> str:
    if row.newest is None:
        return f"this history ended after {row.events} events"
    return f"the worker was hit after event {row.newest}"


async def _run_id(cluster: DrillCluster, workflow_id: str) -> str:
    return (await cluster.control.client.get_workflow_handle(workflow_id).describe()).run_id


async def history(cluster: DrillCluster, workflow_id: str) -> list[HistoryEvent]:
    """All events of a workflow's history."""
    handle = cluster.control.client.get_workflow_handle(workflow_id)
    return [event async for event in handle.fetch_history_events()]


def written_by(events: list[HistoryEvent], time_ns: int) -> int:
    """Number of the newest event that was written by then; an activity's start is written with its end."""
    started = EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED
    before = (e.event_id for e in events if e.event_type != started and e.event_time.ToNanoseconds() <= time_ns)
    return max(before, default=0)


async def signature(cluster: DrillCluster, run: DrillResult) -> tuple[str, str]:
    """The facts that must be equal after each kill: decision and outcome, without times and places."""
    found = [incident.report for incident in await incidents(cluster, run.job) if incident.report]
    decision = " / ".join(_decision(report) for report in found)
    # A loss that is not finite is seen some steps later, by looks at their own pace; the drill's judge bounds them.
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
    """``ActivityTaskScheduled`` for EVENT_TYPE_ACTIVITY_TASK_SCHEDULED."""
    return EventType.Name(kind).removeprefix("EVENT_TYPE_").title().replace("_", "")
