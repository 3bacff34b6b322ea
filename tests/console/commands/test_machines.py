"""``everstep machines``: its tables, ``--clear``, and the rounds of ``--record``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from console import main
from console.commands.machines import (
    HEALTHY_SHOWN,
    _clear,
    machine_table,
    machines_table,
    measure_lines,
    odd_lines,
)
from console.terminal import PlainConsole
from controlplane.client import Control
from controlplane.queries import machines as queries
from controlplane.queries.machines import InspectionReport, MachineReport, OddMachine
from controlplane.recording import read_recording
from everstep.errors import ConfigError
from everstep.model.finding import Finding, Health
from everstep.model.machine import Machine

ROUNDS = 3


class WithoutPool:
    """A connection to a cluster that has no machine pool."""

    task_queue = "q"

    @property
    def client(self) -> WithoutPool:
        return self

    def get_workflow_handle(self, _: str) -> WithoutPool:
        return self

    async def query(self, *_: object, **__: object) -> None:
        raise RPCError("no pool runs there", RPCStatusCode.NOT_FOUND, b"")

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class OneMachine(WithoutPool):
    """A cluster of one machine. Its finding, that a GPU fell off the bus, stays until an operator clears it."""

    def __init__(self) -> None:
        self.agent = FakeAgent("m0", clear=self._clear, inspect=self._inspect)
        self.agents = AgentClients()
        self.all_machines: list[Machine] = []
        self._findings = [pb.Finding(inspection="kernel-log", reason="xid-79", verdict="faulty", text="it fell off")]

    def _clear(self, request: pb.ClearRequest) -> pb.ClearReply:
        gone = [found for found in self._findings if found.reason == request.reason]
        self._findings = [found for found in self._findings if found not in gone]
        return pb.ClearReply(cleared=len(gone))

    def _inspect(self, _: pb.InspectRequest) -> pb.InspectReply:
        verdict = "faulty" if self._findings else "healthy"
        state = pb.InspectionState(name="kernel-log", verdict=verdict, findings=self._findings)
        return pb.InspectReply(machine="m0", verdict=verdict, inspections=[state])

    async def __aenter__(self) -> Any:
        await self.agent.__aenter__()
        self.all_machines = [Machine(name="m0", address=self.agent.address)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.agents.close()
        await self.agent.stop()


class TwoMachines(WithoutPool):
    """A cluster of two machines."""

    all_machines: tuple[Machine, ...] = (Machine(name="m0", address="h:1"), Machine(name="m1", address="h:2"))
    agents = None


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands connect to the cluster of one machine."""

    async def connect(_: str) -> OneMachine:
        return OneMachine()

    monkeypatch.setattr(Control, "connect", connect)


@pytest.mark.usefixtures("cleared")
async def test_the_state_after_a_clearing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _clear(["m0"], "default", "xid-79", as_json=False) == 0
    said = capsys.readouterr().out
    assert said.startswith("m0: 1 finding cleared\nm0  127.0.0.1:")
    assert "healthy" in said
    assert "it fell off" not in said


@pytest.mark.usefixtures("cleared")
async def test_the_state_after_a_clearing_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _clear(["m0"], "default", "xid-79", as_json=True) == 0
    [machine] = json.loads(capsys.readouterr().out)
    assert (machine["machine"], machine["verdict"]) == ("m0", "healthy")


@pytest.mark.usefixtures("cleared")
async def test_a_reason_without_a_finding_is_not_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _clear(["m0"], "default", "xid-80", as_json=False) == 1
    said = capsys.readouterr().out
    assert "m0: no finding has the reason code xid-80" in said
    assert "it fell off" in said


