"""This module has a fake node agent: it serves the real gRPC service with prepared answers, and starts no processes.

It is for tests and benchmarks of programs that call agents. It uses the code of the real agent, so a caller can rely on
the same statuses of errors, repeated request ids, numbered observations and health checks
(``tests/agent/test_contract.py`` runs the same checks on both agents).

::

    async with FakeAgent(describe=pb.DescribeReply(machine="m0"), stop=AgentError("no"), align_ranks=NEVER) as agent:
        await AgentClient(agent.address).describe()
        assert agent.asked("describe") == [pb.DescribeRequest()]

Answers have the names of the methods of ``agent.client.AgentClient``. An answer is one of:

- a message;
- an error of ``everstep.errors``, which the caller gets as from a real agent; with ``AgentUnreachable`` the call fails
  as if there were no agent;
- ``NEVER``: the call waits until it is cancelled, the agent stops, or the method gets another answer;
- for a stream: a list of messages, errors and ``NEVER``, which are used in order; the stream ends after the last one;
- a function, which may be async: it gets the request and returns one of the answers above, or an async iterator for a
  stream.

A method without an answer is refused as ``UNIMPLEMENTED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

import everstep
from agent.diagnoser.diagnoser import check_tests
from agent.reporting.observations import ObservationLog
from agent.server.endpoint import add_health, listening
from agent.server.idempotency import RequestMemory
from agent.server.job_registry import Context, check_job
from agent.state.live import LiveLines
from agent.statuses import NO_ANSWER, status_of
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.errors import AgentUnreachable, CodeMissing, ConfigError, EverstepError, UnknownJob
from everstep.model.finding import Health

CALLS_KEPT = 10_000
"""The number of calls that are recorded; the oldest are forgotten first."""
PROGRESS_S = 1.0
"""Interval in which an empty agent reports that nothing runs, as a real agent does, seconds."""


class Silence(Enum):
    """The type of ``NEVER``, an answer that is never sent."""

    NEVER = "never"


NEVER = Silence.NEVER
"""A call with this answer gets no answer."""

Answer = Message | Exception | Silence | Iterable[Message | Exception | Silence] | Callable[[Any], Any]
METHODS = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower(): method
    for method in pb.DESCRIPTOR.services_by_name["Agent"].methods
}
"""The agent's methods by the names that they have in ``AgentClient``."""


@dataclass(slots=True, eq=False)
class AgentCall:
    """One call that a fake agent got."""

    method: str
    request: Any
    open: bool = True
    """The call is not answered yet, or is a stream that its caller still reads."""


class LinesUnread(LiveLines):
    """Lines that are not kept, because no later agent will read them."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))

    def read(self) -> list[bytes]:
        """Return no lines."""
        return []

    def append(self, line: bytes) -> bool:
        """Drop a line."""
        return True

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Drop all lines."""


