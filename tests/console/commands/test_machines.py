"""``everstep machines --clear``: what is cleared, and what is shown then."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from console.commands.machines import _clear
from controlplane.client import Control
from everstep.errors import ConfigError
from everstep.model.machine import Machine


class OneMachine:
    """A connection to a cluster of one machine, on which a GPU fell off the bus until somebody clears that."""

    def __init__(self) -> None:
        self.agent = FakeAgent("m0", clear=self._clear, inspect=self._inspect)
        self.agents = AgentClients()
        self.client, self.task_queue = self, "q"
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

    def get_workflow_handle(self, _: str) -> OneMachine:
        return self

    async def query(self, *_: object, **__: object) -> None:
        raise RPCError("no pool runs there", RPCStatusCode.NOT_FOUND, b"")

    async def __aenter__(self) -> OneMachine:
        await self.agent.__aenter__()
        self.all_machines = [Machine(name="m0", address=self.agent.address)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        await self.agents.close()
        await self.agent.__aexit__(kind, error, trace)


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(_: str) -> OneMachine:
        return OneMachine()

    monkeypatch.setattr(Control, "connect", connect)


async def test_what_is_shown_is_the_state_after_the_clearing(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _clear(["m0"], "default", "xid-79", as_json=False) == 0
    said = capsys.readouterr().out
    assert said.startswith("m0: 1 cleared\nm0  127.0.0.1:")
    assert "healthy" in said
    assert "it fell off" not in said


async def test_the_state_after_it_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _clear(["m0"], "default", "xid-79", as_json=True) == 0
    [machine] = json.loads(capsys.readouterr().out)
    assert (machine["machine"], machine["verdict"]) == ("m0", "healthy")


async def test_what_is_not_there_is_not_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _clear(["m0"], "default", "xid-80", as_json=False) == 1
    said = capsys.readouterr().out
    assert "m0: nothing has reason code xid-80 there" in said
    assert "it fell off" in said


async def test_machines_have_to_be_named() -> None:
    with pytest.raises(ConfigError, match="name the machines"):
        await _clear([], "default", "xid-79", as_json=False)
    with pytest.raises(ConfigError, match="there is no machine m9"):
        await _clear(["m9"], "default", "xid-79", as_json=False)
