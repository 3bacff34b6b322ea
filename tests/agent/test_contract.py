"""What a caller of an agent can rely on. The same tests run with a real agent process and with a fake agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

import everstep
from agent.client import AgentClient
from agent.fake import NEVER, FakeAgent
from agent.reporting.observations import OF_NO_JOB
from agent.security import ClientSecurity
from agent.server.endpoint import SERVICE
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable, CodeMissing, ConfigError, UnknownJob
from tests.agent.agents import RunningAgent, running_agent

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ask = Callable[[AgentClient, str], Any]
"""A call of an agent, with the name of a job."""


class Subject(ABC):
    """An agent of machine ``m1`` without a job, and what can happen to it."""

    def __init__(self, client: AgentClient) -> None:
        self.client = client

    @abstractmethod
    async def restart(self) -> None:
        """Kill the agent and start it again on the same port. It reports that it started."""

    @abstractmethod
    def hanging(self) -> contextlib.AbstractContextManager[None]:
        """Make the agent leave Describe without an answer."""


class RealSubject(Subject):
    def __init__(self, agent: RunningAgent) -> None:
        super().__init__(agent.client)
        self._agent = agent

    async def restart(self) -> None:
        self._agent.kill()
        await self._agent.start()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        assert self._agent.process
        os.kill(self._agent.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._agent.process.pid, signal.SIGCONT)


class FakeSubject(Subject):
    def __init__(self, agent: FakeAgent, client: AgentClient) -> None:
        super().__init__(client)
        self._agent = agent

    async def restart(self) -> None:
        await self._agent.stop()
        self._agent.publish(agent_started=pb.AgentStarted(pid=os.getpid()))
        await self._agent.start()
        await _answers(self.client)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self._agent.answer(describe=NEVER)
        yield
        self._agent.answer(describe=pb.DescribeReply(machine="m1"))


async def _answers(client: AgentClient) -> None:
    """Wait until the client is connected again."""
    while True:
        with contextlib.suppress(AgentUnreachable):
            await client.describe(timeout_s=2)
            return
        await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["real", "fake"])
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    if request.param == "real":
        async with running_agent(tmp_path_factory.mktemp("agent"), alone=True) as running:
            yield RealSubject(running)
        return
    async with FakeAgent.empty("m1") as agent, AgentClient(agent.address) as client:
        agent.publish(agent_started=pb.AgentStarted(pid=os.getpid()))
        yield FakeSubject(agent, client)


@pytest.fixture
def job() -> str:
    return f"job-{uuid.uuid4().hex[:8]}"


async def first(stream: AsyncIterator[Any], count: int) -> list[Any]:
    async with asyncio.timeout(30):
        return [await anext(stream) for _ in range(count)]


async def told(client: AgentClient, count: int, after: int = 0, job: str = "") -> list[pb.Observation]:
    """Return the observations that are reported at once. There must be exactly ``count`` of them."""
    stream = client.observe(pb.ObserveRequest(after_sequence=after, job=job))
    found = await first(stream, count)
    with contextlib.suppress(TimeoutError):
        found.append(await asyncio.wait_for(anext(stream), 0.1))
    assert len(found) == count
    return found


async def test_it_says_who_it_is(subject: Subject) -> None:
    found = await subject.client.describe()

    assert (found.machine, found.version, list(found.jobs)) == ("m1", everstep.__version__, [])
    assert found.pid > 0
    assert 0 < found.started_ns < found.time_ns
    assert found.room.shm_free > 0


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_its_health_can_be_asked(subject: Subject, service: str) -> None:
    stub, token = (
        health_pb2_grpc.HealthStub(subject.client.channel),
        ClientSecurity.from_environment().read().metadata(),
    )
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), metadata=token)

    assert reply.status == health_pb2.HealthCheckResponse.SERVING


OF_A_KNOWN_JOB: dict[str, Ask] = {
    "start_store": lambda agent, job: agent.start_store(pb.StartStoreRequest(request_id="1", job=job, generation=1)),
    "launch": lambda agent, job: agent.launch(pb.LaunchRequest(request_id="1", job=job, generation=1)),
    "restore": lambda agent, job: agent.restore(pb.RestoreRequest(request_id="1", job=job)),
    "open_exchange": lambda agent, job: agent.open_exchange(pb.OpenExchangeRequest(job=job)),
    "persist": lambda agent, job: agent.persist(pb.PersistRequest(job=job, step=1)),
    "align_ranks": lambda agent, job: agent.align_ranks(pb.AlignRanksRequest(job=job, generation=1, step=1)),
    "align_backups": lambda agent, job: agent.align_backups(pb.AlignBackupsRequest(job=job)),
    "sample": lambda agent, job: agent.sample(pb.SampleRequest(job=job)),
    "pace_saves": lambda agent, job: agent.pace_saves(pb.PaceSavesRequest(job=job)),
    "stacks": lambda agent, job: agent.stacks(pb.StacksRequest(job=job)),
    "steps": lambda agent, job: anext(agent.steps(pb.StepsRequest(job=job))),
    "read_log": lambda agent, job: anext(agent.read_log(pb.ReadLogRequest(job=job))),
}
OF_ANY_JOB: dict[str, Ask] = {
    "stop": lambda agent, job: agent.stop(pb.StopRequest(request_id="1", job=job, generation=1)),
    "release": lambda agent, job: agent.release(pb.ReleaseRequest(request_id="1", job=job)),
    "checkpoints": lambda agent, job: agent.checkpoints(pb.CheckpointsRequest(job=job)),
    "check_storage": lambda agent, job: agent.check_storage(pb.CheckStorageRequest(job=job)),
}


@pytest.mark.parametrize("method", OF_A_KNOWN_JOB)
async def test_an_unknown_job_is_named_as_that(subject: Subject, method: str, job: str) -> None:
    with pytest.raises(UnknownJob, match=job):
        await OF_A_KNOWN_JOB[method](subject.client, job)


@pytest.mark.parametrize("method", [*OF_ANY_JOB, "start_store", "launch", "restore", "open_exchange"])
async def test_what_is_no_name_of_a_job_is_refused(subject: Subject, method: str) -> None:
    with pytest.raises(ConfigError, match=r"'\.\./etc' is not a job name"):
        await (OF_ANY_JOB | OF_A_KNOWN_JOB)[method](subject.client, "../etc")


async def test_code_that_is_not_here_is_named_as_missing(subject: Subject, job: str) -> None:
    digest = "0" * 64
    request = pb.TryCodeRequest(job=job, program=pb.Program(code=digest, script="main.py"), timeout_s=5)

    assert await subject.client.has_code([digest]) == []
    with pytest.raises(CodeMissing, match="does not have the code 0000"):
        await subject.client.try_code(request)
    request.job = "../etc"
    with pytest.raises(ConfigError, match=r"'\.\./etc' is not a job name"):
        await subject.client.try_code(request)


async def test_code_that_cannot_be_kept_is_refused_with_the_reason(subject: Subject) -> None:
    async def archive() -> AsyncIterator[bytes]:
        yield b"no archive"

    with pytest.raises(ConfigError):
        await subject.client.put_code("no digest", 10, archive())


async def test_a_stop_of_an_unknown_job_says_so_and_a_repeated_one_gets_the_first_reply(
    subject: Subject, job: str
) -> None:
    found: list[pb.StopReply] = [await OF_ANY_JOB["stop"](subject.client, job) for _ in range(2)]

    assert all(one.unknown and one.now_ns for one in found)
    assert [len(one.ranks) + len(one.checkpoints) for one in found] == [0, 0]
    await OF_ANY_JOB["release"](subject.client, job)


async def test_nothing_is_held_or_given_back_of_an_unknown_job(subject: Subject, job: str) -> None:
    replies: list[Message] = [
        await OF_ANY_JOB[m](subject.client, job) for m in ("release", "checkpoints", "check_storage")
    ]

    assert replies == [pb.ReleaseReply(), pb.CheckpointsReply(), pb.CheckStorageReply()]


async def test_tests_that_are_asked_for_are_told_one_after_the_other(subject: Subject, job: str) -> None:
    """A test that cannot be run is refused: an unknown name of a test or job, or an unknown setting."""
    quick = '{"mb": 1.1, "seconds": 0.001}'
    asked = pb.DiagnoseRequest(request_id=job, tests=[pb.TestToRun(name="memory", settings=quick)])
    async with asyncio.timeout(60):
        replies = [reply async for reply in subject.client.diagnose(asked)]

    assert [reply.WhichOneof("what") for reply in replies] == ["begun", "result", "over"]
    assert (replies[0].begun.name, replies[1].result.name) == ("memory", "memory")
    for wrong in (
        pb.DiagnoseRequest(tests=[pb.TestToRun(name="teleport")]),
        pb.DiagnoseRequest(tests=[pb.TestToRun(name="memory", settings='{"gb": 1}')]),
        pb.DiagnoseRequest(tests=[pb.TestToRun(name="nic")]),
        pb.DiagnoseRequest(job="../etc"),
    ):
        with pytest.raises(ConfigError):
            await anext(subject.client.diagnose(wrong))


async def test_progress_without_ranks_is_repeated(subject: Subject, job: str) -> None:
    [one, two] = await first(subject.client.progress(pb.ProgressRequest(job=job, interval_s=0.05)), 2)

    assert not one.ranks
    assert not two.ranks
    assert 0 < one.time_ns < two.time_ns


async def test_observations_are_told_from_a_number_on_and_live_until_they_are_acknowledged(
    subject: Subject, job: str
) -> None:
    """A stream ends when its agent ends. The next stream continues after the last received number."""
    client = subject.client
    [began] = await told(client, 1, job=job)
    assert began.WhichOneof("what") == "agent_started"
    assert (began.machine, began.id) == ("m1", f"m1-{began.sequence}")
    await told(client, 0, after=began.sequence)

    listening = asyncio.create_task(first(client.observe(pb.ObserveRequest(after_sequence=began.sequence)), 1))
    await asyncio.sleep(0.2)
    await subject.restart()
    with pytest.raises(AgentUnreachable):
        await listening
    [again] = await told(client, 1, after=began.sequence)
    assert again.sequence > began.sequence
    assert again.WhichOneof("what") == "agent_started"
    assert await told(client, 2) == [began, again]
    assert await told(client, 2, after=again.sequence + 10**6) == [began, again], (
        "the agent never used such a high number, so it sends everything"
    )

    for _ in range(2):
        await client.acknowledge(pb.AcknowledgeRequest(up_to_sequence=again.sequence, job=job))
        await told(client, 2)  # these observations belong to no job, so they stay
    for _ in range(2):
        await client.acknowledge(pb.AcknowledgeRequest(up_to_sequence=began.sequence, job=OF_NO_JOB))
        assert await told(client, 1) == [again]
    await client.acknowledge(pb.AcknowledgeRequest(up_to_sequence=again.sequence))
    await told(client, 0)


async def test_an_answer_that_does_not_come_is_waited_for_until_the_deadline_and_no_longer(subject: Subject) -> None:
    with subject.hanging(), pytest.raises(AgentUnreachable, match="did not answer"):
        await asyncio.wait_for(subject.client.describe(timeout_s=0.3), 20)
    await _answers(subject.client)
    assert (await subject.client.describe()).machine == "m1"
