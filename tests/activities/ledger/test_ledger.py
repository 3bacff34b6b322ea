"""The ledger returns each entry exactly once, even if the entry was written twice or late, or has invalid text."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from sqlalchemy import text

from activities.ledger import database
from activities.ledger.ledger import Ledger
from activities.ledger.records import MachineEventRecord
from everstep.base.redaction import HIDDEN
from everstep.errors import LedgerError
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, Failure, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.launch import Confirmation

S = 10**9
ID = "incident/gpt/0001"


def spec(name: str = "gpt") -> JobSpec:
    return JobSpec(name=name, script="/srv/train.py", machines=4, ranks_per_machine=2, tp=2, pp=2)


def anomaly(observation: str = "m2-7", seen_ns: int = 100 * S) -> Anomaly:
    return Anomaly(
        id=observation,
        generation=1,
        symptom=Symptom.CRASH,
        headline="rank 5 on m2 ended by SIGKILL",
        ranks=[5],
        machines=["m2"],
        seen_ns=seen_ns,
    )


def report(**changes: object) -> IncidentReport:
    failure = Failure(generation=1, step=20, symptom=Symptom.CRASH, cause="SIGKILL", time_ns=100 * S)
    told = IncidentReport(
        headline="Recovered in 0.4 s: restarted, lost 0 steps",
        resolution="reattempt",
        cause="SIGKILL",
        step=20,
        lost_steps=0,
        evicted=["m2"],
        stages=["stop, 0.1 s"],
        generation=2,
        recovered=True,
        seconds=0.4,
        failures=[failure],
    )
    return told.model_copy(update=changes)


def test_an_incident_reads_back_as_it_was_written(ledger: Ledger) -> None:
    evidence = Evidence(
        generation=1, exits=[RankExit(rank=5, machine="m2", signal=9, exception="ValueError: Köln", log_tail="a\x00b")]
    )
    ledger.job_started(spec(), started_ns=1 * S)
    ledger.incident_opened(ID, anomaly(), opened_ns=101 * S)
    ledger.incident_event(ID, 2, time_ns=103 * S, stage="decide", text="reattempt: first failure")
    ledger.incident_event(ID, 1, time_ns=102 * S, stage="evidence", text="8 ranks stopped")
    assert ledger.incident(ID).recovered is None  # type: ignore[union-attr]
    ledger.incident_closed(ID, report(), closed_ns=104 * S)
    ledger.incident_evidence(ID, evidence)
    ledger.incident_evidence(ID, Evidence(generation=2))
    found = ledger.incident(ID)
    assert found is not None
    assert (found.job, found.number, found.correlation_id, found.symptom) == ("gpt", 1, "m2-7", "crash")
    assert (found.seen_ns, found.opened_ns, found.closed_ns) == (100 * S, 101 * S, 104 * S)
    assert (found.resolution, found.cause, found.step, found.lost_steps) == ("reattempt", "SIGKILL", 20, 0)
    assert (found.seconds, found.evicted, found.recovered) == (0.4, ["m2"], True)
    assert found.parsed_report() == report()
    assert [(event.position, event.stage) for event in found.events] == [(1, "evidence"), (2, "decide")]
    assert found.parsed_evidence() == evidence


def test_what_an_incident_was_in_the_end_replaces_what_was_seen_first(ledger: Ledger) -> None:
    failure = Failure(generation=1, step=20, symptom=Symptom.EXCEPTION, cause="ValueError", time_ns=100 * S)
    ledger.incident_opened(ID, anomaly(), opened_ns=101 * S)
    ledger.incident_closed(ID, report(failures=[failure]), closed_ns=104 * S)
    ledger.incident_opened(ID, anomaly(), opened_ns=101 * S)  # the first write is repeated late
    found = ledger.incident(ID)
    assert found is not None and found.anomaly is not None
    assert (found.symptom, found.anomaly["symptom"]) == ("exception", "crash")
    ledger.incident_closed(ID, report(failures=[]), closed_ns=104 * S)
    assert ledger.incidents()[0].symptom == "exception"


@pytest.mark.parametrize("text", ["NUL \x00 byte", "half a pair \ud800", "Köln 火"])
def test_output_of_ranks_may_hold_anything(ledger: Ledger, text: str) -> None:
    ledger.incident_event(ID, 1, time_ns=1, stage="evidence", text=text)
    ledger.incident_closed(ID, report(cause=text.replace("\ud800", "")), closed_ns=2)
    found = ledger.incident(ID)
    assert found is not None
    assert found.events[0].text.startswith(text[:4])
    assert found.report is not None


def test_numbers_that_json_does_not_have_are_kept_out(ledger: Ledger) -> None:
    confirmation = Confirmation(generation=2, ok=True, reason="", parts={"start": math.nan})
    ledger.incident_closed(ID, report(confirmation=confirmation), closed_ns=2)
    found = ledger.incident(ID)
    assert found is not None and found.report is not None
    assert found.report["confirmation"]["parts"] == {"start": None}
    assert found.parsed_report() is None


def test_a_second_attempt_changes_nothing(ledger: Ledger) -> None:
    def write(shift: int) -> None:
        ledger.job_started(spec(), started_ns=1 * S)
        ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=2 * S + shift, forked_ns=3 * S, reason="start")
        ledger.generation_stepped("gpt", 1, stepped_ns=4 * S + shift)
        ledger.incident_opened(ID, anomaly(), opened_ns=101 * S + shift)
        ledger.incident_event(ID, 1, time_ns=102 * S + shift, stage="evidence", text=f"attempt {shift}")
        ledger.incident_closed(ID, report(seconds=0.4 + shift), closed_ns=104 * S + shift)
        event = MachineEventRecord(
            observation="m2-7", machine="m2", job="gpt", time_ns=100 * S, kind="exit", text=f"{shift}"
        )
        ledger.machine_events_seen([event])
        ledger.interval("gpt", start_ns=1 * S, end_ns=2 * S + shift, kind="launch", cause=f"{shift}")
        ledger.job_ended("gpt", ended_ns=200 * S + shift, outcome=f"finished {shift}")

    def everything() -> object:
        return (
            ledger.jobs(),
            ledger.generations("gpt"),
            ledger.incidents(),
            ledger.incident(ID),
            ledger.machine_events(),
            ledger.intervals("gpt"),
        )

    write(0)
    first = everything()
    write(1)
    assert everything() == first


def test_an_interval_that_goes_on_gets_its_end_later(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1)
    ledger.interval("gpt", start_ns=10 * S, end_ns=None, kind="parked", cause="no standby left")
    ledger.interval("gpt", start_ns=10 * S, end_ns=20 * S, kind="parked")
    (only,) = [one for one in ledger.intervals("gpt") if one.kind == "parked"]
    assert (only.start_ns, only.end_ns, only.cause) == (10 * S, 20 * S, "no standby left")


def test_rows_whose_beginning_was_lost_are_kept(ledger: Ledger) -> None:
    ledger.incident_closed("incident/gpt/0003", report(), closed_ns=104 * S)
    ledger.generation_stepped("gpt", 2, stepped_ns=4 * S)
    used = ledger.job_started(spec(), started_ns=1 * S)
    (job,) = ledger.jobs()
    assert (job.started_ns, used.incidents) == (1 * S, 0)
    assert [incident.id for incident in ledger.incidents("gpt")] == ["incident/gpt/0003"]
    assert [generation.generation for generation in ledger.generations("gpt")] == [2]


def test_a_name_used_again_keeps_the_earlier_run_apart(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1 * S)
    ledger.generation_launched("gpt", 4, resume_step=0, launched_ns=2 * S)
    ledger.incident_opened("incident/gpt/0002", anomaly(), opened_ns=101 * S)
    ledger.job_ended("gpt", ended_ns=200 * S, outcome="stopped")
    used = ledger.job_started(spec(), started_ns=300 * S)
    assert (used.incidents, used.generations) == (2, 4)
    assert ledger.job_started(spec(), started_ns=300 * S) == used
    ledger.incident_opened("incident/gpt/0002", anomaly("m1-1", 400 * S), opened_ns=401 * S)
    assert [(i.run, i.correlation_id) for i in ledger.incidents("gpt")] == [(2, "m1-1"), (1, "m2-7")]
    newest = ledger.incident("incident/gpt/0002")
    assert newest is not None and newest.correlation_id == "m1-1"
    assert ledger.generations("gpt") == []
    assert [job.outcome for job in ledger.jobs()] == [None, "stopped"]


def test_an_end_that_is_written_late_closes_no_later_run(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1 * S)
    ledger.job_started(spec(), started_ns=300 * S)

    ledger.job_ended("gpt", ended_ns=200 * S, outcome="stopped")

    assert [job.outcome for job in ledger.jobs()] == [None, "stopped"]


def test_a_writer_that_is_frozen_holds_up_nobody_for_ever(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.3)
    where = database.LedgerUrl(url)
    with Ledger.open(url) as ledger:
        ledger.job_started(spec(), started_ns=1 * S)
        frozen = database.connect(where)
        with pytest.raises(LedgerError, match="another process has locked it"), database.writing(frozen, where, "gpt"):
            ledger.job_ended("gpt", ended_ns=200 * S, outcome="stopped")
        frozen.dispose()
        ledger.job_ended("gpt", ended_ns=200 * S, outcome="stopped")

        assert [job.outcome for job in ledger.jobs()] == ["stopped"]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_writer_in_whose_transaction_nothing_happens_loses_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's lock ends with its process. PostgreSQL would keep the lock as long as the connection exists."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    where = database.LedgerUrl(url)
    frozen = database.connect(where)
    with pytest.raises(LedgerError), database.writing(frozen, where, "gpt") as connection:
        connection.execute(text("SELECT pg_sleep(0.05)"))
        time.sleep(1.0)  # the server ends a transaction in which nothing happens for 0.2 s
        connection.execute(text("SELECT 1"))
    frozen.dispose()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_what_the_url_says_and_a_migration_are_left_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    where = database.LedgerUrl(url + "?options=-c%20work_mem%3D5MB%20-c%20lock_timeout%3D7s")
    engine = database.connect(where)

    def shown(name: str, **options: bool) -> str:
        with database.writing(engine, where, "gpt", **options) as connection:
            return str(connection.scalar(text(f"SHOW {name}")))

    assert shown("work_mem") == "5MB"
    assert (shown("lock_timeout"), shown("lock_timeout", bounded=False)) == ("100ms", "7s")
    assert shown("statement_timeout", bounded=False) == "0"
    engine.dispose()


def test_ettr_counts_launches_incidents_and_what_was_noted(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1000 * S)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=1000 * S)
    ledger.generation_stepped("gpt", 1, stepped_ns=1010 * S)
    ledger.incident_opened(ID, anomaly(seen_ns=1100 * S), opened_ns=1101 * S)
    open_ = ledger.ettr("gpt", now_ns=1105 * S)
    assert open_ is not None
    assert open_.seconds["recovery"] == 5
    ledger.incident_closed(ID, report(), closed_ns=1120 * S)
    ledger.interval("gpt", start_ns=1095 * S, end_ns=1100 * S, kind="lost steps", cause=ID)
    ledger.job_ended("gpt", ended_ns=1200 * S, outcome="finished")
    whole = ledger.ettr("gpt", now_ns=9999 * S)
    assert whole is not None
    assert whole.seconds == {"productive": 165, "lost steps": 5, "launch": 10, "recovery": 20, "parked": 0}
    assert whole.ratio == pytest.approx(165 / 200)
    last = ledger.ettr("gpt", now_ns=1200 * S, window_s=100.0)
    assert last is not None and last.ratio == pytest.approx(0.8)
    assert ledger.ettr("nobody", now_ns=1) is None


def running(ledger: Ledger) -> None:
    """Write a job that has been stepping since 1,010 s."""
    ledger.job_started(spec(), started_ns=1000 * S)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=1000 * S)
    ledger.generation_stepped("gpt", 1, stepped_ns=1010 * S)


def test_a_hang_was_not_productive_before_it_was_noticed(ledger: Ledger) -> None:
    running(ledger)
    hang = anomaly(seen_ns=1711 * S).model_copy(update={"symptom": Symptom.HANG, "quiet_s": 601.0})
    ledger.incident_opened(ID, hang, opened_ns=1712 * S)
    ledger.incident_closed(ID, report(), closed_ns=1720 * S)
    found = ledger.ettr("gpt", now_ns=2000 * S)
    assert found is not None
    assert (found.seconds["recovery"], found.seconds["productive"]) == (610, 380)


def test_a_hang_is_not_productive_before_its_incident_is_opened(ledger: Ledger) -> None:
    """If the time after the last step counted as productive, the ratio would rise until the incident is opened."""
    running(ledger)
    quiet = [ledger.ettr("gpt", now_ns=now * S, quiet_since_ns=1100 * S) for now in (1110, 1200, 1700)]
    assert [one.seconds["productive"] for one in quiet if one] == [90, 90, 90]
    last = ledger.ettr("gpt", now_ns=1150 * S, window_s=100.0, quiet_since_ns=1100 * S)
    assert last is not None and last.ratio == pytest.approx(0.5)
    ledger.job_ended("gpt", ended_ns=1120 * S, outcome="finished")
    ended = ledger.ettr("gpt", now_ns=1700 * S, quiet_since_ns=1100 * S)
    assert ended is not None and ended.seconds["productive"] == 110, (
        "the job has finished, so the time after its last step was no hang"
    )


def test_an_end_that_was_never_noted_costs_nothing_beyond_the_next_step(ledger: Ledger) -> None:
    running(ledger)
    ledger.incident_opened(ID, anomaly(seen_ns=1100 * S), opened_ns=1101 * S)
    ledger.generation_launched("gpt", 2, resume_step=20, launched_ns=1103 * S)
    waiting = ledger.ettr("gpt", now_ns=1104 * S)
    assert waiting is not None and waiting.seconds["recovery"] == 4
    ledger.generation_stepped("gpt", 2, stepped_ns=1110 * S)
    found = ledger.ettr("gpt", now_ns=2010 * S)
    assert found is not None
    assert (found.seconds["recovery"], found.seconds["launch"], found.unknown) == (10, 10, ())
    assert found.ratio == pytest.approx(990 / 1010)


@pytest.mark.parametrize(("outcome", "ratio"), [("failed", 0.0), ("stopped by anna", 0.0), ("finished", None)])
def test_a_job_that_never_stepped_was_never_productive(ledger: Ledger, outcome: str, ratio: float | None) -> None:
    ledger.job_started(spec(), started_ns=1000 * S)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=1001 * S)
    ledger.job_ended("gpt", ended_ns=1100 * S, outcome=outcome)
    found = ledger.ettr("gpt", now_ns=9999 * S)
    assert found is not None
    assert found.ratio == ratio, "a finished job may have been productive without showing a step"
    assert found.unknown == (("no step of the job was seen",) if ratio is None else ())


def test_steps_that_were_done_again_and_nobody_counted_are_said(ledger: Ledger) -> None:
    running(ledger)
    ledger.incident_opened(ID, anomaly(seen_ns=1100 * S), opened_ns=1101 * S)
    ledger.incident_closed(ID, report(lost_steps=None), closed_ns=1110 * S)
    found = ledger.ettr("gpt", now_ns=1210 * S)
    assert found is not None
    assert found.unknown == ("how many steps were done again",)
    assert found.ratio == pytest.approx(190 / 210)


def test_a_job_is_not_productive_before_its_first_step(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1000 * S)
    starting = ledger.ettr("gpt", now_ns=1005 * S)
    assert starting is not None and starting.ratio == 0
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=1008 * S)
    ledger.generation_stepped("gpt", 1, stepped_ns=1010 * S)
    stepping = ledger.ettr("gpt", now_ns=1020 * S)
    assert stepping is not None and stepping.ratio == pytest.approx(0.5)


def test_many_machine_events_in_one_go(ledger: Ledger) -> None:
    events = [
        MachineEventRecord(observation=f"m{i}-1", machine=f"m{i}", job="gpt", time_ns=i, kind="exit", text="")
        for i in range(1200)
    ]
    ledger.machine_events_seen(events)
    ledger.machine_events_seen(events[::-1])
    ledger.machine_events_seen([])
    assert ledger.machine_events("gpt") == events
    assert ledger.machine_events("gpt", limit=2) == events[-2:]
    assert ledger.machine_events("other") == []


async def test_calls_from_async_code_do_not_block_the_loop(ledger: Ledger) -> None:
    writes = [ledger.call(Ledger.incident_event, ID, i % 5, time_ns=i, stage="decide", text=str(i)) for i in range(40)]
    await asyncio.gather(*writes)
    found = await ledger.call(Ledger.incident, ID)
    assert found is not None
    assert [event.position for event in found.events] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("id", ["gpt/1", "incident/gpt", "incident/gpt/x", "incident/a/b/0001"])
def test_an_id_that_is_none_is_refused(ledger: Ledger, id: str) -> None:
    with pytest.raises(LedgerError, match="incident/gpt/0001"):
        ledger.incident_event(id, 1, time_ns=1, stage="", text="")


def test_a_row_of_which_a_part_cannot_be_read_harms_no_other_one(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1 * S)
    for number in (1, 2):
        ledger.incident_opened(f"incident/gpt/000{number}", anomaly(seen_ns=number), opened_ns=number)
    with ledger.writing("gpt") as connection:
        connection.exec_driver_sql("UPDATE incidents SET evicted = '{}' WHERE number = 1")
        connection.exec_driver_sql("UPDATE incident_documents SET evidence = '[7]' WHERE number = 1")

    assert [one.problem for one in ledger.incidents()] == ["", ""]
    second, first = ledger.incidents(documents=["evidence"])

    assert (first.problem, second.problem) == ("this release cannot read its evidence", "")
    assert (first.headline, first.evidence) == ("rank 5 on m2 ended by SIGKILL", None)
    read = ledger.incident("incident/gpt/0001")
    assert read is not None
    assert read.problem


def test_values_of_secrets_are_not_kept(ledger: Ledger) -> None:
    job = spec().model_copy(update={"env": {"HF_TOKEN": "hf_abc", "OMP_NUM_THREADS": "1"}, "redact": ["*TOKEN*"]})
    ledger.job_started(job, started_ns=1 * S)
    [kept] = ledger.jobs()
    assert kept.spec is not None
    assert kept.spec["env"] == {"HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": "1"}


def test_what_ranks_were_seen_to_do_is_kept_once_and_in_full(ledger: Ledger) -> None:
    ledger.job_started(spec(), started_ns=1 * S)
    rows = [(look, f"m{index}", 7 * S, bytes([look]) * 100_000) for look in (1, 2) for index in range(600)]

    for _ in range(2):  # an activity may run twice
        ledger.add_samples("incident/gpt/0001", rows)
    ledger.add_samples("incident/gpt/0001", [(1, "m0", 9 * S, b"later")])

    assert ledger.looks("incident/gpt/0001") == sorted(rows)
    assert ledger.looks("incident/gpt/0002") == []
