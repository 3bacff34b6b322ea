"""Each event of an incident is reported once, in order, even if the workflow is asked rarely."""

from __future__ import annotations

from controlplane.queries.events import IncidentTracker, incident_line
from everstep.model.job import JobSpec
from everstep.model.job_state import IncidentSummary, JobState


def incident(number: int = 1, **changes: object) -> IncidentSummary:
    one = IncidentSummary(id=f"incident/gpt/{number:04d}", number=number, headline="rank 5 on m2 ended by SIGKILL")
    return one.model_copy(update=changes)


def state(*incidents: IncidentSummary) -> JobState:
    return JobState(spec=JobSpec(name="gpt", script="/srv/train.py"), machines=[], incidents=list(incidents))


def test_each_event_of_an_incident_is_reported_once() -> None:
    tracker = IncidentTracker()
    seen = [
        state(),
        state(incident()),
        state(incident()),
        state(incident(stage="parked")),
        state(incident(stage="parked")),
        state(incident(stage="reattempt")),
        state(incident(resolution="resumed by operator", recovered=True)),
        state(incident(resolution="resumed by operator", recovered=True)),
    ]
    told = [[event.kind for event in tracker.changes(one)] for one in seen]
    assert told == [[], ["opened"], [], ["parked"], [], ["resumed"], ["recovered"], []]


def test_an_incident_between_two_queries_is_reported_completely() -> None:
    tracker = IncidentTracker()
    events = tracker.changes(
        state(incident(resolution="reattempt", recovered=True), incident(2, resolution="abandoned"), incident(3))
    )
    assert [(event.incident.number, event.kind) for event in events] == [
        (1, "opened"),
        (1, "recovered"),
        (2, "opened"),
        (2, "closed"),
        (3, "opened"),
    ]
    running = incident(resolution="running, not confirmed", recovered=True, confirmed=False)
    assert [event.kind for event in IncidentTracker().changes(state(running))] == ["opened", "running"]
    assert incident_line(events[0]) == "incident 0001  rank 5 on m2 ended by SIGKILL"


def test_closed_incidents_can_be_skipped() -> None:
    tracker = IncidentTracker()
    now = state(incident(resolution="reattempt", recovered=True), incident(2, stage="parked"))
    tracker.skip_closed(now)
    assert [(event.incident.number, event.kind) for event in tracker.changes(now)] == [(2, "opened"), (2, "parked")]


def test_ranks_that_take_long_to_die_are_named() -> None:
    tracker = IncidentTracker()
    stages = ["", "stop: m2: rank 5 has been dying for 40 s", "stop: m2: rank 5 has been dying for 40 s"]
    stages += ["stop: m2: rank 5 has been dying for 65 s", "stop", "parked"]
    events = [event for stage in stages for event in tracker.changes(state(incident(stage=stage)))]
    assert [event.kind for event in events] == ["opened", "waits", "waits", "parked"]
    assert incident_line(events[1]) == "incident 0001  waits: m2: rank 5 has been dying for 40 s"