class FakeAgent:
    """An agent with prepared answers; an async context manager that serves on loopback.

    Args:
        machine: The name of its machine.
        answers: Name of a method of ``AgentClient`` → its answer, see the docstring of this module.

    Raises:
        ValueError: a name is not a method of an agent.
    """

    def __init__(self, machine: str = "m0", /, **answers: Answer) -> None:
        self.machine = machine
        self.address = ""
        """``host:port``, once it serves; it stays the same when the agent stops and starts again."""
        self.calls: deque[AgentCall] = deque(maxlen=CALLS_KEPT)
        """The calls that it received, the oldest first."""
        self.log = ObservationLog(LinesUnread(), machine)
        """The observations that :meth:`observe` sends and :meth:`acknowledge` drops."""
        self.active: Sequence[pb.Finding] = ()
        """The active findings that :meth:`observe` sends."""
        self._memory = RequestMemory(LinesUnread())
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self._answers: dict[str, Answer] = {}
        self.answer(**answers)

    @classmethod
    def empty(cls, machine: str = "m0", /, **answers: Answer) -> FakeAgent:
        """Return an agent on a machine without jobs, where no job can be started.

        Prepare has no answer, because after a Prepare the agent would have to know the job.

        Args:
            machine: The name of its machine.
            answers: Answers that replace the default answers of this agent.

        Raises:
            ValueError: a name is not a method of an agent.
        """
        began, agent = time.time_ns(), cls(machine)
        of_no_job = partial(_no_job, machine)
        agent.answer(
            describe=lambda _: pb.DescribeReply(
                machine=machine,
                version=everstep.__version__,
                started_ns=began,
                pid=os.getpid(),
                room=pb.Room(shm_free=1 << 40, memory_available=1 << 40, disk_free=1 << 40),
                time_ns=time.time_ns(),
            ),
            stop=lambda request: _named(request, pb.StopReply(unknown=True, now_ns=time.time_ns())),
            release=lambda request: _named(request, pb.ReleaseReply()),
            checkpoints=lambda request: _named(request, pb.CheckpointsReply()),
            check_storage=lambda request: _named(request, pb.CheckStorageReply()),
            **dict.fromkeys(("start_store", "launch", "restore", "open_exchange"), lambda r: _named(r, of_no_job(r))),
            **dict.fromkeys(
                ("persist", "align_backups", "pace_saves", "align_ranks", "steps", "read_log", "sample", "stacks"),
                of_no_job,
            ),
            has_code=pb.HasCodeReply(),
            put_code=ConfigError("a fake agent keeps no code"),
            try_code=lambda request: _named(
                request, CodeMissing(f"{machine} does not have the code {request.program.code}")
            ),
            clear=lambda _: pb.ClearReply(),
            inspect=lambda _: pb.InspectReply(machine=machine, time_ns=time.time_ns(), verdict=Health.HEALTHY),
            observe=agent.observe,
            acknowledge=agent.acknowledge,
            diagnose=no_findings,
            progress=_nothing_runs,
        )
        agent.answer(**answers)
        return agent

    def answer(self, **answers: Answer) -> None:
        """Set answers; calls that wait because their answer was ``NEVER`` get the new answer.

        Raises:
            ValueError: a name is not a method of an agent.
        """
        if unknown := answers.keys() - METHODS.keys():
            raise ValueError(f"{min(unknown)} is no method of an agent; there are {', '.join(METHODS)}")
        self._answers |= answers
        self._wake()

    def asked(self, method: str) -> list[Any]:
        """Return all requests of a method, the oldest first, including those with a repeated id."""
        return [call.request for call in self._of(method)]

    def open(self, method: str) -> int:
        """Return the number of calls of a method that are not answered yet, or are streams that are still read."""
        return sum(call.open for call in self._of(method))

    def publish(self, *, job: str = "", generation: int = 0, **what: Any) -> pb.Observation:
        """Number an observation and send it to all observers; ``what`` sets the field of its kind."""
        return self.log.append(job=job, generation=generation, **what)

    def observe(self, request: pb.ObserveRequest) -> AsyncIterator[pb.Observation]:
        """Answer Observe as a real agent does: yield the observations that are not acknowledged, and then new ones."""
        return self.log.follow(
            request.after_sequence, request.job, lambda: self.active if request.active_findings else ()
        )

    def acknowledge(self, request: pb.AcknowledgeRequest) -> pb.AcknowledgeReply:
        """Answer Acknowledge as a real agent does: drop the acknowledged observations."""
        self.log.acknowledge(request.up_to_sequence, request.job)
        return pb.AcknowledgeReply()

    async def start(self, address: str = "") -> None:
        """Start to serve.

        Args:
            address: ``host:port``; port 0 is any free port. The default is its earlier address, or a loopback address.

        Raises:
            ConfigError: the port is in use, or this machine does not have the address.
        """
        address = address or self.address or "127.0.0.1:0"
        server, found = listening(address)
        methods = {method.name: partial(self._way(method), name) for name, method in METHODS.items()}
        agent_pb2_grpc.add_AgentServicer_to_server(
            cast(agent_pb2_grpc.AgentServicer, SimpleNamespace(**methods)), server
        )
        await add_health(server)
        await server.start()
        self._server, self.address = server, str(found)

    async def stop(self) -> None:
        """Stop like a killed agent: open calls fail. The agent keeps its state and can start again."""
        server, self._server = self._server, None
        self._wake()
        if server:
            await server.stop(None)

    async def __aenter__(self) -> FakeAgent:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _of(self, method: str) -> list[AgentCall]:
        if method not in METHODS:
            raise ValueError(f"{method} is no method of an agent; there are {', '.join(METHODS)}")
        return [call for call in self.calls if call.method == method]

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _way(self, method: MethodDescriptor) -> Callable[..., Any]:
        if method.client_streaming:
            return self._take
        return self._stream if method.server_streaming else self._reply

    async def _reply(self, name: str, request: Any, context: Context) -> Message:
        """Answer a method whose reply is not a stream."""
        with self._recorded(name, request):
            try:
                if not hasattr(request, "request_id"):
                    return cast(Message, await self._outcome(name, request))
                reply_type: type[Message] = getattr(pb, METHODS[name].output_type.name)
                return await self._memory.once(name, request, reply_type, partial(self._carried_out, name, request))
            except (EverstepError, OSError, NotImplementedError) as error:
                await context.abort(_status(error), str(error))
                raise

    async def _take(self, name: str, requests: AsyncIterator[Any], context: Context) -> Message:
        """Answer a method whose request is a stream; the list of all its messages is recorded as the request."""
        return await self._reply(name, [request async for request in requests], context)

    async def _carried_out(self, name: str, request: Any) -> Message:
        """Return the answer to a command. After a Release, a later job of the same name may repeat request ids."""
        if name == "release":
            self._memory.forget(request.job)
        return cast(Message, await self._outcome(name, request))

    async def _stream(self, name: str, request: Any, context: Context) -> None:
        """Answer a method whose reply is a stream. It is no generator, so that the answer's iterator is closed too."""
        with self._recorded(name, request):
            try:
                await _send(await self._outcome(name, request), context)
            except (EverstepError, OSError, NotImplementedError) as error:
                await context.abort(_status(error), str(error))

    @contextlib.contextmanager
    def _recorded(self, name: str, request: Any) -> Iterator[None]:
        call = AgentCall(name, request)
        self.calls.append(call)
        try:
            yield
        finally:
            call.open = False

    async def _outcome(self, name: str, request: Any) -> Any:
        """Return the answer of a method; waits while the answer is ``NEVER``."""
        while True:
            changed = self._changed
            if name not in self._answers:
                raise NotImplementedError(f"this fake agent has no answer to {METHODS[name].name}")
            answer: Any = self._answers[name]
            answer = answer(request) if callable(answer) else answer
            if inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Exception):
                raise answer
            if answer is not NEVER:
                return answer
            await changed.wait()
            if self._server is None:
                raise AgentUnreachable("the agent was stopped")


