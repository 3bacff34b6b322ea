"""This module runs diagnoses of this machine, one at a time, and ends a diagnosis when a job needs the machine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agent.diagnoser.all import kind_named, limits_named
from agent.diagnoser.diagnostic import HANGS, UNABLE
from agent.diagnoser.gpu.clocks import are_kept, set_back
from agent.diagnoser.kind import hardware
from agent.diagnoser.process import DiagnosisProcess, DiagnosticRequest
from agent.diagnoser.result_messages import result_message
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, ConfigError
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Finding

KEPT = 16
"""Number of diagnoses whose results are kept, so that a repeated request gets them again."""
ABANDONED_S = 15.0
"""A diagnosis that no client follows for this long is ended, seconds, because its worker has probably died."""
WARM_S = 60.0
"""How long the process with torch is kept after a test, seconds, because further tests may follow soon."""

logger = structlog.get_logger()


@dataclass(eq=False)
class DiagnosisRun:
    """A diagnosis and its replies."""

    request: pb.DiagnoseRequest
    replies: list[pb.DiagnoseReply] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    problem: str = ""
    """Why the diagnosis was ended early; empty: it was not ended early."""
    followers: int = 0
    abandoned: asyncio.TimerHandle | None = None

    def add(self, reply: pb.DiagnoseReply) -> None:
        """Add a reply and wake the followers."""
        self.replies.append(reply)
        self.wake()

    def wake(self) -> None:
        """Wake the followers."""
        self.news.set()
        self.news = asyncio.Event()


class Diagnoser:
    """Runs tests on one machine.

    Args:
        machine: Name of the machine.
        host: Address on which the agent listens.
        folder: Folder on the disk that is tested.
        sockets: Environment variables for gloo and NCCL that name the network interface.
    """

    def __init__(self, machine: str, host: str, folder: Path, sockets: Mapping[str, str]) -> None:
        self._bench = {"machine": machine, "host": host, "folder": str(folder), "environment": dict(sockets)}
        self._folder = folder
        self._process = DiagnosisProcess()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagnosis")
        self._runs: OrderedDict[str, DiagnosisRun] = OrderedDict()
        self._running: DiagnosisRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._cooling: asyncio.TimerHandle | None = None
        if are_kept(folder):  # an earlier agent was killed during a test
            self._thread.submit(self._set_back, Diagnostic.EUD)

    @property
    def running(self) -> bool:
        """Whether tests are running."""
        return self._running is not None

    def start(self, request: pb.DiagnoseRequest) -> DiagnosisRun:
        """Start a diagnosis, or return the diagnosis with the request's id.

        Raises:
            ConfigError: there is no such test, or a setting is wrong.
            AgentError: another diagnosis is running.
        """
        check_tests(request)
        if request.request_id and (known := self._runs.get(request.request_id)):
            return known
        if self._running is not None:
            running = self._running.request.request_id or "without an id"
            raise AgentError(f"another diagnosis is running on this machine (request {running}): one at a time")
        run = self._running = DiagnosisRun(request)
        if request.request_id:
            self._runs[request.request_id] = run
            while len(self._runs) > KEPT:
                self._runs.popitem(last=False)
        if self._cooling:
            self._cooling.cancel()
        self._task = asyncio.create_task(self._carry_out(run))
        return run

    async def follow(self, run: DiagnosisRun) -> AsyncIterator[pb.DiagnoseReply]:
        """Stream all replies of a diagnosis, to its end.

        Raises:
            AgentError: the diagnosis was ended early.
        """
        sent = 0
        run.followers += 1
        if run.abandoned:
            run.abandoned.cancel()
        try:
            while True:
                news = run.news
                while sent < len(run.replies):
                    sent += 1
                    yield run.replies[sent - 1]
                if run.problem:
                    raise AgentError(f"the diagnosis was ended: {run.problem}")
                if run.over:
                    return
                await news.wait()
        finally:
            run.followers -= 1
            if not run.followers and not run.over:
                patience_s = ABANDONED_S if run.request.request_id else 0.0
                run.abandoned = asyncio.get_running_loop().call_later(patience_s, self._abandon, run)

    async def end(self, why: str) -> None:
        """End the running diagnosis, and wait until its processes are gone."""
        if self._cooling:
            self._cooling.cancel()
        run, task = self._running, self._task
        if run is not None:
            run.problem = why
            # The diagnosis is not finished, so a repeated request must run it again.
            self._runs.pop(run.request.request_id, None)
            logger.info("a diagnosis is ended", reason=why, request=run.request.request_id)
        if run is None and not self._process.pid:
            return
        while True:  # a test may be about to start
            await asyncio.to_thread(self._process.end)
            if task is None or task.done():
                return
            await asyncio.wait([task], timeout=0.1)

    def close(self) -> None:
        """End everything when the agent ends."""
        if self._running is not None:
            self._running.problem = "the agent ends"
        self._process.end()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _abandon(self, run: DiagnosisRun) -> None:
        if run is self._running and not run.followers:
            asyncio.ensure_future(self.end("no client follows it"))

    async def _carry_out(self, run: DiagnosisRun) -> None:
        began = time.monotonic()
        try:
            for number, test in enumerate(run.request.tests, 1):
                if run.problem:
                    return
                result = await self._tested(run, test, number, began)
                if run.problem:
                    return
                run.add(pb.DiagnoseReply(result=result_message(result)))
            run.add(pb.DiagnoseReply(over=pb.DiagnosisOver(seconds=time.monotonic() - began)))
        finally:
            run.over, self._running = True, None
            run.wake()
            if not run.problem:
                self._cooling = asyncio.get_running_loop().call_later(WARM_S, self._cool)

    async def _tested(self, run: DiagnosisRun, test: pb.TestToRun, number: int, began: float) -> DiagnosticResult:
        loop, request = asyncio.get_running_loop(), run.request
        limits = limits_named(test.name, test.settings)
        left_s = request.limit_s - (time.monotonic() - began) if request.limit_s else limits.deadline_s
        if left_s <= 0:
            text = f"{UNABLE.means}: the {request.limit_s:g} s for all tests are over"
            return DiagnosticResult(test=test.name, findings=[UNABLE.finding(test.name, text=text)])
        within_s = min(limits.deadline_s, left_s)
        # The test gets its deadline, so that it can restore the settings that it changed before it is killed.
        settings = limits.model_copy(update={"deadline_s": within_s}).model_dump_json()
        begun = pb.TestBegun(name=test.name, number=number, of=len(request.tests), deadline_s=within_s)
        run.add(pb.DiagnoseReply(begun=begun))
        peer = None
        if request.HasField("peer"):
            other = request.peer
            peer = {"position": other.position, "secret": other.secret, "host": other.host, "port": other.port}
        to_run = DiagnosticRequest(test.name, settings, {**self._bench, "peer": peer}, within_s)

        def waits_at(port: int) -> None:
            waits = pb.TestWaits(name=test.name, host=str(self._bench["host"]), port=port)
            loop.call_soon_threadsafe(run.add, pb.DiagnoseReply(waits=waits))

        result = await loop.run_in_executor(self._thread, self._run, to_run, waits_at)
        if left_s >= limits.deadline_s:
            return result
        text = f"{UNABLE.means}: it had only {within_s:.1f} s of the {request.limit_s:g} s for all tests"
        unable = UNABLE.finding(test.name, text=text)
        findings = [unable if finding.reason == HANGS.code else finding for finding in result.findings]
        return result.model_copy(update={"findings": findings})

    def _run(self, request: DiagnosticRequest, waits_at: Callable[[int], None]) -> DiagnosticResult:
        """Run a test, and restore clocks that a killed test did not restore."""
        result = self._process.run(request, waits_at)
        findings = [*result.findings, *self._set_back(request.test)]
        return result.model_copy(update={"findings": findings, "kind": result.kind or (hardware() if findings else "")})

    def _set_back(self, test: str) -> list[Finding]:
        """Restore the clocks of GPUs after all processes that could change them have ended."""
        if not are_kept(self._folder):
            return []
        self._process.end()
        logger.info("the clocks of GPUs are restored after a test that was killed", test=test)
        return set_back(self._folder, test)

    def _cool(self) -> None:
        """End the process that waits for the next test."""
        if self._running is None:
            with contextlib.suppress(RuntimeError):  # the agent ends
                self._thread.submit(self._process.close)


def check_tests(request: pb.DiagnoseRequest) -> None:
    """Check that all tests of a request can be run.

    Raises:
        ConfigError: there is no such test, a setting is wrong, or a test between two machines has no second machine.
    """
    for test in request.tests:
        limits_named(test.name, test.settings)
        if kind_named(test.name).is_between() and not request.HasField("peer"):
            raise ConfigError(f"the test {test.name} needs two machines, but the request names no second one")
