"""``everstep policy explain`` shows the answers of an incident, for a person and for a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from console import main
from console.commands.policy import NO_ANSWER
from controlplane.client import Control
from everstep.errors import NoSuchJob
from everstep.model.eviction import EvictAnswer, EvictionState, EvictMode
from everstep.model.incident import CLOSED_OUTSIDE, Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import IncidentSummary, JobState
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.stage import StageRecord

S = 10**9
FAULT = 1_763_730_000 * S
WHY = "GPU 3: lost: it names this machine for sure"
ANSWERS = [
    EvictAnswer(rule="sure-machine-fault", machine="m1", yes=True, why=WHY, reason="gpu-lost"),
    EvictAnswer(
        rule="unknown-verdict", machine="m1", yes=False, why="the verdict is unknown\x1b[31m", reason="clock-off"
    ),
    EvictAnswer(rule="sure-machine-fault", machine="m2", yes=True, why=WHY, reason="gpu-lost", mode=EvictMode.SHADOW),
    EvictAnswer(rule="breaker", machine="", yes=False, why="3 machines of 4 would be evicted"),
]


def report(resolution: str, asked: list[EvictAnswer], evicted: list[str]) -> IncidentReport:
    return IncidentReport(
        headline=f"Recovered in 1.20 s by {resolution}: rank 5 on m2 ended by SIGKILL",
        resolution=resolution,
        cause="SIGKILL",
        step=20,
        lost_steps=0,
        evicted=evicted,
        stages=[],
        generation=2,
        recovered=True,
        seconds=1.2,
        failures=[],
        asked=asked,
    )


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger with three incidents of one job: one with an eviction, one without, and an open one."""
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EVERSTEP_LEDGER_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    monkeypatch.delenv("EVERSTEP_INVENTORY", raising=False)
    policy = RecoveryPolicy(evict={"rules": {"repeated-network-alert": EvictMode.OFF}})
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/srv/train.py", policy=policy), started_ns=FAULT - 60 * S)
        for number in (1, 2, 3):
            anomaly = Anomaly(
                id=f"m2-{number}",
                generation=1,
                symptom=Symptom.CRASH,
                headline="rank 5 on m2 ended by SIGKILL",
                seen_ns=FAULT + number * S,
            )
            ledger.incident_opened(f"incident/gpt/{number:04d}", anomaly, opened_ns=FAULT + number * S)
        first = "incident/gpt/0001"
        story = [
            ("stop", "stopped"),
            ("evict", "m1 (gpu-lost); s0 for m1"),
            ("decide", "reattempt from step 20"),
        ]
        for position, (stage, text) in enumerate(story, 1):
            ledger.incident_event(first, position, time_ns=FAULT + (position + 1) * S, stage=stage, text=text)
        ledger.incident_closed(first, report("eviction", ANSWERS, ["m1"]), closed_ns=FAULT + 9 * S)
        ledger.incident_closed("incident/gpt/0002", report("reattempt", [], []), closed_ns=FAULT + 9 * S)
    return f"sqlite:///{tmp_path}/ledger.db"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["policy", "explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("given", ["gpt/1", "incident/gpt/0001"])
def test_every_answer_with_its_result(url: str, capsys: pytest.CaptureFixture[str], given: str) -> None:
    code, out, _ = call(capsys, given)

    assert code == 0
    assert "\x1b" not in out
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "incident/gpt/0001: Recovered in 1.20 s by eviction: rank 5 on m2 ended by SIGKILL",
        "outcome eviction",
        "evicted m1",
        "",
        "m1",
        f"yes sure-machine-fault {WHY} -> it left the job",
        "no unknown-verdict the verdict is unknown\\x1b[31m -> nothing",
        "",
        "m2",
        f"yes sure-machine-fault (shadow) {WHY} -> noted only: the rule is in shadow mode",
        "",
        "all machines together",
        "no breaker 3 machines of 4 would be evicted -> an operator had to approve",
        "",
        "the other rules",
        "no answer operator, gone-machine, failed-test, bad-link, failed-replay, repeated-errors, hang-culprit, "
        "hang-group, slow-machine, application-caused, unsure-fault, other-owner",
        "off repeated-network-alert",
        "",
        "what followed",
        "+2.000 s evict m1 (gpu-lost); s0 for m1",
        "+3.000 s decide reattempt from step 20",
    ]


