"""``everstep diagnose``: which machines it tests, with which settings, what it shows, and its exit code."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from agent.client import AgentClients
from agent.fake import FakeAgent, no_findings
from agent.v1 import agent_pb2 as pb
from console.commands.diagnose import _diagnose, settings_of
from console.commands.shared import EXIT_UNKNOWN
from controlplane.client import Control
from everstep.errors import ConfigError
from everstep.model.machine import Machine
from everstep.model.pool import PoolMachine, PoolPlace, PoolState


def odd_bits(request: pb.DiagnoseRequest) -> Any:
    """Answer like a machine whose bits differ from those of ``m0`` and ``m1``."""
    return bits(request, "b")


def bits(request: pb.DiagnoseRequest, digest: str = "a") -> Any:
    replies: Any = no_findings(request)
    for reply in replies:
        if reply.HasField("result") and reply.result.name == "bitwise":
            reply.result.kind = "cpu"
            reply.result.digests["rank 0 gradients"] = digest
            reply.result.measures["write_bytes_per_second"] = 5e9
    return replies


class Machines:
    """A connection to a cluster whose agents give chosen answers."""

    def __init__(self, *answers: Any, active: str = "") -> None:
        self.made = [FakeAgent.empty(f"m{n}", diagnose=answer) for n, answer in enumerate(answers)]
        self.agents = AgentClients()
        self.client, self.task_queue = self, "q"
        self.all_machines: list[Machine] = []
        self._active = active

    def get_workflow_handle(self, _: str) -> Machines:
        return self

    async def query(self, *_: object, **__: object) -> PoolState:
        if not self._active:
            raise RPCError("no pool runs there", RPCStatusCode.NOT_FOUND, b"")
        places = {
            one.name: PoolMachine(
                machine=one,
                place=PoolPlace.ACTIVE if one.name == self._active else PoolPlace.FREE,
                job="gpt" if one.name == self._active else "",
            )
            for one in self.all_machines
        }
        return PoolState(known=True, machines=places)

    async def __aenter__(self) -> Machines:
        for agent in self.made:
            await agent.start()
        self.all_machines = [Machine(name=one.machine, address=one.address) for one in self.made]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        await self.agents.close()
        for agent in self.made:
            await agent.stop()


async def run(monkeypatch: pytest.MonkeyPatch, cluster: Machines, *names: str, **given: Any) -> int:
    async def connect(_: str) -> Machines:
        return cluster

    monkeypatch.setattr(Control, "connect", connect)
    options: dict[str, Any] = {"tests": "", "seconds": None, "changes": [], "cluster": "default", "as_json": False}
    return await _diagnose([*names], **options | given)


async def test_machines_that_are_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Machines(bits, bits, bits)

    assert await run(monkeypatch, cluster) == 0
    said = capsys.readouterr()
    assert "healthy: 3 machines, eud, dcgm, memory" in said.out
    assert "bitwise write_bytes_per_second  3   5.00 GB/s" in said.out
    assert "0 of 3 machines are done" in said.err
    assert len(cluster.made[0].asked("diagnose")[0].tests) == 8, "one request has all tests of a machine"


async def test_a_machine_that_computes_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(monkeypatch, Machines(bits, bits, odd_bits), tests="bitwise") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "m2       faulty   bitwise: other bits than 2 of 3 machines of its kind: rank 0 gradients"
    )

    assert await run(monkeypatch, Machines(bits, bits, odd_bits), tests="bitwise", as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "faulty"
    assert [one["machine"] for one in found["machines"] if one["verdict"] == "faulty"] == ["m2"]
    assert found["machines"][0]["results"][0]["digests"] == {"rank 0 gradients": "a"}


async def test_two_machines_that_differ_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await run(monkeypatch, Machines(bits, odd_bits), tests="bitwise") == EXIT_UNKNOWN


async def test_machines_that_a_job_has_are_left_out_and_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Machines(bits, bits, bits, active="m1")
    assert await run(monkeypatch, cluster, tests="memory") == 0
    assert "these machines are not tested, since jobs have them: m1" in capsys.readouterr().err
    assert [len(agent.asked("diagnose")) for agent in cluster.made] == [1, 0, 1]

    with pytest.raises(ConfigError, match="job gpt has m1"):
        await run(monkeypatch, Machines(bits, bits, active="m1"), "m1", "m0")
    with pytest.raises(ConfigError, match=r"jobs have all machines: m0 \(gpt\)"):
        await run(monkeypatch, Machines(bits, active="m0"))
    with pytest.raises(ConfigError, match="there is no machine m7; there are m0"):
        await run(monkeypatch, Machines(bits), "m7")


def test_settings_of_the_command_line() -> None:
    assert settings_of(["memory", "nic"], 10.0, ["nic.mb=5", "memory.share=0.2"]) == {
        "memory": {"seconds": 10.0, "deadline_s": 80.0, "share": 0.2},
        "nic": {"mb": 5},
    }
    assert settings_of(["eud"], None, ["eud.command=/opt/dcgmi"]) == {"eud": {"command": "/opt/dcgmi"}}
    for wrong in ("disk.mb=5", "memory.mb", "memory=5"):
        with pytest.raises(ConfigError, match=r"write TEST\.NAME=VALUE"):
            settings_of(["memory"], None, [wrong])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tests": "teleport"}, "there is no test"),
        ({"changes": ["memory.gb=1"]}, "the test memory has no setting 'gb'"),
    ],
)
async def test_what_cannot_be_run_is_refused_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    cluster = Machines(bits)
    with pytest.raises(ConfigError, match=said):
        await run(monkeypatch, cluster, **given)
    assert cluster.made[0].asked("diagnose") == []
