"""``everstep trace`` and ``everstep stacks`` show verdict and stacks, now and of an incident, with recorded hangs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from activities.ledger.ledger import Ledger
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from console import main
from console.commands.shared import EXIT_UNKNOWN
from console.commands.trace import _trace, stacks_text
from controlplane.client import Control
from everstep.model.hang import HangResult
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.slow import SlowResult
from tests.activities.agents.recorded_looks import looks, telling_whole, whole_looks

ID = "incident/gpt/0001"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


class Job:
    """A connection to a cluster with a job whose agents return a recorded hang."""

    def __init__(self, name: str) -> None:
        topology, _, self.told = looks(name)
        _, _, whole = whole_looks(name)
        sizes = dict(topology.mesh)
        self.spec = JobSpec(
            name="gpt",
            script="/train.py",
            machines=topology.machines,
            ranks_per_machine=topology.ranks_per_machine,
            tp=sizes["tp"],
            pp=sizes["pp"],
        )
        self.agents = AgentClients()
        self.made = [
            FakeAgent(sample=self._answer(index), stacks=telling_whole(*(one[index] for one in whole)))
            for index in range(topology.machines)
        ]
        self.machines: list[Machine] = []

    def _answer(self, index: int) -> Any:
        left = iter([one[index] for one in self.told])
        return lambda _: next(left)

    async def run_of(self, _: str) -> None:
        """Say that the job runs."""

    async def state(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(spec=self.spec, machines=self.machines)

    async def __aenter__(self) -> Job:
        for agent in self.made:
            await agent.start()
        self.machines = [Machine(name=f"m{n}", address=one.address) for n, one in enumerate(self.made)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        await self.agents.close()
        for agent in self.made:
            await agent.stop()


async def traced(monkeypatch: pytest.MonkeyPatch, job: Job, apart: float = 0.01, **more: Any) -> int:
    async def connect(_: str) -> Job:
        return job

    monkeypatch.setattr(Control, "connect", connect)
    given: dict[str, Any] = {"hung": False, "stacks": False, "as_json": False}
    out = more.pop("out", None)
    return await _trace("gpt", apart, more.pop("ranks", []), out, "default", **(given | more))


async def test_a_job_that_hangs_and_its_stacks(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    assert await traced(monkeypatch, Job("loader"), stacks=True, out=tmp_path / "dumps") == 0
    said = capsys.readouterr()
    assert said.out.startswith("names: rank 2 on m1: 7 ranks wait for it")
    assert "  evict     m1\n" in said.out
    assert "data loader: rank 2 on m1" in said.out
    assert "read_remote_shard" in said.out

    code, out, _ = call(capsys, "analyze", str(tmp_path / "dumps"), "--machines", "4", "--tp", "2", "--pp", "2")
    assert (code, out.partition(":")[0]) == (0, "names"), "the analysis of the written files has the same result"


async def test_one_look_names_nobody(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert await traced(monkeypatch, Job("deadlock"), 0.0) == EXIT_UNKNOWN
    assert "evict     no machine" in capsys.readouterr().out
    assert await traced(monkeypatch, Job("deadlock"), 0.0, hung=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["names"] == ["m4"]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a ledger with the stacks of one incident."""
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    url = f"sqlite:///{tmp_path}/ledger.db"
    _, _, told = whole_looks("loader")
    with Ledger.open(url) as ledger:
        rows = [
            (look, f"m{index}", 1, reply.SerializeToString())
            for look, replies in enumerate(told, 1)
            for index, reply in enumerate(replies)
        ]
        ledger.add_samples(ID, rows)
    return url


def test_stacks_of_an_incident(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "stacks", "gpt/1", "--ledger", url)
    assert code == 0
    assert "4 x trainer: rank 0 on m0" in out
    assert "    all_reduce (torch/distributed/distributed_c10d.py" in out

    of_one = call(capsys, "stacks", "gpt/1", "--rank", "2", "--ledger", url)[1]
    assert "1 x data loader: rank 2 on m1" in of_one
    assert "rank 0 on" not in of_one

    dumps = tmp_path / "dumps"
    assert call(capsys, "stacks", "gpt/1", "--out", str(dumps), "--json", "--ledger", url)[0] == 0
    code, out, _ = call(capsys, "analyze", str(dumps), "--machines", "4", "--tp", "2", "--pp", "2", "--json")
    assert (code, json.loads(out)["ranks"]) == (0, [2])


def test_what_is_not_there_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "stacks", "gpt/2", "--ledger", url)
    assert (code, "its ranks were not sampled" in err) == (1, True)
    assert call(capsys, "stacks", "gpt/1", "--look", "3", "--ledger", url)[0] == 2


