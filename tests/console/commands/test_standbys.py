"""``everstep standbys``: the recommended number of standbys, and the data from which it is computed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from console import main
from controlplane.local.cluster_file import ClusterFile
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

TRACE = str(Path(__file__).parents[2] / "data" / "infinitehbd-failures.jsonl")
S = 10**9
DAY = 86_400 * S


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    for name in ("EVERSTEP_LEDGER_URL", "EVERSTEP_INVENTORY"):
        monkeypatch.delenv(name, raising=False)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["standbys", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def cluster(url: str, machines: int = 6, standbys: int = 2) -> None:
    home = ClusterFile.home_of("default")
    ClusterFile(
        name="default",
        home=home,
        shm=home,
        temporal_address="127.0.0.1:1",
        ui_url="",
        ledger_url=url,
        machines=[Machine(name=f"m{index}", address=f"127.0.0.1:{index + 1}") for index in range(machines)],
        standbys=standbys,
    ).save()


def evict(ledger: Ledger, number: int, fault_ns: int, *machines: str) -> None:
    """Record an incident in which machines were evicted. Each of them ran one rank until then."""
    id = f"incident/gpt/{number:04d}"
    anomaly = Anomaly(id=f"m1-{number}", generation=1, symptom=Symptom.CRASH, headline="", seen_ns=fault_ns)
    ledger.incident_opened(id, anomaly, opened_ns=fault_ns)
    ledger.incident_evidence(id, Evidence(generation=1, machines=[*machines]))
    report = IncidentReport(
        headline="",
        resolution="eviction",
        cause="xid-79",
        step=1,
        lost_steps=0,
        evicted=list(machines),
        stages=[],
        generation=2,
        recovered=True,
        seconds=1.0,
        failures=[],
    )
    ledger.incident_closed(id, report, closed_ns=fault_ns + S)


@pytest.mark.parametrize(("machines", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_without_a_record_the_number_follows_from_the_paper(
    capsys: pytest.CaptureFixture[str], machines: int, standbys: int
) -> None:
    code, out, _ = call(capsys, "--machines", str(machines))
    assert code == 0
    assert out.startswith(f"{standbys} standbys for {machines} machines; failure rate: 0.0012 failures of a machine")
    assert "derived from the numbers of the paper (ByteRobust, table 5), since no failures are recorded here" in out
    assert call(capsys, "--machines", str(machines), "--rate", "0.0012")[1] == (
        f"{standbys} standbys for {machines} machines\n"
    )


def test_a_record_is_explained_by_both_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--explain", "--failures", TRACE)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "22 standbys for 400 machines, by everstep's rule"
    binomial = next(line for line in lines if line.startswith("binomial"))
    record = next(line for line in lines if line.startswith("record"))
    assert " 5 92 of 348 days (26.4 %) 75 machine-days (0.2 a day) " in binomial
    assert " 22 348 of 348 days (100.0 %) 8953 machine-days (25.7 a day) " in record
    assert "584 failures in 139592 machine-days" in out
    found = json.loads(call(capsys, "--explain", "--failures", TRACE, "--refill", "daily", "--json")[1])
    assert (found["standbys"], found["decided_by"], found["record"]["away"]) == (11, "record", 0)
    assert [(rule["rule"], rule["standbys"], rule["held"]) for rule in found["rules"]] == [
        ("binomial", 5, 330),
        ("record", 11, 347),
    ]


def test_evictions_in_the_ledger_are_the_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    cluster(url)
    assert call(capsys)[1].startswith("1 standby for 4 machines; failure rate: 0.0012 failures")
    start_ns = time.time_ns() - 20 * DAY
    with Ledger.open(url) as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/train.py", machines=4), started_ns=start_ns)
        evict(ledger, 1, start_ns + DAY, "m1")
        evict(ledger, 2, start_ns + 3 * DAY, "m2", "m1")
    code, out, _ = call(capsys, "--explain")
    assert code == 0
    assert "3 failures in 80 machine-days, and the paper's rate of 0.0012 (ByteRobust, table 5)" in out
    assert "3 failures of 4 machines in 20.0 days (the ledger)" in out
    assert "after 2 of these failures the machine is not known to be back" in out
    assert " of 20 days (" in out
    found = json.loads(call(capsys, "--json")[1])
    assert (found["machines"], found["standbys"], found["decided_by"], found["rules"]) == (4, 4, "record", [])
    assert found["record"]["machines"] == 4
    assert json.loads(call(capsys, "--json", "--machines", "8")[1])["machines"] == 8
    # Without a cluster, the record has as many machines as the largest job in the ledger.
    named = json.loads(call(capsys, "--json", "--machines", "8", "--cluster", "none", "--ledger", url)[1])
    assert named["record"]["machines"] == 4


def test_a_record_that_is_too_short_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"machines": 4, "from": 0, "until": 259200}\n{"machine": "m1", "failed": 5}\n')
    out = call(capsys, "--explain", "--failures", str(file))[1]
    row = next(line for line in out.splitlines() if line.startswith("record"))
    assert " ".join(row.split()) == (
        "record unknown unknown unknown the record is too short: it has 3.0 days, and 7 are needed"
    )
    assert "after 1 of these failures the machine is not known to be back" in out


def test_the_number_of_machines_comes_from_the_inventory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "inventory.toml"
    entries = "".join(f'[[machine]]\nname = "n{index}"\naddress = "10.0.0.{index}:7070"\n' for index in range(1, 4))
    file.write_text(f"standbys = 1\n{entries}")
    monkeypatch.setenv("EVERSTEP_INVENTORY", str(file))
    assert call(capsys)[1].startswith("1 standby for 2 machines;")


def test_wrong_usage_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = call(capsys)
    assert (code, "the number of machines is not known" in err, "Give --machines" in err) == (2, True, True)
    code, _, err = call(capsys, "--rate", "0.1", "--failures", TRACE)
    assert (code, "give only one of them" in err) == (2, True)
    code, _, err = call(capsys, "--failures", str(tmp_path / "none"))
    assert (code, "there is no file of failures" in err) == (2, True)
    code, _, err = call(capsys, "--ledger", f"sqlite:///{tmp_path}/none.db")
    assert (code, "there is no ledger at" in err) == (1, True)
    assert call(capsys, "--machines", "0")[0] == 2
    assert call(capsys, "--rate", "2", "--machines", "4")[0] == 2
