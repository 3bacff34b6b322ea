"""A real worker is killed at a planned place. The Temporal server is real, too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

from drills.inject.control_plane import plugins
from drills.inject.history_watch import HistoryWatch
from everstep.rank import drill_faults as faults
from everstep.rank import environment

WORKER = """
import asyncio, sys
from datetime import timedelta
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker
from drills.inject.control_plane import plugins

@activity.defn(name="Stop ranks")
async def stop(text: str) -> str:
    print("effect", flush=True)
    return text

@workflow.defn(name="Incident")
class Incident:
    @workflow.run
    async def run(self) -> str:
        return await workflow.execute_activity(
            "Stop ranks", "done", start_to_close_timeout=timedelta(seconds=5), result_type=str)

async def main() -> None:
    client = await Client.connect(sys.argv[1])
    async with Worker(client, task_queue="drill", workflows=[Incident], activities=[stop], plugins=plugins(),
                      sticky_queue_schedule_to_start_timeout=timedelta(seconds=1)):
        print("up", flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


class Workers:
    """Starts the worker again after each kill."""

    def __init__(self, script: Path, plan: Path, address: str) -> None:
        self.command = [sys.executable, str(script), address]
        self.env = os.environ | {environment.FAULTS: str(plan), "PYTHONPATH": str(Path(__file__).parents[3])}
        self.log = plan.with_name("worker.log")
        self.killed = 0
        self.pid = 0

    async def run(self) -> None:
        while True:
            with self.log.open("ab") as log:
                started = await asyncio.create_subprocess_exec(*self.command, env=self.env, stdout=log, stderr=log)
            self.pid = self.pid or started.pid
            try:
                code = await started.wait()
            except asyncio.CancelledError:
                started.kill()
                await started.wait()
                raise
            assert code == -signal.SIGKILL, self.log.read_text()
            self.killed += 1


@asynccontextmanager
async def looked_at(temporal: Client, workers: Workers, plan: Path, planned: dict[str, object]) -> AsyncIterator[None]:
    """Watch the worker from outside, as a drill does if it kills at an event."""
    while not workers.pid:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    with ExitStack() as looking:
        if "at_event" in planned:
            watch = HistoryWatch(
                store=plan.with_name("none"),
                address=temporal.service_client.config.target_host,
                namespace=temporal.namespace,
                workflow_id="incident/j/0001",
                worker=workers.pid,
                plan=plan,
                fault=planned,
            )
            looking.enter_context(watch.running())
        yield


@pytest.mark.parametrize(
    ("fault", "place", "effects"),
    [
        pytest.param({"in_stage": "stop", "moment": "begin"}, "begin of Stop ranks", 1, marks=pytest.mark.wide),
        ({"in_stage": "stop", "moment": "end"}, "end of Stop ranks", 2),
        ({"at_event": 3}, None, 1),
        ({"at_event": 6}, "end of Stop ranks", 2),
        pytest.param({"at_event": 7}, "result of Stop ranks reported", 1, marks=pytest.mark.wide),
        ({"at_event": 8}, "result of Stop ranks reported", 1),
        ({"at_event": 11}, "seen in the history", 1),
    ],
)
async def test_a_worker_dies_once_and_where_it_was_told(
    temporal: Client, tmp_path: Path, fault: dict[str, object], place: str | None, effects: int
) -> None:
    script, plan = tmp_path / "worker.py", tmp_path / "plan.json"
    script.write_text(WORKER)
    planned = {"id": "f", "fault": "kill-worker", "job": "j", **fault}
    plan.write_text(json.dumps([planned]))
    workers = Workers(script, plan, temporal.service_client.config.target_host)
    running = asyncio.create_task(workers.run())
    async with asyncio.timeout(110), looked_at(temporal, workers, plan, planned):
        handle = await temporal.start_workflow(
            "Incident",
            id="incident/j/0001",
            task_queue="drill",
            result_type=str,
            # If a workflow task timed out on a busy computer, another event would have the planned number.
            task_timeout=timedelta(seconds=10),
        )
        assert await handle.result() == "done"
        while faults.fired(plan, planned) is None or not workers.killed:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    mark = faults.fired(plan, planned)
    assert mark is not None
    assert workers.killed == 1
    assert place is None or mark["place"] == place
    if "at_event" in fault:
        assert mark["newest"] >= int(str(fault["at_event"])) - (mark["place"].startswith("end"))
        if mark["place"].startswith("result"):
            assert mark["newest"] == 8, "the next task is scheduled, and no worker has accepted it"
    assert workers.log.read_text().count("effect") == effects


def test_a_worker_without_a_plan_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.FAULTS, raising=False)
    assert plugins() == []
    monkeypatch.setenv(environment.FAULTS, "/nowhere/plan.json")
    assert [plugin.name() for plugin in plugins()] == ["everstep.drill"]


REPORTER = """
import asyncio, os, sys
from temporalio.client import Client
from drills.inject.control_plane import plugins

async def main() -> None:
    client = await Client.connect(sys.argv[1], plugins=plugins())
    job = client.get_workflow_handle("job/" + sys.argv[2])
    print(await job.execute_update("report", "m1-1", id="m1-1"), flush=True)

asyncio.run(main())
os._exit(0)  # Temporal's threads can crash an interpreter that ends while they run
"""


@workflow.defn(name="Told", sandboxed=False)
class Told:
    """Accepts reports like a job."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @workflow.run
    async def run(self) -> list[str]:
        await workflow.wait_condition(lambda: len(self.told) == 2)
        return self.told

    @workflow.update(name="report")
    def report(self, text: str) -> str:
        self.told.append(text)
        return "taken"


@pytest.mark.parametrize("moment", ["begin", "end"])
async def test_a_worker_dies_as_it_tells_a_job_of_a_fault(temporal: Client, tmp_path: Path, moment: str) -> None:
    script, plan, job = tmp_path / "reporter.py", tmp_path / "plan.json", f"told-{moment}"
    script.write_text(REPORTER)
    planned = {"id": "f", "fault": "kill-worker", "job": job, "in_stage": "report", "moment": moment}
    plan.write_text(json.dumps([planned]))
    env = os.environ | {environment.FAULTS: str(plan), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(script), temporal.service_client.config.target_host, job]
    async with Worker(temporal, task_queue=job, workflows=[Told], max_cached_workflows=0):
        handle = await temporal.start_workflow(Told.run, id=f"job/{job}", task_queue=job)
        first = await asyncio.create_subprocess_exec(*command, env=env)
        assert await first.wait() == -signal.SIGKILL
        mark = faults.fired(plan, planned)
        assert mark and mark["place"] == f"{moment} of a report"
        again = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
        said, _ = await again.communicate()
        assert (again.returncode, said.strip()) == (0, b"taken"), "the fault strikes only once"
        await handle.execute_update(Told.report, "another")
        assert await handle.result() == ["m1-1", "another"], "each report arrives once, although a worker died"
