"""The delivery of a notice on a real server, with receivers and workers that fail."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.deliver_notice import DeliverNotice
from activities.notices.settings import NoticeSettings, Receiver
from activities.registry import function
from everstep.model.notice import NOTICE_WORKFLOW, Notice, NoticeInput, NoticeKind, NoticeResult, notice_workflow_id
from tests.activities.notices.http_receiver import HttpReceiver, says, serving
from tests.activities.performing import tools
from workflows import attributes
from workflows.registry import WORKFLOWS, sandbox

Handle = WorkflowHandle[Any, NoticeResult]


@pytest.fixture
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def pager() -> Iterator[HttpReceiver]:
    with serving() as found:
        yield found


def worker(client: Client, queue: str, *receivers: Receiver) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        workflows=list(WORKFLOWS),
        activities=[
            function(
                DeliverNotice,
                tools(notices=NoticeSettings(receiver=list(receivers))),
            )
        ],
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    )


async def start(client: Client, queue: str, *receivers: str, patience_s: float = 60.0) -> Handle:
    notice = Notice(
        kind=NoticeKind.JOB_FAILED, id=f"job-failed/gpt/{queue}", text="gpt failed", time_ns=1, job="gpt", cluster=queue
    )
    return await client.start_workflow(
        NOTICE_WORKFLOW,
        NoticeInput(notice=notice, receivers=list(receivers), patience_s=patience_s),
        id=notice_workflow_id(queue, notice.id),
        task_queue=queue,
        result_type=NoticeResult,
    )


async def tried(handle: Handle, times: int) -> None:
    """Wait until a number of attempts have failed."""
    while True:
        pending = (await handle.describe()).raw_description.pending_activities
        if any(one.attempt > times and one.last_failure.message for one in pending):
            return
        await asyncio.sleep(0.05)


@pytest.mark.history("notice")
async def test_all_receivers_are_notified(temporal: Client, queue: str, pager: HttpReceiver, tmp_path: Path) -> None:
    mail = Receiver(name="mail", command=["sh", "-c", f"cat > {tmp_path}/got; echo sent"])
    async with worker(temporal, queue, Receiver(name="pager", url=pager.url), mail):
        handle = await start(temporal, queue, "pager", "mail")
        result = await handle.result()

    assert result.headline == "notified pager, mail"
    assert result.taken == {"pager": "HTTP 202 Accepted", "mail": "exit code 0: sent"}
    assert [body["kind"] for body in pager.bodies] == ["job-failed"]
    assert '"gpt failed"' in (tmp_path / "got").read_text()
    shown = (await handle.describe()).typed_search_attributes
    assert shown.get(attributes.JOB_NAME) == "gpt"


async def test_a_receiver_that_is_down_is_notified_later_and_delays_no_other(
    temporal: Client, queue: str, pager: HttpReceiver
) -> None:
    with serving() as gone:
        port = urlsplit(gone.url).port
    receivers = [Receiver(name="pager", url=pager.url), Receiver(name="mail", url=gone.url)]
    async with worker(temporal, queue, *receivers):
        handle = await start(temporal, queue, "mail", "pager")
        await tried(handle, 1)
        with serving(port or 0) as back:
            result = await handle.result()

    assert set(result.taken) == {"mail", "pager"}
    assert len(back.bodies) == len(pager.bodies) == 1, "a receiver that took the notice is not notified again"


async def test_failed_receivers_are_in_the_result(temporal: Client, queue: str, pager: HttpReceiver) -> None:
    pager.answer = says(503, "no room")
    async with worker(temporal, queue, Receiver(name="pager", url=pager.url)):
        handle = await start(temporal, queue, "pager", "gone", patience_s=3.0)
        result = await handle.result()

    assert result.taken == {}
    assert result.failed["pager"] == "HTTP 503 Service Unavailable: no room"
    assert result.failed["gone"].startswith("this worker has no receiver 'gone'")
    assert len(pager.bodies) > 1


async def test_another_worker_continues_between_two_attempts(temporal: Client, queue: str, pager: HttpReceiver) -> None:
    pager.answer = says(500)
    receiver = Receiver(name="pager", url=pager.url)
    async with worker(temporal, queue, receiver):
        handle = await start(temporal, queue, "pager")
        await tried(handle, 1)
    before = len(pager.bodies)
    pager.answer = says(200)
    async with worker(temporal, queue, receiver):
        result = await handle.result()

    assert list(result.taken) == ["pager"]
    assert len(pager.bodies) == before + 1
