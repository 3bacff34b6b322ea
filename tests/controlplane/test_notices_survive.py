"""A notice is delivered even if its worker is killed between two attempts. The workers are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from temporalio.client import Client

from everstep.model.notice import NOTICE_WORKFLOW, Notice, NoticeInput, NoticeKind, NoticeResult, notice_workflow_id
from tests.activities.notices.http_receiver import says, serving


@contextmanager
def worker(client: Client, folder: Path, queue: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``everstep worker --notices``, and kill it at the end if it still runs."""
    env = os.environ | {
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
        "PAGER": "Bearer in-the-environment-only",
    }
    command = [sys.executable, "-P", "-m", "console.main", "worker", "--notices", str(folder / "notices.toml")]
    command += ["--ledger", f"sqlite:///{folder / 'ledger.db'}", "--task-queue", queue]
    with (
        (folder / "worker.log").open("ab") as log,
        subprocess.Popen(command, env=env, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


async def test_a_worker_that_is_killed_between_two_tries_loses_no_notice(temporal: Client, tmp_path: Path) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    notice = Notice(kind=NoticeKind.PARKED, id=f"parked/{queue}", text="job gpt is parked", time_ns=1)
    with serving() as pager:
        pager.answer = says(503, "who is Bearer in-the-environment-only?")
        (tmp_path / "notices.toml").write_text(
            f'[[receiver]]\nname = "pager"\nurl = "{pager.url}"\nheaders_from = {{Authorization = "PAGER"}}\n'
        )
        handle = await temporal.start_workflow(
            NOTICE_WORKFLOW,
            NoticeInput(notice=notice, receivers=["pager"]),
            id=notice_workflow_id(queue, notice.id),
            task_queue=queue,
            result_type=NoticeResult,
        )
        with worker(temporal, tmp_path, queue) as first:
            while len(pager.bodies) < 2:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
        tries, pager.answer = len(pager.bodies), says(202)
        with worker(temporal, tmp_path, queue):
            result = await handle.result()

    assert list(result.taken) == ["pager"]
    assert len(pager.bodies) == tries + 1
    assert {body["id"] for body in pager.bodies} == {notice.id}
    history = (await handle.fetch_history()).to_json()
    assert "in-the-environment-only" not in history + (tmp_path / "worker.log").read_text()
