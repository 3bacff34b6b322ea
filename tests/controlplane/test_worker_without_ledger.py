"""A worker starts without a ledger, says that it waits for it, and works meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from temporalio.client import Client

from activities.ledger.ledger import Ledger
from everstep.model.notice import NOTICE_WORKFLOW, Notice, NoticeInput, NoticeKind, NoticeResult, notice_workflow_id
from tests.controlplane.test_notices_survive import worker


async def test_a_worker_starts_without_a_ledger_and_waits_for_it(temporal: Client, tmp_path: Path) -> None:
    queue, ledger, log = f"q-{uuid.uuid4().hex[:8]}", tmp_path / "ledger.db", tmp_path / "worker.log"
    ledger.mkdir()  # a folder in the place of the file: it cannot be opened
    (tmp_path / "notices.toml").write_text('[[receiver]]\nname = "pager"\nurl = "http://127.0.0.1:1"\n')
    notice = Notice(kind=NoticeKind.PARKED, id=f"parked/{queue}", text="job gpt is parked", time_ns=1)

    async def until_said(text: str) -> None:
        async with asyncio.timeout(60):
            while text not in log.read_text():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)

    with worker(temporal, tmp_path, queue):
        handle = await temporal.start_workflow(
            NOTICE_WORKFLOW,
            NoticeInput(notice=notice, receivers=[]),
            id=notice_workflow_id(queue, notice.id),
            task_queue=queue,
            result_type=NoticeResult,
        )
        assert (await handle.result()).taken == {}, "the worker runs workflows"
        await until_said("waiting for the ledger")
        ledger.rmdir()
        await until_said("the ledger is open")
    with Ledger.open(f"sqlite:///{ledger}", create=False) as opened:
        assert opened.jobs() == []
