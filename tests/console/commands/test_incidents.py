"""``everstep incidents`` and ``everstep incident``, with output for a person and for a script."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from activities.ledger.records import IncidentRecord
from console import main
from console.views.incident_report import report_blocks
from controlplane.local.cluster_file import ClusterFile
from everstep.model.evidence import Classification, Evidence, RankExit
from everstep.model.incident import Anomaly, Failure, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.launch import Confirmation
from everstep.model.stage import NOT_CONFIRMED, StageRecord
from everstep.model.state_copy import StateCopies

S = 10**9
FAULT = 1_763_730_000 * S
MS = 10**6


def write(ledger: Ledger, job: str, number: int, *, fault_ns: int = FAULT, close: bool = True) -> str:
    id = f"incident/{job}/{number:04d}"
    ledger.job_started(JobSpec(name=job, script="/srv/train.py"), started_ns=FAULT - 60 * S)
    anomaly = Anomaly(
        id="m2-7",
        generation=1,
        symptom=Symptom.CRASH,
        headline="rank 5 on m2 ended by SIGKILL",
        ranks=[5],
        machines=["m2"],
        seen_ns=fault_ns,
    )
    ledger.incident_opened(id, anomaly, opened_ns=fault_ns + 20 * MS)
    evidence = Evidence(
        generation=1,
        exits=[
            RankExit(rank=5, machine="m2", signal=9, time_ns=fault_ns, completed_steps=20),
            RankExit(
                rank=3,
                machine="m1",
                code=1,
                time_ns=fault_ns + 50 * MS,
                completed_steps=20,
                exception="RuntimeError: Connection closed by peer \x1b[31m[red]",
                log_tail="Traceback (most recent call last):\n  \x1b]0;title\x07boom\n",
            ),
            RankExit(rank=0, machine="m0", signal=9, stopped_by_us=True),
        ],
        held=[StateCopies.one(rank=5, machine="m2", completed_steps=21, valid=False, reason="checksum does not hold")],
        unreachable=["m3"],
    )
    ledger.incident_evidence(id, evidence)
    ledger.incident_event(
        id, 1, time_ns=fault_ns + 100 * MS, stage="decide", text="reattempt from step 20: first failure"
    )
    if close:
        confirmation = Confirmation(
            generation=2, ok=True, reason="8 of 8 ranks", stepped_ns=fault_ns + 412 * MS, parts={"restore": 0.03}
        )
        report = IncidentReport(
            headline="Recovered in 0.41 s by reattempt, lost 0 steps: rank 5 on m2 ended by SIGKILL",
            resolution="reattempt",
            cause="SIGKILL",
            step=20,
            lost_steps=0,
            evicted=[],
            stages=["stop, 0.03 s"],
            generation=2,
            recovered=True,
            seconds=0.412,
            failures=[Failure(generation=1, step=20, symptom=Symptom.CRASH, cause="SIGKILL")],
            confirmation=confirmation,
            timings=[StageRecord(name="stop", seconds=0.031, found="rank 5 on m2 ended by SIGKILL")],
        )
        ledger.incident_closed(id, report, closed_ns=fault_ns + 412 * MS)
    return id


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVERSTEP_LEDGER_URL", raising=False)
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.open(url).close()
    return url


def cluster(url: str, file: str = "cluster.json") -> None:
    home = ClusterFile.home_of("default")
    home.mkdir(parents=True)
    described = ClusterFile(
        name="default",
        home=home,
        shm=home,
        temporal_address="127.0.0.1:1",
        ui_url="http://127.0.0.1:8233",
        ledger_url=url,
        machines=[],
    )
    (home / file).write_text(described.model_dump_json())


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_report_tells_the_story(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(url) as ledger:
        write(ledger, "gpt", 1)
    cluster(url)
    code, out, _ = call(capsys, "incident", "gpt/1")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert lines[0] == (
        "incident/gpt/0001: Recovered in 0.41 s by reattempt, lost 0 steps: rank 5 on m2 ended by SIGKILL"
    )
    story = lines[lines.index("What happened") + 1 : lines.index("Where the time went") - 1]
    assert story == [
        "+0.000 s detected rank 5 on m2 ended by SIGKILL",
        "+0.020 s opened correlation id m2-7",
        "+0.100 s decide reattempt from step 20: first failure",
        "+0.412 s closed all ranks stepped: 8 of 8 ranks",
    ]
    for line in (
        "cause SIGKILL",
        "at step 20",
        "steps lost 0",
        "evicted no machine",
        "stop 0.031 s rank 5 on m2 ended by SIGKILL",
        "restore 0.030 s part of the restart, slowest rank",
        "rank 5 on m2 +0.000 s SIGKILL after 20 steps",
        "rank 3 on m1 +0.050 s exit code 1 after 20 steps",
        "RuntimeError: Connection closed by peer [red]",
        "1 other rank ran until everstep stopped them",
        "machine m3 did not answer",
        "checkpoint of rank 5 on m2 not valid: checksum does not hold",
        "End of rank 3's error output",
        "logs everstep logs gpt --rank 5",
        "Web UI http://127.0.0.1:8233/namespaces/everstep/workflows/incident%2Fgpt%2F0001",
    ):
        assert line in lines, line
    assert "\x1b" not in out
    assert "title" not in out
    assert "boom" in out


def test_a_job_that_was_not_seen_to_step_is_not_said_to_have_recovered(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ledger.open(url) as ledger:
        id = write(ledger, "gpt", 4, close=False)
        lives = Confirmation(generation=2, ok=True, confirmed=False, reason="all 8 ranks live", stepped_ns=FAULT + S)
        report = IncidentReport(
            headline="Running, not confirmed, by reattempt: rank 5 on m2 ended by SIGKILL",
            resolution=NOT_CONFIRMED,
            cause="SIGKILL",
            step=-1,
            lost_steps=None,
            evicted=[],
            stages=[],
            generation=2,
            recovered=True,
            confirmed=False,
            seconds=None,
            failures=[],
            confirmation=lives,
        )
        ledger.incident_closed(id, report, closed_ns=FAULT + S)
    code, out, _ = call(capsys, "incident", "gpt/4", "--ledger", url)
    assert code == 0
    assert "outcome   running, not confirmed" in out
    assert "running, not confirmed: all 8 ranks live" in out
    assert "ecovered" not in out and "stepped" not in out
    assert json.loads(call(capsys, "incident", "gpt/4", "--json", "--ledger", url)[1])["recovered"] is False


def test_an_open_incident_reads_as_open(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(url) as ledger:
        write(ledger, "gpt", 2, close=False)
        ledger.incident_event("incident/gpt/0003", 1, time_ns=FAULT, stage="decide", text="only this arrived")
    code, out, _ = call(capsys, "incident", "2", "--ledger", url)
    assert code == 0
    assert "  outcome   open" in out.splitlines()
    assert "everstep status gpt" in out
    assert "Web UI" not in out
    code, out, _ = call(capsys, "incident", "gpt/3", "--ledger", url)
    assert code == 0
    assert "only this arrived" in out


@pytest.mark.parametrize("given", ["incident/gpt/0001", "gpt/1", "gpt/0001", "1", ""])
def test_ids_as_people_write_them(url: str, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with Ledger.open(url) as ledger:
        id = write(ledger, "gpt", 1)
    code, out, _ = call(capsys, "incident", *([given] if given else []), "--json", "--ledger", url)
    assert code == 0
    found = json.loads(out)
    assert (found["id"], found["resolution"], found["recovered"]) == (id, "reattempt", True)
    assert found["events"][0]["stage"] == "decide"
    assert found["evidence"]["exits"][0]["signal"] == 9


def test_wrong_ids(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = ("--ledger", url)
    assert call(capsys, "incident", *option)[::2] == (1, "error: the ledger has no incidents\n")
    with Ledger.open(url) as ledger:
        write(ledger, "gpt", 1)
        write(ledger, "moe", 1)
    code, _, err = call(capsys, "incident", "1", *option)
    assert (code, "1 may be incident/gpt/0001, incident/moe/0001: name the job too" in err) == (2, True)
    code, _, err = call(capsys, "incident", "7", *option)
    assert (code, "has no incident 7" in err) == (1, True)
    code, _, err = call(capsys, "incident", "gpt/7", *option)
    assert (code, "has no incident gpt/7" in err) == (1, True)
    code, _, err = call(capsys, "incident", "Gpt!", *option)
    assert (code, "'Gpt!' is not an incident" in err) == (2, True)


def test_the_list_in_a_pipe_is_one_line_each(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(url) as ledger:
        write(ledger, "gpt", 1)
        write(ledger, "gpt", 2, fault_ns=FAULT + 100 * S, close=False)
        write(ledger, "moe", 1, fault_ns=FAULT + 50 * S)
    code, out, _ = call(capsys, "incidents", "--ledger", url)
    assert code == 0
    rows = out.splitlines()
    assert [row.split()[0] for row in rows] == ["incident/gpt/0002", "incident/moe/0001", "incident/gpt/0001"]
    assert rows[0].rstrip().endswith("rank 5 on m2 ended by SIGKILL")
    assert " open " in rows[0]
    assert " reattempt  0.41 s  0 lost " in rows[1]
    code, out, _ = call(capsys, "incidents", "gpt", "--limit", "1", "--json", "--ledger", url)
    assert [each["id"] for each in json.loads(out)] == ["incident/gpt/0002"]


def test_none_unknown_and_no_ledger(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(capsys, "incidents", "--ledger", url)[:2] == (0, "the ledger has no incidents\n")
    assert json.loads(call(capsys, "incidents", "--json", "--ledger", url)[1]) == []
    with Ledger.open(url) as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/x.py"), started_ns=1)
    assert call(capsys, "incidents", "gpt", "--ledger", url)[:2] == (0, "job gpt has no incidents\n")
    code, _, err = call(capsys, "incidents", "gtp", "--ledger", url)
    assert (code, "has no job 'gtp'; it has: gpt" in err) == (1, True)
    code, _, err = call(capsys, "incidents")
    assert (code, "no cluster 'default'" in err) == (1, True)
    code, _, err = call(capsys, "incidents", "--ledger", f"sqlite:///{tmp_path}/none.db")
    assert (code, "there is no ledger at" in err) == (1, True)


def test_a_cluster_that_is_down_is_still_read(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(url) as ledger:
        write(ledger, "gpt", 1)
    cluster(url, "last.json")
    code, out, _ = call(capsys, "incidents")
    assert (code, out.split()[0]) == (0, "incident/gpt/0001")


def read_all(terminal: int) -> str:
    """Return what a process wrote to its terminal until it ended."""
    read = b""
    with suppress(OSError):  # Linux raises EIO at the end of a terminal's output
        while part := os.read(terminal, 4096):
            read += part
    os.close(terminal)
    return read.decode()


@pytest.mark.parametrize("arguments", [["incidents"], ["incident", "gpt/1"]])
def test_a_terminal_gets_the_same_words(url: str, arguments: list[str]) -> None:
    with Ledger.open(url) as ledger:
        write(ledger, "gpt", 1)
    main_side, command_side = pty.openpty()
    command = "import sys; from console.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments, "--ledger", url],
        stdout=command_side,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200", "TERM": "xterm"},
    )
    os.close(command_side)
    shown = read_all(main_side)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "incident/gpt/0001" in shown
    assert "rank 5 on m2 ended by SIGKILL" in shown
    assert "\x1b[" in shown


def test_an_incident_shows_class_owner_place_and_evidence() -> None:
    found = Classification(
        fault="disk full",
        owner="storage",
        reason="disk-full",
        place="/job/train.py:15 in save",
        evidence=["OSError: [Errno 28] No space left on device"],
    )
    record = IncidentRecord(id="incident/gpt/0001", job="gpt", run=1, number=1)
    shown = record.model_copy(update={"anomaly": {"classification": found.model_dump(mode="json")}})

    facts = {row[0]: row[1] for row in report_blocks(shown)[0].rows}
    assert facts["class"] == "disk full (disk-full)"
    assert (facts["owner"], facts["in"]) == ("storage", "/job/train.py:15 in save")
    assert facts["evidence"] == "OSError: [Errno 28] No space left on device"
    assert "class" not in {row[0] for row in report_blocks(record)[0].rows}
