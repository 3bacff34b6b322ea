"""How the time of a job's runs was spent, by causes, as computed from the ledger's rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.ledger.ledger import Ledger
from everstep.decisions.training_time.ettr import Launch, Outage, ettr, unproductive
from everstep.decisions.training_time.time_lost import IncidentTimes, time_lost
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.stage import StageRecord

S = 10**9
ID = "incident/gpt/0001"


def running(ledger: Ledger) -> None:
    """Record a job that steps from 1,010 s on, and hangs at 1,100 s. The hang is seen 4 s later."""
    ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=1000 * S)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=1000 * S)
    ledger.generation_stepped("gpt", 1, stepped_ns=1010 * S)
    anomaly = Anomaly(id="m2-7", generation=1, symptom=Symptom.HANG, headline="", seen_ns=1104 * S, quiet_s=4.0)
    ledger.incident_opened(ID, anomaly, opened_ns=1105 * S)


def report(resolution: str = "reattempt", **seconds: float) -> IncidentReport:
    return IncidentReport(
        headline="",
        resolution=resolution,
        cause="hang",
        step=20,
        lost_steps=0,
        evicted=[],
        stages=[],
        generation=2,
        recovered=True,
        seconds=20.0,
        failures=[],
        timings=[StageRecord(name=name, seconds=each) for name, each in seconds.items()],
    )


def lost(ledger: Ledger, job: str | int = "gpt", **options: object) -> list[dict[str, float]]:
    """Return for each period the causes that took time, with their seconds. Productive steps are left out."""
    spent = ledger.time_spent(job, now_ns=1200 * S, **options) or []  # type: ignore[arg-type]
    for one in spent:
        assert one.ettr.seconds["productive"] == one.causes["productive"]
    return [{cause: each for cause, each in one.causes.items() if each and cause != "productive"} for one in spent]


def test_the_causes_since_the_start_of_a_run_and_in_recent_periods(ledger: Ledger) -> None:
    running(ledger)
    ledger.incident_event(ID, 1, time_ns=1108 * S, stage="decide", text="")
    whole = {"start": 10, "detect": 5, "decide": 3}
    assert lost(ledger) == [whole | {"unknown": 92}]
    assert lost(ledger, parked={ID: True}) == [whole | {"parked": 92}]
    ledger.incident_closed(ID, report(stop=2, decide=3, reattempt=5, confirm=5), closed_ns=1120 * S)
    ledger.interval("gpt", start_ns=1120 * S, end_ns=1126 * S, kind="lost steps", cause=ID)
    whole = {"start": 10, "detect": 5, "decide": 5, "restart": 10, "recompute": 6}
    assert lost(ledger, since_ns=(None, 1112 * S, 1300 * S)) == [whole, {"restart": 8, "recompute": 6}, {}]
    # A later run of the same name is counted separately.
    ledger.job_ended("gpt", ended_ns=1150 * S, outcome="finished")
    ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=1160 * S)
    assert lost(ledger) == [{"start": 40}]
    first = min(ledger.jobs(), key=lambda job: job.started_ns)
    assert lost(ledger, first.run) == [whole]
    assert ledger.time_spent("moe", now_ns=1200 * S) is None
    assert ledger.time_spent(99, now_ns=1200 * S) is None


def test_the_cause_is_unknown_if_the_report_has_no_stages(ledger: Ledger) -> None:
    running(ledger)
    ledger.incident_closed(ID, report(stop=math.nan), closed_ns=1120 * S)
    assert lost(ledger) == [{"start": 10, "detect": 5, "unknown": 15}]


@st.composite
def lives(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return incidents of a job: what is known of each, and the launch after it."""
    incidents = []
    for number in range(1, draw(st.integers(0, 5)) + 1):
        seen = draw(st.integers(1, 200))
        opened = seen + draw(st.integers(0, 5))
        kinds = st.sampled_from(["stop", "decide", "restore", "reattempt", "evict", "parked"])
        incidents.append(
            {
                "id": f"incident/gpt/{number:04d}",
                "seen": seen,
                "quiet_s": float(draw(st.integers(0, 9))),
                "opened": opened,
                "closed": draw(st.none() | st.integers(seen, 250)),
                "resolution": draw(st.sampled_from(["reattempt", "eviction", "observed"])),
                "stages": draw(st.lists(st.tuples(kinds, st.integers(0, 9).map(float)), max_size=4)),
                "notes": draw(st.lists(st.tuples(kinds, st.integers(opened, 250)), max_size=3)),
                "launched": draw(st.integers(seen, 250)),
                "stepped": draw(st.none() | st.integers(seen, 250)),
            }
        )
    return incidents


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(lives(), st.lists(st.none() | st.integers(0, 300), min_size=1, max_size=3))
def test_the_ledger_gives_what_the_whole_records_give(
    tmp_path_factory: pytest.TempPathFactory, incidents: list[dict[str, Any]], since: list[int | None]
) -> None:
    with Ledger.open(f"sqlite:///{tmp_path_factory.mktemp('law')}/ledger.db") as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=S)
        spans = unproductive(
            S,
            [Launch(one["launched"] * S, one["stepped"] and one["stepped"] * S) for one in incidents],
            [
                Outage(one["id"], (one["seen"] - int(one["quiet_s"])) * S, one["closed"] and one["closed"] * S)
                for one in incidents
                if one["closed"] is None or one["resolution"] != "observed"
            ],
        )
        for generation, one in enumerate(incidents, 1):
            anomaly = Anomaly(
                id="m2-7",
                generation=1,
                symptom=Symptom.HANG,
                headline="",
                seen_ns=one["seen"] * S,
                quiet_s=one["quiet_s"],
            )
            ledger.incident_opened(one["id"], anomaly, opened_ns=one["opened"] * S)
            ledger.generation_launched("gpt", generation, resume_step=0, launched_ns=one["launched"] * S)
            ledger.generation_stepped("gpt", generation, stepped_ns=(one["stepped"] or 0) * S)
            for position, (stage, at) in enumerate(one["notes"]):
                ledger.incident_event(one["id"], position, time_ns=at * S, stage=stage, text="")
            if one["closed"] is not None:
                timings = [StageRecord(name=name, seconds=each) for name, each in one["stages"]]
                told = report(one["resolution"]).model_copy(update={"timings": timings})
                ledger.incident_closed(one["id"], told, closed_ns=one["closed"] * S)
        times = {
            one["id"]: IncidentTimes(
                one["opened"] * S,
                stages=tuple(one["stages"]) if one["closed"] is not None else (),
                noted=tuple((stage, at * S) for stage, at in one["notes"]),
            )
            for one in incidents
        }
        found = ledger.time_spent("gpt", now_ns=300 * S, since_ns=[at and at * S for at in since])

    assert found is not None
    for begin, spent in zip(since, found, strict=True):
        begin_ns = max(S, (begin or 0) * S)
        assert spent.causes == time_lost(spans, times, begin_ns=begin_ns, end_ns=300 * S)
        expected = ettr(spans, start_ns=S, now_ns=300 * S, window_s=(300 * S - begin_ns) / 1e9)
        assert spent.ettr.seconds == expected.seconds


def test_a_fault_that_was_only_observed_costs_no_time(ledger: Ledger) -> None:
    running(ledger)
    assert lost(ledger) == [{"start": 10, "detect": 5, "decide": 95}]
    ledger.incident_closed(ID, report("observed"), closed_ns=1120 * S)
    assert lost(ledger) == [{"start": 10}]