def test_a_process_without_stacks_says_why() -> None:
    broken = pb.TracedProcess(rank=3, pid=9, state="D", problem="py-spy did not end within 5.0 s")
    text = stacks_text([pb.StacksReply(machine="m1", processes=[broken])])
    assert text.splitlines() == [
        "Without stacks",
        "  rank 3 on m1, pid 9, state D  py-spy did not end within 5.0 s",
    ]


def test_processes_without_stacks_for_one_reason_share_a_line() -> None:
    denied = [pb.TracedProcess(rank=rank, pid=rank, state="S", problem="py-spy may not read") for rank in range(10)]
    [_, line] = stacks_text([pb.StacksReply(machine="m1", processes=denied)]).splitlines()
    assert line.startswith("  rank 0 on m1, pid 0, state S; rank 1 on m1")
    assert line.endswith("and 2 more  py-spy may not read")


def test_an_example_says_how_many_ranks_are_alike() -> None:
    processes = [pb.TracedProcess(rank=rank, pid=rank, state="S", problem="none") for rank in (3, 4, 5)]
    text = stacks_text([pb.StacksReply(machine="m1", processes=processes, alike={3: 1_199, 4: 2, 5: 1})])
    assert text.splitlines()[1].split("; ") == [
        "  rank 3 on m1, pid 3, state S (1198 more ranks alike)",
        "rank 4 on m1, pid 4, state S (1 more rank alike)",
        "rank 5 on m1, pid 5, state S  none",
    ]


def test_the_report_of_an_incident_has_the_vote(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    anomaly = Anomaly(id="slow-gpt-1", generation=1, symptom=Symptom.SLOW, headline="steps take 0.2 s", seen_ns=1)
    rounds = [f"round {number}, 10 samples: m2 has the flag, slow ranks: 4, 5" for number in range(1, 6)]
    vote = SlowResult(
        generation=1,
        conclusion="suspect",
        reason="m2 has most slow ranks in 5 of 5 rounds, and nothing else says that it is slow",
        suspects=["m2"],
        flags=5,
        rounds=5,
        evidence=rounds,
    )
    report = IncidentReport(
        headline="Observed, the job continues: steps take 0.2 s",
        resolution="observed",
        cause="slow",
        step=-1,
        lost_steps=0,
        evicted=[],
        stages=[],
        generation=1,
        recovered=True,
        seconds=None,
        failures=[],
        slow=vote,
    )
    with Ledger.open(url) as ledger:
        ledger.incident_opened(ID, anomaly, opened_ns=2)
        ledger.incident_closed(ID, report, closed_ns=3)

    code, out, _ = call(capsys, "incident", "gpt/1", "--ledger", url)

    assert code == 0
    block = out.partition("The vote for the slow machine\n")[2].splitlines()
    said = ["suspect: m2 has most slow ranks in 5 of 5 rounds, and nothing else says that it is slow"]
    assert [line.strip() for line in block[:7]] == [*said, "m2: 5 of 5 flags", *rounds]


def test_the_report_of_an_incident_has_the_picture(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    anomaly = Anomaly(id="hang-gpt-1", generation=1, symptom=Symptom.HANG, headline="no step for 3 s", seen_ns=1)
    hang = HangResult(
        generation=1,
        conclusion="names",
        method="wait-for graph",
        reason="rank 2 on m1: 7 ranks wait for it",
        evidence=["all_reduce 97 of group 2: missing: rank 2"],
        picture="dp 0\n  A [B]",
        silent=["m3"],
        looks=2,
        seconds=0.62,
    )
    report = IncidentReport(
        headline="Recovered in 4.2 s by eviction of m1",
        resolution="eviction",
        cause="hang",
        step=20,
        lost_steps=1,
        evicted=["m1"],
        stages=[],
        generation=2,
        recovered=True,
        seconds=4.2,
        failures=[],
        hang=hang,
    )
    with Ledger.open(url) as ledger:
        ledger.incident_opened(ID, anomaly, opened_ns=2)
        ledger.incident_closed(ID, report, closed_ns=3)

    code, out, _ = call(capsys, "incident", "gpt/1", "--ledger", url)

    assert code == 0
    block = out.partition("What the ranks did\n")[2].splitlines()
    assert [line.strip() for line in block[:6]] == [
        "names: rank 2 on m1: 7 ranks wait for it",
        "by wait-for graph, 2 samples in 0.62 s",
        "no sample of the ranks on m3",
        "all_reduce 97 of group 2: missing: rank 2",
        "dp 0",
        "A [B]",
    ]
