"""What a fake agent does in addition to the contract of all agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.client import AgentClient
from agent.fake import METHODS, NEVER, Answer, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentRefuses, AgentUnreachable, ConfigError, Fenced, StillDying

STOP = pb.StopRequest(job="gpt", generation=1)


@contextlib.asynccontextmanager
async def asking(**answers: Answer) -> AsyncIterator[tuple[FakeAgent, AgentClient]]:
    async with FakeAgent(**answers) as agent, AgentClient(agent.address) as client:
        yield agent, client


async def later(request: pb.StopRequest) -> pb.StopReply:
    await asyncio.sleep(0)
    return pb.StopReply(disk_asked=request.generation)


@pytest.mark.parametrize(
    "answer", [pb.StopReply(disk_asked=1), lambda request: pb.StopReply(disk_asked=request.generation), later]
)
async def test_an_answer_is_a_message_or_a_function(answer: Answer) -> None:
    async with asking(stop=answer) as (agent, client):
        assert (await client.stop(STOP)).disk_asked == 1
        assert agent.asked("stop") == [STOP]
        assert agent.asked("describe") == []


@pytest.mark.parametrize("error", [Fenced("old"), StillDying("rank 1"), ConfigError("no"), AgentUnreachable("away")])
async def test_an_error_is_the_one_that_a_real_agent_is_understood_to_have(error: Exception) -> None:
    for answer in (error, lambda _: error):
        async with asking(stop=answer, observe=answer) as (_, client):
            with pytest.raises(type(error), match=str(error)):
                await client.stop(STOP)
            with pytest.raises(type(error), match=str(error)):
                await anext(client.observe(pb.ObserveRequest()))


async def test_what_has_no_answer_is_refused_as_by_an_older_agent() -> None:
    async with asking() as (_, client):
        with pytest.raises(AgentRefuses, match=r"no answer to StartStore\. It is of another release") as caught:
            await client.start_store(pb.StartStoreRequest(job="gpt"))
        assert caught.value.__cause__.code().name == "UNIMPLEMENTED"  # type: ignore[union-attr]
        with pytest.raises(AgentRefuses, match="no answer to Observe"):
            await anext(client.observe(pb.ObserveRequest()))


def test_what_is_no_method_is_named() -> None:
    with pytest.raises(ValueError, match="descibe is no method of an agent; there are describe, prepare, start_store"):
        FakeAgent(descibe=NEVER)
    with pytest.raises(ValueError, match="no method"):
        FakeAgent().asked("observed")


async def test_a_call_that_never_gets_an_answer_waits_for_another_one() -> None:
    async with asking(stop=NEVER) as (agent, client):
        with pytest.raises(AgentUnreachable):
            await client.stop(STOP, timeout_s=0.1)
        waiting = asyncio.create_task(client.stop(pb.StopRequest(request_id="1", job="gpt")))
        while agent.open("stop") != 1:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        agent.answer(stop=pb.StopReply(disk_asked=2))
        assert (await waiting).disk_asked == 2
        assert (agent.open("stop"), len(agent.asked("stop"))) == (0, 2)


async def test_it_is_gone_when_it_is_stopped_and_back_where_it_was() -> None:
    async with asking(stop=NEVER, progress=[pb.ProgressReply(generation=1), NEVER]) as (agent, client):
        waiting = asyncio.create_task(client.stop(pb.StopRequest(request_id="1", job="gpt")))
        stream = client.progress(pb.ProgressRequest())
        assert (await anext(stream)).generation == 1
        address = agent.address
        await agent.stop()
        for over in (waiting, anext(stream)):
            with pytest.raises(AgentUnreachable):
                await over
        with pytest.raises(AgentUnreachable):
            await client.stop(STOP, timeout_s=5)
        agent.answer(stop=pb.StopReply(disk_asked=3))
        await agent.start()
        assert agent.address == address
        reply = pb.StopReply()
        while reply.disk_asked != 3:
            with contextlib.suppress(AgentUnreachable):  # the client tries to connect again after a while
                reply = await client.stop(STOP, timeout_s=5)


async def test_two_cannot_have_one_port() -> None:
    async with FakeAgent() as agent:
        with pytest.raises(ConfigError, match=f"cannot listen on {agent.address}"):
            await FakeAgent().start(agent.address)


async def generated(request: pb.ProgressRequest) -> AsyncIterator[pb.ProgressReply]:
    for generation in (1, 2):
        yield pb.ProgressReply(generation=generation)


@pytest.mark.parametrize(
    "answer", [[pb.ProgressReply(generation=1), pb.ProgressReply(generation=2)], generated], ids=["list", "iterator"]
)
async def test_a_stream_ends_with_what_there_is_to_say(answer: Any) -> None:
    async with asking(progress=answer) as (agent, client):
        assert [one.generation async for one in client.progress(pb.ProgressRequest())] == [1, 2]
        assert agent.open("progress") == 0


async def test_a_stream_stays_open_where_it_is_told_to_and_is_counted() -> None:
    async with asking(progress=[pb.ProgressReply(generation=1), NEVER]) as (agent, client):
        stream = client.progress(pb.ProgressRequest())
        assert (await anext(stream)).generation == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.1)
        while agent.open("progress"):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_a_stream_breaks_off_in_the_middle() -> None:
    async with asking(progress=[pb.ProgressReply(generation=1), AgentUnreachable("gone")]) as (_, client):
        stream = client.progress(pb.ProgressRequest())
        assert (await anext(stream)).generation == 1
        with pytest.raises(AgentUnreachable, match="gone"):
            await anext(stream)


async def test_a_repeated_request_id_gets_the_first_reply_until_the_job_is_over() -> None:
    numbers = iter(range(1, 10))
    async with asking(
        stop=lambda _: pb.StopReply(disk_asked=next(numbers)),
        release=lambda _: pb.ReleaseReply(bytes_freed=next(numbers)),
    ) as (agent, client):
        same, release = pb.StopRequest(request_id="1", job="gpt"), pb.ReleaseRequest(request_id="2", job="gpt")
        assert [(await client.stop(same)).disk_asked for _ in range(2)] == [1, 1]
        assert (await client.stop(STOP)).disk_asked == 2, "STOP has no request id, so it is executed again"
        assert [(await client.release(release)).bytes_freed for _ in range(2)] == [3, 3]
        assert (await client.stop(same)).disk_asked == 4
        assert len(agent.asked("stop")) == 4


def test_its_methods_are_those_of_the_client() -> None:
    assert [name for name in METHODS if not callable(getattr(AgentClient, name, None))] == []
