"""``everstep report`` describes the last days, from the ledger."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from activities.ledger.ledger import Ledger
from activities.ledger.records import MachineEventRecord
from activities.pool.look_at_machines import RETURNED
from console import main
from everstep.model.eviction import EvictAnswer
from everstep.model.evidence import Classification
from everstep.model.finding import Finding, MachineFinding, Owner
from everstep.model.hang import HangResult
from everstep.model.incident import Anomaly, Failure, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.stage import StageRecord

S = 10**9
DAY = 86_400 * S


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVERSTEP_LEDGER_URL", raising=False)
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.open(url).close()
    return url


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["report", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(ledger: Ledger, job: str, at_ns: int) -> None:
    """Record a job that completes its first step 10 s after its start."""
    ledger.job_started(JobSpec(name=job, script="/train.py"), started_ns=at_ns)
    ledger.generation_launched(job, 1, resume_step=0, launched_ns=at_ns)
    ledger.generation_stepped(job, 1, stepped_ns=at_ns + 10 * S)


def hung(rule: str, machine: str, *, innocent: int = 0) -> dict[str, Any]:
    """Return the part of an incident's report that says that a machine left because of a hang."""
    finding = Finding(inspection="nic", reason="nic-down", text="it is down", owner=Owner.MACHINE)
    return {
        "asked": [EvictAnswer(rule=rule, machine=machine, yes=True, why="")],
        "findings": [MachineFinding(machine=machine, finding=finding)],
        "hang": HangResult(
            generation=1, conclusion="over-evicts", method="stacks", reason="", machines=[machine], innocent=innocent
        ),
    }


def incident(
    ledger: Ledger,
    id: str,
    at_ns: int,
    *evicted: str,
    owner: Owner = Owner.MACHINE,
    symptom: Symptom = Symptom.CRASH,
    seconds: float | None = 20.0,
    **more: Any,
) -> None:
    """Record an incident that was opened 5 s after its fault, and closed 20 s after the fault."""
    anomaly = Anomaly(id="m1-1", generation=1, symptom=symptom, headline="", seen_ns=at_ns)
    ledger.incident_opened(id, anomaly, opened_ns=at_ns + 5 * S)
    report = IncidentReport(
        headline="",
        resolution="eviction" if evicted else "reattempt",
        cause="x",
        step=1,
        lost_steps=0,
        evicted=list(evicted),
        stages=[],
        generation=2,
        recovered=True,
        seconds=seconds,
        failures=[Failure(generation=1, step=1, symptom=symptom, cause="x")],
        timings=[StageRecord(name="stop", seconds=3.0), StageRecord(name="reattempt", seconds=12.0)],
        classification=Classification(fault="x", owner=owner, reason="x"),
        **more,
    )
    ledger.incident_closed(id, report, closed_ns=at_ns + 20 * S)


def week(url: str) -> None:
    """Record two jobs: one with recent incidents and an old one, and one that ended long ago."""
    now_ns = time.time_ns()
    with Ledger.open(url) as ledger:
        start(ledger, "old", now_ns - 40 * DAY)
        ledger.job_ended("old", ended_ns=now_ns - 30 * DAY, outcome="finished after 0 incidents")
        start(ledger, "gpt", now_ns - 20 * DAY)
        incident(ledger, "incident/gpt/0001", now_ns - 10 * DAY, "m9")
        incident(ledger, "incident/gpt/0002", now_ns - 3 * DAY, "m1", "m2")
        incident(ledger, "incident/gpt/0003", now_ns - 2 * DAY, "m1")
        incident(ledger, "incident/gpt/0004", now_ns - DAY, owner=Owner.CODE, symptom=Symptom.EXCEPTION, seconds=None)
        anomaly = Anomaly(id="m1-1", generation=1, symptom=Symptom.HANG, headline="", seen_ns=now_ns - 100 * S)
        ledger.incident_opened("incident/gpt/0005", anomaly, opened_ns=now_ns - 90 * S)


