"""The metrics of a worker and of Temporal's SDK: their names, and errors about their addresses."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from datetime import timedelta
from typing import Any, cast

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.ledger.machine_events import EventWriter
from activities.ledger.time_spent import TimeSpent
from activities.watching.job_view import JobView
from activities.watching.training_time import TrainingTimes
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from controlplane.worker import run_worker
from controlplane.worker_metrics import samples_of, temporal_runtime
from everstep.decisions.training_time.ettr import Ettr
from everstep.errors import ConfigError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from tests.hosts import own_host
from tests.metric_names import TEMPORAL, WORKER

HOST = own_host(25)


async def test_all_metrics_of_a_worker_are_exported_and_documented() -> None:
    watcher, events = Watcher(cast(Any, None), AgentClients(), "everstep"), EventWriter(cast(Any, None))
    machines = [Machine(name=name, address=f"{name}:7070") for name in ("m0", "m1")]
    watcher.watched["job/gpt"] = JobView(
        JobSpec(name="gpt", script="gpt.py", machines=2, ranks_per_machine=2), machines
    )
    watcher.reported["report"] = 3
    times = TrainingTimes(cast(Any, None), cast(Any, None), watcher.watched)
    ettr = Ettr(100.0, {"productive": 90.0, "lost steps": 0.0, "launch": 10.0, "recovery": 0.0, "parked": 0.0})
    spent = TimeSpent(ettr, {"productive": 90.0, "start": 10.0})
    times.spent["job/gpt"] = spent, spent
    events.accept(pb.Observation(id="m0-1", machine="m0", agent_started=pb.AgentStarted()))

    shown = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in samples_of(watcher, events, times, "everstep").metrics()
        for sample in metric.samples
    }

    assert shown["everstep_jobs_watched",] == 1
    assert shown["everstep_machines_watched", "gpt"] == 2
    assert shown["everstep_agents_silent", "gpt"] == 2, "no agent has answered yet"
    assert shown["everstep_reports_total", "anomaly"] == 3
    assert shown["everstep_ledger_events_waiting",] == 1
    assert shown["everstep_job_ettr_ratio", "gpt", "hour"] == 0.9
    assert shown["everstep_job_lost_seconds", "gpt", "start", "start"] == 10.0
    assert {name for name, *_ in shown} == WORKER.keys()


async def test_an_invalid_address_is_reported_first() -> None:
    with pytest.raises(ConfigError, match="--metrics: 'here' is not host:port"):
        await run_worker(ledger_url="", task_queue="everstep", metrics="here")


def test_a_port_in_use_for_temporals_metrics_is_reported() -> None:
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot be served on {address}"):
            temporal_runtime(address)


def test_an_invalid_address_for_temporals_metrics_is_reported() -> None:
    with pytest.raises(ConfigError, match="--temporal-metrics: 'here' is not host:port"):
        temporal_runtime("here")


FAILS_ONCE = {"activity": True, "workflow": True}


@activity.defn
async def fails_once() -> None:
    if FAILS_ONCE.pop("activity", False):
        raise RuntimeError("the first attempt")


@workflow.defn(sandboxed=False)
class Measured:
    """A workflow whose first task fails, and whose activity fails once."""

    @workflow.run
    async def run(self) -> None:
        if FAILS_ONCE.pop("workflow", False):
            raise RuntimeError("the first task")
        retry = RetryPolicy(initial_interval=timedelta(milliseconds=1))
        await workflow.execute_activity(fails_once, start_to_close_timeout=timedelta(seconds=60), retry_policy=retry)


async def test_temporals_metrics_have_the_names_in_the_docs(temporal: Client) -> None:
    with socket.create_server((HOST, 0)) as probe:
        address = f"{HOST}:{probe.getsockname()[1]}"
    runtime = temporal_runtime(address)
    target = temporal.service_client.config.target_host
    client = await Client.connect(target, namespace=temporal.namespace, runtime=runtime)
    with pytest.raises(RPCError):
        await client.get_workflow_handle("there is none").describe()
    async with Worker(client, task_queue="measured", workflows=[Measured], activities=[fails_once]):
        await client.execute_workflow(Measured.run, id="measured", task_queue="measured")

    shown = await asyncio.to_thread(_read, address)

    missing = {name for name in TEMPORAL if f"\n{name}{{" not in f"\n{shown}"}
    assert missing == set()


def _read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        return str(answer.read().decode())