async def _send(answer: Any, context: Context) -> None:
    """Send the messages of a stream's answer."""
    if hasattr(answer, "__aiter__"):
        try:
            async for message in answer:
                await context.write(message)
        finally:
            if hasattr(answer, "aclose"):
                await answer.aclose()
        return
    for message in [answer] if isinstance(answer, Message) else answer:
        if isinstance(message, Exception):
            raise message
        if message is NEVER:
            await asyncio.Event().wait()
        await context.write(message)


def _status(error: Exception) -> grpc.StatusCode:
    if isinstance(error, NotImplementedError):
        return grpc.StatusCode.UNIMPLEMENTED
    return NO_ANSWER[0] if isinstance(error, AgentUnreachable) else status_of(error)


def _named(request: Any, answer: Answer) -> Answer:
    """Return the answer to a request, or an error if the name of its job is invalid."""
    try:
        check_job(request.job)
    except ConfigError as error:
        return error
    return answer


def _no_job(machine: str, request: Any) -> UnknownJob:
    return UnknownJob(f"{request.job} is not prepared on {machine}: call Prepare first")


def no_findings(request: pb.DiagnoseRequest) -> Answer:
    """Answer Diagnose: no requested test has a finding, and tests between machines reach their peer at once."""
    try:
        if request.job:
            check_job(request.job)
        check_tests(request)
    except ConfigError as error:
        return error
    replies: list[Message] = []
    for number, test in enumerate(request.tests, 1):
        replies.append(pb.DiagnoseReply(begun=pb.TestBegun(name=test.name, number=number, of=len(request.tests))))
        if request.HasField("peer") and request.peer.position == 0:
            replies.append(pb.DiagnoseReply(waits=pb.TestWaits(name=test.name, host="127.0.0.1", port=1)))
        replies.append(pb.DiagnoseReply(result=pb.TestResult(name=test.name)))
    return [*replies, pb.DiagnoseReply(over=pb.DiagnosisOver())]


async def _nothing_runs(request: pb.ProgressRequest) -> AsyncIterator[pb.ProgressReply]:
    while True:
        yield pb.ProgressReply(time_ns=time.time_ns())
        await asyncio.sleep(PROGRESS_S)
