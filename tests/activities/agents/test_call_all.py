"""Calls of many agents at once: how long such a call waits for a silent agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.agents import call_all
from agent.client import AgentClient, AgentClients
from everstep.errors import AgentRefuses, AgentUnreachable, StillDying
from everstep.model.machine import Machine

PATIENCE_S = 2.0


class Clock:
    """Replaces asyncio's clock: time passes only in sleeps and waits."""

    ensure_future = staticmethod(asyncio.ensure_future)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("activities.agents.call_all.asyncio", self)

    def get_running_loop(self) -> Clock:
        return self

    def time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def wait(self, calls: list[Any], timeout: float) -> tuple[set[Any], set[Any]]:  # noqa: ASYNC109 - asyncio's
        self.now_s += timeout
        return set(), set(calls)


async def test_a_silent_machine_has_its_patience_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, pool = ActivityEnvironment(), AgentClients()
    clock = Clock(monkeypatch)
    asked: list[float] = []

    async def call(_machine: Machine, _client: AgentClient) -> None:
        asked.append(clock.now_s)
        raise AgentUnreachable("refused")

    async def ask() -> Any:
        machines = [Machine(name="m0", address="127.0.0.1:1")]
        return await call_all.on_all(pool, machines, call, patience_s=PATIENCE_S, say=lambda _text: None)

    done, silent = await environment.run(ask)
    assert (done, list(silent)) == ({}, ["m0"])
    assert asked[0] == 0.0
    assert asked[-1] == clock.now_s == pytest.approx(PATIENCE_S)
    await pool.close()


@pytest.mark.parametrize(
    ("first", "then", "silent", "left"),
    [
        (StillDying("rank 0 is dying"), AgentUnreachable("refused"), ["m0"], {}),
        (AgentUnreachable("refused"), StillDying("rank 0 is dying"), [], {"m0": "rank 0 is dying"}),
    ],
)
async def test_a_machine_is_silent_or_has_dying_ranks_by_its_last_answer(
    monkeypatch: pytest.MonkeyPatch, first: Exception, then: Exception, silent: list[str], left: dict[str, str]
) -> None:
    environment, pool = ActivityEnvironment(), AgentClients()
    Clock(monkeypatch)
    answers = [first]
    dying: dict[str, str] = {}

    async def call(_machine: Machine, _client: AgentClient) -> None:
        raise answers.pop() if answers else then

    async def ask() -> Any:
        machines = [Machine(name="m0", address="127.0.0.1:1")]
        return await call_all.on_all(
            pool, machines, call, patience_s=PATIENCE_S, say=lambda _text: None, dying=dying, dying_s=PATIENCE_S
        )

    done, found = await environment.run(ask)
    assert (done, list(found)) == ({}, silent)
    assert dying == left
    await pool.close()


async def test_an_agent_that_refuses_is_asked_again_and_its_reason_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses during a change of tokens, and accepts the worker a moment later."""
    environment, pool = ActivityEnvironment(), AgentClients()
    Clock(monkeypatch)
    answers: list[Exception | None] = [AgentRefuses("no valid token"), AgentRefuses("no valid token"), None]
    shown: list[str] = []

    async def call(_machine: Machine, _client: AgentClient) -> str:
        if (error := answers.pop(0)) is not None:
            raise error
        return "done"

    async def ask() -> Any:
        machines = [Machine(name="m0", address="127.0.0.1:1")]
        return await call_all.on_all(pool, machines, call, patience_s=PATIENCE_S, say=shown.append)

    assert await environment.run(ask) == ({"m0": "done"}, {})
    assert "no valid token" in shown[0]
    assert shown[-1] == "", "it is not waited for any more"
    with pytest.raises(ApplicationError, match="m1 did not: no valid token"):
        call_all.refuse_silent({"m1": AgentRefuses("no valid token")}, [Machine(name="m1", address="127.0.0.1:1")])
    await pool.close()


@pytest.mark.parametrize("patience_s", [0.0, 0.7, PATIENCE_S, 30.0])
async def test_an_agent_that_neither_works_nor_answers_has_its_patience_and_no_more(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    class Frozen:
        async def describe(self, *, timeout_s: float) -> None:
            clock.now_s += timeout_s
            raise AgentUnreachable("no answer")

    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    clock = Clock(monkeypatch)
    with pytest.raises(AgentUnreachable):
        await call_all.call_while_alive(Frozen(), lambda: never, patience_s)  # type: ignore[arg-type]  # only describe is used
    assert patience_s <= clock.now_s <= max(patience_s * 1.25, 1.0)
