"""``everstep machines --record``: what is asked again and again lies in a file, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from console import main
from controlplane.client import Control
from controlplane.queries import machines as queries
from controlplane.queries.machines import MachineReport
from controlplane.recording import read_recording
from everstep.model.finding import Health
from everstep.model.machine import Machine

ROUNDS = 3


class TwoMachines:
    """Stands for the control plane of a cluster of two."""

    all_machines: tuple[Machine, ...] = (Machine(name="m0", address="h:1"), Machine(name="m1", address="h:2"))
    agents = None
    task_queue = "q"

    @property
    def client(self) -> TwoMachines:
        return self

    def get_workflow_handle(self, _: str) -> TwoMachines:
        return self

    async def query(self, *_: object, **__: object) -> None:
        raise RPCError("no pool runs there", RPCStatusCode.NOT_FOUND, b"")

    async def __aenter__(self) -> TwoMachines:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which machines were asked, round by round; after some rounds the user presses Ctrl-C."""
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


def test_every_round_adds_a_line_of_each_machine(tmp_path: Path, asked: list[list[str]]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"machine": "m7", "time_ns": 1, "findings": []}\n')

    assert main.run(["machines", "--record", str(path), "--every", "0.1"]) == main.EXIT_INTERRUPTED
    assert [event.machine for event in read_recording(str(path))] == ["m7", *["m0", "m1"] * ROUNDS]
    assert asked == [["m0", "m1"]] * ROUNDS


def test_only_the_machines_that_are_named(tmp_path: Path, asked: list[list[str]]) -> None:
    main.run(["machines", "m1", "--record", str(tmp_path / "events.jsonl"), "--every", "0.1"])

    assert asked == [["m1"]] * ROUNDS


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["machines", "--record", str(tmp_path), "--every", "0.1"]) == main.EXIT_USAGE
    assert f"the recording {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err