def test_json_has_the_same(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "gpt/1", "--json", "--ledger", url)
    told = json.loads(out)

    assert code == 0
    assert [(one["machine"], one["rule"], one["yes"]) for one in told["answers"]] == [
        (one.machine, one.rule, one.yes) for one in ANSWERS
    ]
    assert told["answers"][0]["result"] == "it left the job"
    assert (told["over"], told["evicted"], told["not_asked"]) == (True, ["m1"], ["repeated-network-alert"])


def test_where_no_rule_had_anything_to_say(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "gpt/2")

    assert code == 0
    assert NO_ANSWER in out.splitlines()
    assert "no answer" not in out
    assert "    evicted  no machine" in out.splitlines()


@pytest.mark.parametrize("given", ["gpt", "gpt/3", "incident/gpt/0003"])
def test_an_open_incident_is_asked_itself(url: str, capsys: pytest.CaptureFixture[str], given: str) -> None:
    code, out, err = call(capsys, given)

    assert (code, out) == (3, "")
    assert "no cluster 'default' is up" in err


class OpenIncident:
    """Stands for the control plane of a job. Its fourth incident is open, and not in the ledger yet."""

    async def __aenter__(self) -> OpenIncident:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def state(self, job: str) -> JobState:
        spec = JobSpec(name=job, script="/srv/train.py", policy=RecoveryPolicy(evict={"mode": EvictMode.APPROVE}))
        summary = IncidentSummary(id="incident/gpt/0004", number=4, headline="")
        return JobState(spec=spec, machines=[], incidents=[summary])

    async def evictions(self, id: str) -> EvictionState:
        if not id.endswith("4"):
            raise NoSuchJob(id)
        return EvictionState(asked=[ANSWERS[0].model_copy(update={"mode": EvictMode.APPROVE})])

    async def stage(self, id: str) -> StageRecord:
        return StageRecord(name="parked", seconds=0.0, found="m1 (gpu-lost): an operator has to approve")


@pytest.mark.parametrize("given", ["gpt", "gpt/4"])
def test_an_open_incident_that_the_ledger_does_not_know_yet(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    async def connect(_: str) -> OpenIncident:
        return OpenIncident()

    monkeypatch.setattr(Control, "connect", connect)
    code, out, _ = call(capsys, given, "--json")
    told = json.loads(out)

    assert code == 0
    assert (told["incident"], told["over"]) == ("incident/gpt/0004", False)
    assert told["outcome"] == "open, parked: m1 (gpu-lost): an operator has to approve"
    assert [one["result"] for one in told["answers"]] == ["an operator has to approve"]
    code, _, err = call(capsys, "gpt/9")
    assert (code, "has no incident gpt/9" in err) == (1, True)


def test_what_was_closed_from_outside_is_asked_itself(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of this incident was not written by its own workflow, so it lacks the answers of the rules."""
    with Ledger.open(url) as ledger:
        ledger.incident_closed("incident/gpt/0003", report(CLOSED_OUTSIDE, [], []), closed_ns=FAULT + 9 * S)

    assert call(capsys, "gpt/3")[0] == 3


def test_what_is_no_incident(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, code, words in (
        ("gpt/7", 1, "the ledger has no incident gpt/7"),
        ("moe", 1, "the ledger has no incident moe"),
        ("gpt/first", 2, "'gpt/first' names neither a job nor an incident: write gpt, gpt/2 or incident/gpt/0002"),
    ):
        found, out, err = call(capsys, given)
        assert (found, out, words in err) == (code, "", True), err