@pytest.mark.usefixtures("cleared")
async def test_a_clearing_needs_names_of_machines() -> None:
    with pytest.raises(ConfigError, match="name the machines"):
        await _clear([], "default", "xid-79", as_json=False)
    with pytest.raises(ConfigError, match="there is no machine m9"):
        await _clear(["m9"], "default", "xid-79", as_json=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The machines that were asked in each round. After ``ROUNDS`` rounds, the user presses Ctrl-C."""
    rounds: list[list[str]] = []

    async def connect(_: str) -> TwoMachines:
        return TwoMachines()

    async def ask(_: Any, machines: Sequence[Machine]) -> list[MachineReport]:
        if len(rounds) == ROUNDS:
            raise KeyboardInterrupt
        rounds.append([machine.name for machine in machines])
        return [MachineReport(machine=one.name, address="", verdict=Health.HEALTHY, now_ns=1) for one in machines]

    monkeypatch.setattr(Control, "connect", connect)
    monkeypatch.setattr(queries, "ask_machines", ask)
    return rounds


def test_every_round_adds_a_line_for_each_machine(tmp_path: Path, asked: list[list[str]]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"machine": "m7", "time_ns": 1, "findings": []}\n')

    assert main.run(["machines", "--record", str(path), "--every", "0.1"]) == main.EXIT_INTERRUPTED
    assert [event.machine for event in read_recording(str(path))] == ["m7", *["m0", "m1"] * ROUNDS]
    assert asked == [["m0", "m1"]] * ROUNDS


def test_only_the_named_machines_are_recorded(tmp_path: Path, asked: list[list[str]]) -> None:
    main.run(["machines", "m1", "--record", str(tmp_path / "events.jsonl"), "--every", "0.1"])

    assert asked == [["m1"]] * ROUNDS


@pytest.mark.usefixtures("asked")
def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["machines", "--record", str(tmp_path), "--every", "0.1"]) == main.EXIT_USAGE
    assert f"the recording {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


FOUND = Finding(
    inspection="gpu",
    reason="gpu-hot",
    item="GPU 3",
    text="it is too hot: 95 C",
    remedy="watch",
    evidence=["95 C", "it slows down at 87 C"],
    since_ns=1_000_000_000,
)


def report(machine: str = "m1", **fields: Any) -> MachineReport:
    faulty: dict[str, Any] = {"verdict": Health.FAULTY, "findings": [FOUND], "now_ns": 61_000_000_000}
    return MachineReport(machine=machine, address="127.0.0.1:1", **(faulty | fields))


def healthy(number: int) -> list[MachineReport]:
    return [report(f"h{index}", verdict=Health.HEALTHY, findings=[]) for index in range(number)]


def shown(*parts: Any) -> str:
    out = StringIO()
    console = PlainConsole(file=out, width=160)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_faulty_machines_come_first_with_cause_age_and_remedy() -> None:
    text = shown(
        machines_table([*healthy(2), report("m9", verdict=Health.UNKNOWN, findings=[], problem="away"), report()])
    )
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [
        ("m1", "faulty"),
        ("m9", "unknown"),
        ("h0", "healthy"),
        ("h1", "healthy"),
    ]
    assert "60 s" in text or "1 min" in text or "1m" in text
    assert "GPU 3: it is too hot: 95 C (gpu-hot; owner machine; watch)" in text
    assert "away" in text


def test_machines_out_of_use_are_shown_with_the_reason() -> None:
    place = {"place": "quarantined", "place_by": "incident/gpt/0002", "place_why": "xid-79: GPU 3 is lost"}
    rows = [report(machine="h", findings=[], verdict=Health.HEALTHY, place="active", job="gpt")]
    text = shown(machines_table([*rows, report(machine="q", findings=[], verdict=Health.HEALTHY, **place)]))
    lines = [line.split() for line in text.splitlines()[1:]]
    assert lines[0][:3] == ["q", "quarantined", "healthy"]
    assert "quarantined by incident/gpt/0002: xid-79: GPU 3 is lost" in text
    assert lines[-1] == ["h", "active", "gpt", "healthy"]


def test_a_repeated_finding_shows_when_it_last_occurred() -> None:
    again = FOUND.model_copy(update={"last_ns": 31_000_000_000})
    assert "GPU 3: it is too hot: 95 C, last 30 s ago (gpu-hot;" in shown(machines_table([report(findings=[again])]))


def test_many_healthy_machines_are_counted() -> None:
    text = shown(machines_table([*healthy(HEALTHY_SHOWN + 1), report()]))
    assert f"{HEALTHY_SHOWN + 1} others" in text
    assert "h0" not in text


def test_some_of_many_findings_are_shown_and_the_rest_are_counted() -> None:
    many = [FOUND.model_copy(update={"item": f"GPU {number}"}) for number in range(8)]
    text = shown(machines_table([report(findings=many)]))
    assert "and 3 more: everstep machines m1" in text


def test_one_machine_shows_every_inspection_with_its_evidence() -> None:
    inspections = [
        InspectionReport(
            name="gpu",
            looks_at="GPUs",
            verdict=Health.FAULTY,
            findings=[FOUND],
            measures={"gpu_count": 8.0},
            note="",
            interval_s=10,
            looked_ns=58_000_000_000,
        ),
        InspectionReport(
            name="dcgm",
            looks_at="DCGM",
            verdict=Health.HEALTHY,
            findings=[],
            measures={},
            note="no dcgmi",
            interval_s=30,
            looked_ns=0,
        ),
    ]
    text = shown(machine_table(report(inspections=inspections)), *measure_lines(report(inspections=inspections)))
    for words in ("3 s ago", "not yet", "no dcgmi", "it slows down at 87 C", "gpu_count 8"):
        assert words in text


def test_text_from_a_machine_is_neither_markup_nor_a_terminal_command() -> None:
    nasty = FOUND.model_copy(update={"item": "[red]\x1b[2J"})
    text = shown(machines_table([report(findings=[nasty])]))
    assert "[red]" in text
    assert "\x1b[2J" not in text


def test_a_difference_between_machines_is_one_line() -> None:
    odd = OddMachine(fact="driver", value="550", machines=["m2"], usual="570")
    assert odd_lines([odd]) == ["differs: driver 550 on m2, 570 elsewhere"]
    assert odd_lines([odd.model_copy(update={"usual": ""})]) == ["differs: driver 550 on m2"]
