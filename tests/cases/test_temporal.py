"""The same workflow runs on the simulated Temporal and on a real server, with the same results."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.activity import Activity, Bounds, within
from activities.heartbeat import Say
from activities.tools import Tools
from drills.cases.temporal import ActivityCall, SimulatedTemporal, UpdateRefusedError, WorkflowFailedError

NEVER_S = 600.0


class Echo(Activity[str]):
    """An activity that returns a text, fails, or does not end."""

    name = "Echo in a test"
    text: str

    def line(self) -> str:
        return self.text

    def bounds(self) -> Bounds:
        return within(timedelta(seconds=1), RetryPolicy(maximum_attempts=1))

    async def perform(self, tools: Tools, say: Say) -> str:
        raise AssertionError("the test answers")


@workflow.defn(name="Child in a test")
class Child:
    """Waits for a signal, and reports it to its parent."""

    def __init__(self) -> None:
        self.word = ""

    @workflow.signal
    def tell(self, word: str) -> None:
        self.word = word

    @workflow.run
    async def run(self, parent: str) -> str:
        await workflow.wait_condition(lambda: self.word != "")
        await workflow.get_external_workflow_handle(parent).signal("seen", self.word)
        return self.word.upper()


@workflow.defn(name="Parent in a test")
class Parent:
    """Uses all features of Temporal that the product's workflows use."""

    def __init__(self) -> None:
        self.seen_words: list[str] = []

    @workflow.signal
    def seen(self, word: str) -> None:
        self.seen_words.append(word)

    @workflow.update
    def add(self, word: str) -> int:
        if word == "fail":
            raise ApplicationError("the handler refuses")
        self.seen_words.append(word)
        return len(self.seen_words)

    @add.validator
    def check(self, word: str) -> None:
        if not word:
            raise ValueError("an empty word")

    @workflow.run
    async def run(self, before: list[str]) -> list[str]:
        if not before:
            workflow.continue_as_new(["continued"])
        found = list(before)
        for text in ("hello", "fail", "never"):
            found.append(await self._echo(text))
        cancelled = self._start("never")
        await workflow.sleep(0.01)
        cancelled.cancel()
        found.append("cancelled" if await self._is_cancelled(cancelled) else "not cancelled")
        try:
            await workflow.wait_condition(lambda: len(self.seen_words) >= 99, timeout=timedelta(seconds=0.1))
        except TimeoutError:
            found.append("timed out")
        await workflow.wait_condition(lambda: len(self.seen_words) >= 2)
        child = await workflow.start_child_workflow(
            Child.run, workflow.info().workflow_id, id=f"{workflow.info().workflow_id}/child"
        )
        await child.signal("tell", "word")
        found.append(await child)
        try:
            await workflow.get_external_workflow_handle("nobody").signal("seen", "x")
        except Exception:  # the messages of the two servers differ
            found.append("no such workflow")
        return [*found, *self.seen_words]

    def _start(self, text: str) -> Any:
        request = Echo(text=text)
        bounds = request.bounds()
        return workflow.start_activity(
            request.name,
            request,
            result_type=str,
            schedule_to_close_timeout=bounds.total,
            retry_policy=bounds.retry,
            heartbeat_timeout=timedelta(seconds=1),
        )

    async def _echo(self, text: str) -> str:
        try:
            result: str = await self._start(text)
        except ActivityError as error:
            return f"{type(error.cause).__name__}"
        return result

    async def _is_cancelled(self, started: Any) -> bool:
        try:
            await started
        except (ActivityError, asyncio.CancelledError):
            return True
        return False


@workflow.defn(name="Broken in a test")
class Broken:
    """A workflow that fails."""

    @workflow.run
    async def run(self) -> None:
        raise ApplicationError("it is broken")


EXPECTED = ["continued", "hello", "ApplicationError", "TimeoutError", "cancelled", "timed out", "WORD"]
EXPECTED += ["no such workflow", "a", "b", "word"]


async def test_a_real_server(temporal: Client) -> None:
    queue = uuid.uuid4().hex

    @activity.defn(name=Echo.name)
    async def echo(request: Echo) -> str:
        if request.text == "fail":
            raise ApplicationError("it fails", non_retryable=True)
        while request.text == "never":
            await asyncio.sleep(0.05)
            activity.heartbeat()
        return request.text

    async with Worker(
        temporal,
        task_queue=queue,
        workflows=[Parent, Child],
        activities=[echo],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_heartbeat_throttle_interval=timedelta(milliseconds=50),
    ):
        handle = await temporal.start_workflow(Parent.run, [], id=uuid.uuid4().hex, task_queue=queue)
        latest = temporal.get_workflow_handle(handle.id)
        while (await latest.describe()).run_id == handle.first_execution_run_id:  # noqa: ASYNC110 - wait for continue-as-new
            await asyncio.sleep(0.02)
        assert await latest.execute_update("add", "a") == 1
        for refused in ("", "fail"):
            with pytest.raises(WorkflowUpdateFailedError):
                await latest.execute_update("add", refused)
        assert await latest.execute_update("add", "b") == 2
        assert await latest.result() == EXPECTED


def test_a_simulated_server() -> None:
    def perform(call: ActivityCall) -> None:
        assert isinstance(call.request, Echo)
        text = call.request.text
        if text == "fail":
            call.fail("it fails")
        elif text != "never":
            simulated.at(0.01, lambda: call.complete(text))

    simulated = SimulatedTemporal((Parent, Child), (Echo,), perform, now_ns=10**18)
    simulated.start("Parent in a test", "parent", [])
    answers: list[Any] = []
    simulated.at(0.05, lambda: simulated.update("parent", "add", "a", int, answers.append))
    simulated.at(0.06, lambda: simulated.update("parent", "add", "", int, answers.append))
    simulated.at(0.07, lambda: simulated.update("parent", "add", "fail", int, answers.append))
    simulated.at(0.08, lambda: simulated.update("parent", "add", "b", int, answers.append))
    assert simulated.advance(lambda: not simulated.is_open("parent"), NEVER_S)
    assert simulated.result("parent", list) == EXPECTED
    assert [answers[0], answers[3]] == [1, 2]
    assert all(isinstance(answer, UpdateRefusedError) for answer in answers[1:3])
    assert "empty word" in str(answers[1]) and "the handler refuses" in str(answers[2])
    simulated.close()


def test_a_workflow_that_fails_stops_the_simulation_with_its_error() -> None:
    simulated = SimulatedTemporal((Broken,), (), lambda call: None, now_ns=0)
    simulated.start("Broken in a test", "broken")
    with pytest.raises(WorkflowFailedError, match="broken: it is broken"):
        simulated.advance(lambda: False, 1.0)


def test_simulated_time_moves_only_when_all_work_is_done_and_can_be_skipped() -> None:
    simulated = SimulatedTemporal((), (), lambda call: None, now_ns=0)
    happened: list[tuple[str, float]] = []
    simulated.at(2.0, lambda: happened.append(("later", simulated.now_s)))
    simulated.at(50.0, lambda: happened.append(("fixed", simulated.now_s)), fixed=True)
    simulated.skip(10.0)
    assert not simulated.advance(lambda: False, 100.0)
    assert happened == [("later", 12.0), ("fixed", 50.0)]
    assert simulated.now_s == 110.0
