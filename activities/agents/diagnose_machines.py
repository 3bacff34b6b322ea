"""Diagnose machines: run diagnostic tests on all machines at once, then on pairs of machines, round by round.

Incidents and the command ``everstep diagnose`` use this activity. It may run twice with the same id: the agents then
answer with the results that they already have.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, request_id
from activities.turns import gathered
from everstep.base.backoff import Backoff
from everstep.base.text import listed
from everstep.decisions.blame.diagnose.diagnosis import Shares, judge, passed
from everstep.decisions.blame.diagnose.pairs import next_round, shifted_rounds
from everstep.errors import AgentUnreachable, EverstepError
from everstep.model.diagnosis import BETWEEN_MACHINES, Diagnosis, DiagnosticResult, PairResult
from everstep.model.finding import Health
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClients
    from agent.v1 import agent_pb2 as pb

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
"""The first and the longest wait before a silent agent is called again, seconds."""
GRACE_S = 120.0
"""The time that an agent's answer may take in addition to its tests, e.g. to import torch; seconds."""
UNABLE = "test-unable"
"""The reason code of a test that could not run (``agent.diagnoser.diagnostic``)."""
PARTS = 3
"""A diagnosis has at most this many parts, and each may take ``limit_s``: the tests of single machines, and two tests
of pairs."""


class DiagnoseMachines(Activity[Diagnosis]):
    """Run diagnostic tests on idle machines, or on machines whose ranks are stopped.

    The result has the findings of each machine, without the details of healthy machines.
    """

    name = "Diagnose machines"

    machines: list[Machine]
    tests: list[str]
    """The names of the tests (``everstep.model.diagnosis.Diagnostic``), in order; tests between machines run last."""
    job: str = ""
    """The name of the job that is stopped on the machines; empty: no job runs there."""
    run: str = ""
    """The id of the job's run; see ``everstep.model.run_id``."""
    settings: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    """Test → its settings that differ from the defaults (docs/concepts/diagnostic-tests.md)."""
    limit_s: float = 600.0
    """The time limit of all tests of one machine together, and of each test between two machines, seconds. A test that
    has not begun by then has an unknown result."""
    patience_s: float = 30.0
    """Silent agents are asked again for this long, seconds."""
    slow_share: float = 0.2
    """A bandwidth below this share of the other machines' median is a fault
    (``everstep.decisions.blame.diagnose.diagnosis``)."""
    low_share: float = 0.5
    """A bandwidth below this share of the median, but above ``slow_share``, is an unknown result."""

    @classmethod
    def of(cls, job: PlacedJob, tests: Sequence[str]) -> DiagnoseMachines:
        """Return the activity that tests the machines of a stopped job, with the settings of the job's policy."""
        policy = job.spec.policy
        return cls(
            machines=job.machines,
            tests=list(tests),
            job=job.spec.name,
            run=job.run,
            settings=policy.diagnose.settings,
            limit_s=policy.diagnose.timeout_s,
            patience_s=policy.silence.evict_s,
            slow_share=policy.diagnose.slow_share,
        )

    def line(self) -> str:
        return f"{listed(self.tests, 4)} on {len(self.machines)} machines"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.limit_s * PARTS))

    async def perform(self, tools: Tools, say: Say) -> Diagnosis:
        found = await Diagnosing(tools.agents, self, request_id(), say).run()
        return await asyncio.to_thread(found.short)


@dataclass
class Asked:
    """The progress of one machine's tests."""

    machine: Machine
    results: list[DiagnosticResult] = field(default_factory=list)
    problem: str = ""
    """The reason why results are missing; empty: all arrived."""


