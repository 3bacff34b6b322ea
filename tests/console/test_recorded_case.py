"""``everstep policy record`` writes the case of an incident in the ledger. The case can be read and played."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from activities.ledger.ledger import Ledger
from agent.v1 import agent_pb2 as pb
from console import main
from drills.cases.case import Case, read_case
from drills.cases.play import differences, play
from everstep.model.eviction import EvictAnswer
from everstep.model.evidence import Classification, Evidence, RankExit
from everstep.model.finding import Finding, MachineFinding, Owner
from everstep.model.hang import HangResult
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.ladder import Rung, TriedRung

INCIDENT = "incident/gpt/0001"
SPEC = JobSpec(name="gpt", script="/x.py", machines=4, ranks_per_machine=2, tp=2, policy={"stop": {"evict_s": 20.0}})
FRAMES = [{"name": "acquire", "short_filename": "loader.py"}, {"name": "<module>", "short_filename": "train.py"}]


def closed(ledger: Ledger, evidence: Evidence, symptom: Symptom, **report: Any) -> None:
    ledger.job_started(SPEC, started_ns=5)
    anomaly = Anomaly(id="m1-1", generation=1, symptom=symptom, headline="rank 3 ended")
    ledger.incident_opened(INCIDENT, anomaly, opened_ns=9)
    ledger.incident_evidence(INCIDENT, evidence)
    fields: dict[str, Any] = {
        "headline": 'Recovered: "rank 3" ended',
        "resolution": "reattempt",
        "cause": "",
        "step": 7,
        "lost_steps": 0,
        "evicted": [],
        "stages": [],
        "generation": 2,
        "recovered": True,
        "seconds": 3.0,
        "failures": [],
    }
    ledger.incident_closed(INCIDENT, IncidentReport(**(fields | report)), closed_ns=10)


def recorded(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    assert main.run(["policy", "record", "gpt/1", "--ledger", url]) == 0, capsys.readouterr().err
    path = folder / "case.toml"
    path.write_text(capsys.readouterr().out)
    return read_case(path)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    return f"sqlite:///{tmp_path}/ledger.db"


def test_a_rank_that_ended(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = 'RuntimeError: NCCL error\n\x1b[31mline "two"\\ \U0001f600\x7f\n'
    lost = Classification(fault="peer", owner="unknown", reason="peer-gone", consequence=True)
    ends = [
        RankExit(rank=0, machine="gpu-a", code=1, time_ns=1, classification=lost),
        RankExit(rank=3, machine="gpu-b", code=1, time_ns=2, exception="RuntimeError: NCCL error", log_tail=log),
        RankExit(rank=4, machine="gpu-c", signal=9, stopped_by_us=True, time_ns=3),
    ]
    with Ledger.open(url) as ledger:
        tried = [TriedRung(rung=Rung.REATTEMPT, symptom="crash", generation=1)]
        closed(
            ledger, Evidence(generation=1, machines=["gpu-a", "gpu-b", "gpu-c"], exits=ends), Symptom.CRASH, tried=tried
        )
    case = recorded(url, tmp_path, capsys)
    [fault] = case.fault
    assert (fault.rank, fault.raises, fault.log, fault.others) == (3, ends[1].exception, log, "connection lost")
    assert (case.job.machines, case.job.tp, case.job.policy.stop.evict_s) == (4, 2, 20.0)
    assert (case.source, case.title, case.expect.rungs) == (INCIDENT, 'Recovered: "rank 3" ended', ["reattempt"])
    assert differences(case, play(case)) == []


def test_a_hang_with_its_stack(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stacks = gzip.compress(json.dumps([{"thread_name": "MainThread", "frames": FRAMES}]).encode())
    process = pb.TracedProcess(rank=3, role="trainer", stacks=stacks)
    with Ledger.open(url) as ledger:
        hang = HangResult(generation=1, conclusion="names", method="", reason="", ranks=[3], machines=["m1"])
        asked = [EvictAnswer(rule="hang-culprit", machine="m1", yes=True, why="")]
        exits = [RankExit(rank=rank, machine=f"m{rank // 2}", signal=9, stopped_by_us=True) for rank in range(8)]
        evidence = Evidence(generation=1, machines=[f"m{number}" for number in range(4)], exits=exits)
        closed(ledger, evidence, Symptom.HANG, hang=hang, evicted=["m1"], asked=asked)
        ledger.add_samples(INCIDENT, [(1, "m1", 9, pb.StacksReply(processes=[process]).SerializeToString())])
    case = recorded(url, tmp_path, capsys)
    [fault] = case.fault
    assert (fault.hangs, fault.rank, fault.stack) == (True, 3, ["acquire (loader.py)", "<module> (train.py)"])
    assert case.expect.evicted == {"m1": "hang-culprit"}
    assert play(case).evicted == {"m1": "hang-culprit"}


def test_findings_and_a_silent_machine(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(inspection="kernel", reason="xid-79", text="GPU 3 is lost", owner=Owner.MACHINE, sure=True)
    about = MachineFinding(machine="gpu-b", finding=finding)
    with Ledger.open(url) as ledger:
        exits = [RankExit(rank=rank, machine=f"gpu-{'abcd'[rank // 2]}", stopped_by_us=True) for rank in (0, 2)]
        names = [f"gpu-{one}" for one in "abcd"]
        evidence = Evidence(generation=1, machines=names, exits=exits, findings=[about], unreachable=["gpu-c"])
        closed(ledger, evidence, Symptom.MACHINE_FAULT, findings=[about])
    case = recorded(url, tmp_path, capsys)
    assert [(fault.machine, fault.silent) for fault in case.fault] == [("m1", False), ("m2", True)]
    assert case.fault[0].finding is not None and case.fault[0].finding.reason == "xid-79"


@pytest.mark.parametrize(("reference", "said"), [("gpt/7", "no incident gpt/7"), ("gpt", "nothing to record")])
def test_what_cannot_be_recorded(reference: str, said: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(url) as ledger:
        closed(ledger, Evidence(generation=1), Symptom.CRASH)
    assert main.run(["policy", "record", reference, "--ledger", url]) == 1
    assert said in capsys.readouterr().err
