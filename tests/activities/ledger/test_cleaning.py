"""Old details are deleted exactly once, and counted; open incidents and the ETTR stay as they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from activities.ledger import cleaning
from activities.ledger.cleaning import DAY_NS, clean_part, keep_clean, ledger_size
from activities.ledger.ledger import Ledger
from activities.ledger.records import MachineEventRecord
from everstep.errors import LedgerError
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.retention import Retention
from everstep.model.stage import StageRecord

S = 10**9
NOW = 1000 * DAY_NS
REPORT = IncidentReport(
    headline="Recovered",
    resolution="reattempt",
    cause="SIGKILL",
    step=20,
    lost_steps=0,
    evicted=["m2"],
    stages=[],
    generation=2,
    recovered=True,
    seconds=20.0,
    failures=[],
    timings=[StageRecord(name="stop", seconds=3.0), StageRecord(name="reattempt", seconds=15.0)],
)


def incident_of(day: int) -> str:
    return f"incident/gpt/{day:04d}"


def fill(ledger: Ledger, *days: int, open_days: tuple[int, ...] = ()) -> None:
    """Write an incident with a sample and a machine event on each day before now; some incidents stay open."""
    ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=NOW - 990 * DAY_NS)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=NOW - 990 * DAY_NS)
    ledger.generation_stepped("gpt", 1, stepped_ns=NOW - 990 * DAY_NS + S)
    for day in days:
        seen_ns = NOW - day * DAY_NS
        anomaly = Anomaly(id=f"m2-{day}", generation=1, symptom=Symptom.HANG, headline="", seen_ns=seen_ns, quiet_s=4.0)
        ledger.incident_opened(incident_of(day), anomaly, opened_ns=seen_ns + S)
        ledger.incident_evidence(incident_of(day), Evidence(generation=1))
        ledger.incident_event(incident_of(day), 1, time_ns=seen_ns + 2 * S, stage="decide", text="")
        ledger.add_samples(incident_of(day), [(1, "m2", seen_ns, b"x" * 20_000)])
        event = MachineEventRecord(
            observation=f"m2-{day}", machine="m2", job="gpt", time_ns=seen_ns, kind="exit", text=""
        )
        ledger.machine_events_seen([event])
        if day not in open_days:
            ledger.incident_closed(incident_of(day), REPORT, closed_ns=seen_ns + 20 * S)


def clean(ledger: Ledger, **settings: float) -> int:
    """Clean until nothing is left to clean; returns the number of parts that deleted something."""
    parts = 0
    while clean_part(ledger, Retention(**settings), now_ns=NOW):
        parts += 1
    return parts


def with_details(ledger: Ledger) -> list[int]:
    """Return the days of the incidents that have all of their details; the others must have none."""
    days = []
    for one in ledger.incidents():
        found = ledger.incident(one.id)
        assert found is not None
        details = [found.anomaly, found.evidence, found.events, ledger.looks(one.id)]
        assert all(details) or not any(details)
        assert bool(found.cleaned) is not all(details)
        days += [one.number] if all(details) else []
    return sorted(days)


def test_old_details_go_and_open_incidents_and_the_ettr_stay(ledger: Ledger) -> None:
    fill(ledger, 700, 500, 400, 300, 1, open_days=(500,))
    before = ledger.time_spent("gpt", now_ns=NOW, since_ns=[None, NOW - 450 * DAY_NS])

    assert clean(ledger, days=365) == 1

    assert with_details(ledger) == [1, 300, 500]
    assert ledger.time_spent("gpt", now_ns=NOW, since_ns=[None, NOW - 450 * DAY_NS]) == before
    size = ledger_size(ledger)
    assert (size.incidents, size.cleaned) == (5, {"incidents": 2, "samples": 2, "machine events": 3})
    assert size.last_ns == NOW
    assert [event.observation for event in ledger.machine_events()] == ["m2-300", "m2-1"]
    assert ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=NOW).incidents == 700


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_of_a_ledger_that_is_too_large_the_oldest_details_go_but_not_those_of_a_day(ledger: Ledger) -> None:
    fill(ledger, *range(1, 41), 0, open_days=(40,))
    used = ledger_size(ledger).bytes

    clean(ledger, gib=0.8 * used / 2**30)

    kept = with_details(ledger)
    assert ledger_size(ledger).bytes <= 0.8 * used
    assert kept == [*range(len(kept) - 1), 40]
    assert len(kept) > 10
    clean(ledger, gib=1e-9)
    assert with_details(ledger) == [0, 1, 40], "the incident of one day ago was closed later than one day ago"


def test_two_workers_that_clean_at_once_count_everything_once(
    ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "INCIDENTS_AT_ONCE", 2)
    monkeypatch.setattr(cleaning, "EVENTS_AT_ONCE", 3)
    fill(ledger, *range(400, 420))
    with Ledger.open(url) as other, ThreadPoolExecutor(2) as threads:
        parts = [*threads.map(lambda one: clean(one, days=365), [ledger, other])]
    assert sum(parts) == 10
    assert ledger_size(ledger).cleaned == {"incidents": 20, "samples": 20, "machine events": 20}
    assert with_details(ledger) == []


def test_a_cleaning_that_dies_in_the_middle_leaves_whole_incidents_and_goes_on(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "INCIDENTS_AT_ONCE", 2)
    fill(ledger, *range(400, 405))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    clean_part(ledger, Retention(), now_ns=NOW)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cleaning, "_count", dies)
        clean_part(ledger, Retention(), now_ns=NOW)
    assert with_details(ledger) == [400, 401, 402]
    assert ledger_size(ledger).cleaned["incidents"] == 2

    clean(ledger)

    assert with_details(ledger) == []
    assert ledger_size(ledger).cleaned == {"incidents": 5, "samples": 5, "machine events": 5}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_worker_cleans_by_itself_until_it_is_done_and_again_after_an_error(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "INCIDENTS_AT_ONCE", 2)
    fill(ledger, *range(700, 705))
    waits: list[float] = []

    async def waited(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            monkeypatch.setattr(cleaning, "clean_part", damaged)
        if len(waits) == 6:
            raise TimeoutError

    def damaged(*_: object, **__: object) -> int:
        raise LedgerError("damaged")

    monkeypatch.setattr("activities.ledger.cleaning.asyncio.sleep", waited)
    with pytest.raises(TimeoutError):
        await keep_clean(ledger, Retention())

    assert waits == [cleaning.PAUSE_S] * 3 + [cleaning.EVERY_S] * 3
    assert with_details(ledger) == []