class Diagnosing:
    """A diagnosis of several machines.

    Args:
        agents: Clients by address.
        request: The tests and the machines.
        id: The id of the diagnosis: an agent that knows the id continues the same diagnosis. Empty: an agent ends the
            diagnosis when its caller disconnects.
        say: Shows the progress.
    """

    def __init__(self, agents: AgentClients, request: DiagnoseMachines, id: str, say: Say) -> None:
        self._agents = agents
        self._request = request
        self._id = id
        self._secret = id or uuid.uuid4().hex
        self._say = say
        self._over = 0
        self._running: dict[str, str] = {}
        self._counts = Counter[str]()
        self._slots = {machine.name: machine for machine in request.machines}

    async def run(self) -> Diagnosis:
        """Run the diagnosis."""
        began, request = time.monotonic(), self._request
        alone = [test for test in request.tests if test not in BETWEEN_MACHINES]
        between = [test for test in request.tests if test in BETWEEN_MACHINES]
        asked = await gathered(self._of_one(machine, alone) for machine in request.machines) if alone else []
        silent = {one.machine.name: one.problem for one in asked if one.problem}
        pairs: list[PairResult] = []
        left = [name for name in self._slots if name not in silent]
        for test in between:
            pairs += await self._rounds(test, left)
        results = {name: list[DiagnosticResult]() for name in self._slots}
        results |= {one.machine.name: one.results for one in asked}
        shares = Shares(request.slow_share, request.low_share)
        found = await asyncio.to_thread(judge, results, pairs, silent, shares)
        return found.model_copy(update={"tests": list(request.tests), "seconds": time.monotonic() - began})

    async def _of_one(self, machine: Machine, tests: Sequence[str]) -> Asked:
        """Run all tests of one machine; ``problem`` of the result says why results are missing."""
        from agent.diagnoser.result_messages import result_of

        found = Asked(machine)
        request = self._message(tests)

        async def listen() -> None:
            found.results.clear()
            async with aclosing(self._agents.get(machine.address).diagnose(request)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    if reply.HasField("begun"):
                        self._show(machine.name, reply.begun.name)
                    elif reply.HasField("result"):
                        found.results.append(result_of(reply.result))

        found.problem = await self._persisted(listen)
        self._over += 1
        self._show(machine.name, "")
        return found

    async def _rounds(self, test: str, machines: Sequence[str]) -> list[PairResult]:
        """Run a test between machines round by round, until the faulty machine is known, or more rounds do not help."""
        found: list[PairResult] = []
        shares, rounds = Shares(self._request.slow_share), 0
        shifted = len(shifted_rounds(machines))
        while pairs := next_round(machines, passed(found, test, shares), max(0, rounds - shifted)):
            rounds += 1
            self._say(f"{test}, round {rounds}: {len(pairs)} pairs of machines")
            found += await gathered(self._of_pair(test, first, second, rounds) for first, second in pairs)
        return found

    async def _of_pair(self, test: str, first: str, second: str, number: int) -> PairResult:
        """Run a test of one pair: the first machine listens, and the second machine gets its address."""
        from agent.diagnoser.result_messages import result_of
        from agent.v1 import agent_pb2 as pb

        began = time.monotonic()
        where: asyncio.Future[pb.TestWaits] = asyncio.get_running_loop().create_future()
        part = f"/{test}/{number}/{first}/{second}"
        secret = hashlib.sha256(f"{self._secret}{part}".encode()).hexdigest()
        answers: dict[str, DiagnosticResult] = {}

        async def listen(name: str, peer: pb.TestPeer) -> None:
            request = self._message([test], part, peer)
            client = self._agents.get(self._slots[name].address)
            async with aclosing(client.diagnose(request)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    if reply.HasField("waits") and not where.done():
                        where.set_result(reply.waits)
                    elif reply.HasField("result"):
                        answers[name] = result_of(reply.result)

        async def wait() -> str:
            problem = await self._persisted(lambda: listen(first, pb.TestPeer(position=0, secret=secret)))
            where.cancel()
            return problem

        async def go() -> str:
            try:
                waits = await where
            except asyncio.CancelledError:
                return f"{first} did not begin"
            peer = pb.TestPeer(position=1, secret=secret, host=waits.host, port=waits.port)
            return await self._persisted(lambda: listen(second, peer))

        problems = [problem for problem in await asyncio.gather(wait(), go()) if problem]
        return _pair_result(test, (first, second), answers, problems, time.monotonic() - began)

    async def _persisted(self, listen: Callable[[], Any]) -> str:
        """Read all answers of an agent, and reconnect for a while if necessary; returns why that failed, or an empty
        text."""
        limits = self._request
        backoff, deadline = Backoff(FIRST_RETRY_S, LAST_RETRY_S), time.monotonic() + limits.patience_s
        try:
            async with asyncio.timeout(limits.limit_s + GRACE_S):
                while True:
                    try:
                        await listen()
                    except AgentUnreachable as error:
                        left_s = deadline - time.monotonic()
                        if left_s <= 0:
                            return str(error)
                        await asyncio.sleep(min(backoff.next_s(), left_s))
                    else:
                        return ""
        except TimeoutError:
            return f"its agent did not report the end of its tests within {limits.limit_s + GRACE_S:g} s"
        except EverstepError as error:
            return str(error)

    def _message(self, tests: Sequence[str], part: str = "", peer: pb.TestPeer | None = None) -> pb.DiagnoseRequest:
        from agent.v1 import agent_pb2 as pb

        settings: Mapping[str, Mapping[str, Any]] = self._request.settings
        asked = [pb.TestToRun(name=test, settings=json.dumps(settings.get(test, {}))) for test in tests]
        return pb.DiagnoseRequest(
            request_id=self._id and self._id + part,
            job=self._request.job,
            run=self._request.run,
            tests=asked,
            limit_s=self._request.limit_s,
            peer=peer,
        )

    def _show(self, machine: str, test: str) -> None:
        if before := self._running.pop(machine, ""):
            self._counts[before] -= 1
        if test:
            self._running[machine] = test
            self._counts[test] += 1
        now = ", ".join(f"{name} on {count}" for name, count in self._counts.items() if count)
        self._say(f"{self._over} of {len(self._slots)} machines are done{f'; {now}' if now else ''}")


def _pair_result(
    test: str,
    machines: tuple[str, str],
    answers: Mapping[str, DiagnosticResult],
    problems: Sequence[str],
    seconds: float,
) -> PairResult:
    findings = [(name, finding) for name, answer in answers.items() for finding in answer.findings]
    text = "; ".join([*(f"{name}: {finding.text}" for name, finding in findings), *problems])
    unable = bool(problems) or any(finding.reason == UNABLE for _, finding in findings) or len(answers) < len(machines)
    measures: dict[str, float] = {}
    if not findings and not unable:
        names = set.intersection(*(set(answer.measures) for answer in answers.values()))
        both = {name: min(answer.measures[name] for answer in answers.values()) for name in sorted(names)}
        measures = {name: value for name, value in both.items() if name.endswith("_per_second")}
    healthy = all(answer.verdict is Health.HEALTHY for answer in answers.values())
    return PairResult(
        test=test,
        machines=machines,
        passed=None if unable else healthy,
        text=text[:500],
        measures=measures,
        kind=" and ".join(sorted({answer.kind for answer in answers.values()})),
        seconds=seconds,
    )