def test_a_week_in_tables(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    week(url)
    code, out, _ = call(capsys, "--ledger", url)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert lines[0].startswith("7 days until ") and lines[0].endswith(": 4 incidents (1 open), 1 run of jobs")
    for line in (
        "crash 2 40 s",
        "hang 1 (1 open) -",
        "exception 1 1 unknown",
        "machine 2 40 s",
        "code 1 1 unknown",
        "unknown 1 (1 open) -",
        "detect 25 s",
        "restart 36 s",
    ):
        assert line in lines, line
    machines = lines.index("Machine Evictions Last")
    assert [line.split()[:2] for line in lines[machines + 1 : machines + 3]] == [["m1", "2"], ["m2", "1"]]
    job = next(line for line in lines if line.startswith("gpt ") and line.endswith(" running"))
    assert " 7 d 0 h 100.0 % detect 25 s, decide " in job
    assert "old" not in out and "m9" not in out


def test_json_has_the_same_and_more(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    week(url)
    found = json.loads(call(capsys, "--ledger", url, "--days", "45", "--json")[1])
    assert (found["days"], found["incidents"], found["open"], found["empty"]) == (45, 5, 1, False)
    assert [(one["machine"], one["evictions"]) for one in found["machines"]] == [("m1", 2), ("m2", 1), ("m9", 1)]
    assert sum(one["incidents"] for one in found["by_day"]) == 5
    assert len(found["by_day"]) == 46
    gpt, old = found["jobs"]
    assert (gpt["job"], gpt["outcome"], gpt["ended"]) == ("gpt", "running", None)
    assert old["ettr"] == pytest.approx(1 - 10 / (10 * 86_400))
    assert (old["lost"]["start"], old["seconds"]) == (10.0, 10 * 86_400)
    assert found["lost"]["start"] == 20.0


def test_what_the_ledger_does_not_know_is_unknown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    now_ns = time.time_ns()
    with Ledger.open(url) as ledger:
        start(ledger, "gpt", now_ns - 2 * DAY)
        start(ledger, "gpt", now_ns - DAY)
        ledger.incident_event("incident/gpt/0001", 1, time_ns=now_ns, stage="decide", text="only this arrived")
        incident(ledger, "incident/gpt/0002", now_ns - 1000 * S)
    code, out, _ = call(capsys, "--ledger", url)
    assert code == 0
    assert [line.split()[4:7] for line in out.splitlines() if line.endswith("  unknown")] == [["unknown"] * 3]
    assert "note: job gpt, run 1: its ETTR and lost time are unknown: the ledger does not have its end" in out
    # If only a single entry of an incident is known, its day is not known.
    assert "1 incident, 2 runs of jobs" in out
    assert "no machine was evicted" in out


def test_what_verdicts_cost(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A hang named a machine, which then passed its tests; a person recorded a cause; another machine left twice."""
    now_ns = time.time_ns()
    with Ledger.open(url) as ledger:
        start(ledger, "gpt", now_ns - 5 * DAY)
        incident(ledger, "incident/gpt/0001", now_ns - 4 * DAY, "m1", **hung("hang-culprit", "m1", innocent=2))
        returned = MachineEventRecord(
            observation="pool-m1-1", machine="m1", job="gpt", time_ns=now_ns - 3 * DAY, kind=RETURNED, text=""
        )
        ledger.machine_events_seen([returned])
        incident(ledger, "incident/gpt/0002", now_ns - 2 * DAY, "m2", **hung("sure-machine-fault", "m2"))
        incident(ledger, "incident/gpt/0003", now_ns - DAY, "m2", **hung("hang-culprit", "m2"))
        incident(ledger, "incident/gpt/0004", now_ns - 1000 * S, owner=Owner.NETWORK)
    assert main.run(["verdict", "gpt/3", "--was", "code", "--note", "a deadlock", "--ledger", url]) == 0
    assert main.run(["verdict", "gpt/4", "--was", "unknown", "--ledger", url]) == 0
    capsys.readouterr()
    found = json.loads(call(capsys, "--ledger", url, "--json")[1])
    tallies = {
        one["owner"]: [one[name] for name in ("verdicts", "confirmed", "refuted", "open")] for one in found["verdicts"]
    }
    assert tallies == {"machine": [3, 1, 2, 0], "network": [1, 0, 0, 1]}
    assert (found["innocent"], found["over_evicted"]) == (["m1", "m2"], 2)
    [nic] = found["inspections"]
    assert (nic["inspection"], nic["findings"], nic["false_alarms"]) == ("nic", 3, 2)
    assert nic["per_machine_day"] == pytest.approx(2 / 5, rel=0.01)
    lines = [" ".join(line.split()) for line in call(capsys, "--ledger", url)[1].splitlines()]
    assert "nic 3 2 0.4" in lines
    assert any(line.startswith("gpt") and " machine 3 1 2 0 " in line for line in lines)
    assert any(line.startswith("evicted without a fault: 2 machines by a wrong verdict (m1, m2), 2") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gpt/1", "--was", "gremlins"], 2, "must be one of machine, code"),
        (["gpt", "--was", "code"], 2, "gpt/2"),
        (["gpt/77", "--was", "code"], 1, "has no incident gpt/77"),
    ],
)
def test_a_verdict_that_cannot_be_recorded(
    arguments: list[str], code: int, said: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    week(url)
    assert main.run(["verdict", *arguments, "--ledger", url]) == code
    assert said in capsys.readouterr().err


def test_the_newest_verdict_of_a_person_counts(url: str) -> None:
    week(url)
    for was in ("code", "network"):
        assert main.run(["verdict", "gpt/2", "--was", was, "--operator", "ada", "--ledger", url]) == 0
    with Ledger.open(url) as ledger:
        [decided] = ledger.verdicts()
    assert (decided.incident, decided.was, decided.operator) == ("incident/gpt/0002", "network", "ada")


class Page(HTMLParser):
    """The addresses that a page refers to, and the page's text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_one_file_without_scripts(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    week(url)
    with Ledger.open(url) as ledger:
        ledger.job_ended("gpt", ended_ns=time.time_ns(), outcome='<script src="http://x">no</script>')
    file = tmp_path / "report.html"
    code, out, _ = call(capsys, "--ledger", url, "--html", str(file))
    assert (code, out.startswith(f"{file}: 7 days until")) == (0, True)
    page = Page(file.read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags and "link" not in page.tags
    assert page.links == []
    for text in ("Incidents by symptom", "exception", "m1", '<script src="http://x">no</script>'):
        assert text in page.texts, text
    assert "@import" not in file.read_text() and "url(" not in file.read_text()
    assert json.loads(call(capsys, "--ledger", url, "--html", str(file), "--json")[1])["days"] == 7


def test_empty_is_said(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(capsys, "--ledger", url)[:2] == (0, "the ledger is empty: no job has run yet\n")
    file = tmp_path / "report.html"
    assert call(capsys, "--ledger", url, "--html", str(file))[0] == 0
    assert "the ledger is empty" in file.read_text()
    assert json.loads(call(capsys, "--ledger", url, "--json")[1])["empty"] is True
    with Ledger.open(url) as ledger:
        start(ledger, "old", 1_000 * S)
        ledger.job_ended("old", ended_ns=2_000 * S, outcome="finished")
    code, out, _ = call(capsys, "--ledger", url)
    assert (code, out.count("\n"), ": 0 incidents, 0 runs of jobs" in out) == (0, 1, True)
    call(capsys, "--ledger", url, "--html", str(file))
    assert "no incidents" in file.read_text() and "no job ran" in file.read_text()


def test_what_cannot_be_is_said(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = call(capsys, "--ledger", url, "--html", str(tmp_path / "none" / "report.html"))
    assert (code, "report.html cannot be written: No such file" in err) == (2, True)
    assert call(capsys, "--ledger", url, "--days", "0")[0] == 2
    code, _, err = call(capsys, "--ledger", f"sqlite:///{tmp_path}/none.db")
    assert (code, "there is no ledger at" in err) == (1, True)
    assert call(capsys)[0] == 1
