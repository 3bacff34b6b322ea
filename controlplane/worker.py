"""The worker process, which runs workflows, activities and a watcher.

It keeps no state, and may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import structlog
from temporalio.client import Client, Plugin
from temporalio.envconfig import ClientConfig
from temporalio.runtime import Runtime
from temporalio.worker import Worker

from activities.ledger.cleaning import keep_clean
from activities.ledger.ledger import Ledger
from activities.ledger.machine_events import EventWriter
from activities.notices.announcer import Announcer
from activities.payloads import data_converter
from activities.pool.requests import keep_pool
from activities.registry import functions
from activities.tools import Tools
from activities.versions.store import VersionStore
from activities.watching.leftovers import LeftoverCleaner
from activities.watching.training_time import TrainingTimes
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from controlplane.own_cluster import own_cluster
from controlplane.search_attributes import register
from controlplane.settings_files import notice_settings
from everstep import __version__
from everstep.base.backoff import Backoff
from everstep.base.log_once import LoggedErrors
from everstep.errors import ClusterError
from everstep.model.retention import Retention
from everstep.rank import environment
from workflows.registry import WORKFLOWS, sandbox
from workflows.start_activity import HEARTBEAT_THROTTLE, STICKY_TIMEOUT

log = structlog.get_logger("worker")

DEFAULT_ADDRESS = "localhost:7233"
CONNECT_RETRY_S = 0.5
LEDGER_RETRY_S = (0.5, 30.0)
"""The first and the longest wait before the ledger is opened again, seconds."""
BUILD = f"everstep-{__version__}"
"""Build id of the worker's code for Temporal. Without it the SDK hashes every loaded module, which takes 0.16 s of CPU
at each start."""
COLLECT_AFTER = (20_000, 20, 50)
"""Thresholds of Python's garbage collector. A full collection visits every object, and blocks the event loop meanwhile;
with the default thresholds, the rules of 1,000 machines would trigger it all the time."""


async def connect(plugins: Sequence[Plugin] = (), runtime: Runtime | None = None) -> Client:
    """Connect to Temporal with the user's configuration: Temporal's environment variables and profile file.

    Args:
        plugins: Plugins of the client; those that are also worker plugins apply to the client's workers too.
        runtime: Runtime of Temporal's SDK; None: the default runtime, which serves no metrics.

    Raises:
        ClusterError: Temporal does not answer.
    """
    config = ClientConfig.load_client_connect_config()
    address = config.get("target_host") or DEFAULT_ADDRESS
    config["target_host"] = address
    try:
        return await Client.connect(**config, data_converter=data_converter(), plugins=plugins, runtime=runtime)
    except RuntimeError as error:
        raise ClusterError(
            f"Temporal does not answer at {address} ({error}): start one with 'everstep up', or set TEMPORAL_ADDRESS"
        ) from error


def build(client: Client, tools: Tools, *, task_queue: str, max_cached_workflows: int = 1000) -> Worker:
    """Build a worker with all workflows and activities of everstep.

    Args:
        client: Client of Temporal.
        tools: Tools of its activities.
        task_queue: Task queue of the cluster's jobs.
        max_cached_workflows: Number of workflows that stay in memory between two tasks.
    """
    runner = sandbox()
    worker = Worker(
        client,
        task_queue=task_queue,
        workflows=list(WORKFLOWS),
        activities=functions(tools),
        workflow_runner=runner,
        build_id=BUILD,
        max_cached_workflows=max_cached_workflows,
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        graceful_shutdown_timeout=timedelta(seconds=2),
    )
    runner.drops_from(worker)
    return worker


async def connect_patiently(
    stopped: asyncio.Event, plugins: Sequence[Plugin] = (), runtime: Runtime | None = None
) -> Client | None:
    """Connect, and wait for a server that is not up yet, since workers often start first; None: a stop was requested
    before that."""
    while not stopped.is_set():
        try:
            return await connect(plugins, runtime)
        except ClusterError as error:
            log.warning("waiting for Temporal", error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), CONNECT_RETRY_S)
    return None


async def keep_ledger(ledger: Ledger, retention: Retention) -> None:
    """Open the ledger, and try again until that succeeds; then keep it clean. Meanwhile jobs start and recover without
    it."""
    wait, troubles = Backoff(*LEDGER_RETRY_S), LoggedErrors()
    while True:
        try:
            await ledger.call(Ledger.ready)
        except Exception as error:  # a damaged file may raise any error, and must not end the worker
            if troubles.is_new("ledger", error):
                log.warning("waiting for the ledger; jobs start and recover without it", error=str(error))
            await asyncio.sleep(wait.next_s())
        else:
            log.info("the ledger is open", ledger=str(ledger.url))
            break
    await keep_clean(ledger, retention)


async def run_worker(
    *,
    ledger_url: str,
    task_queue: str,
    plugins: Sequence[Plugin] = (),
    metrics: str = "",
    temporal_metrics: str = "",
    notices: Path | None = None,
    versions: str = "",
    retention: Retention | None = None,
) -> None:
    """Run a worker until SIGTERM or SIGINT.

    Args:
        ledger_url: URL of the ledger's database.
        task_queue: Task queue of the cluster's jobs.
        plugins: Plugins of Temporal's client.
        metrics: ``host:port`` on which Prometheus reads the worker's own metrics; empty: none are served.
        temporal_metrics: ``host:port`` for the metrics of Temporal's SDK; empty: none are served.
        notices: File with the receivers of notices; None: no receivers.
        versions: Folder or URL of the store of versions; empty: there is none.
        retention: How long the ledger keeps details, and how large it may become; None: the defaults.

    Raises:
        ConfigError: metrics cannot be served on an address, or the file of receivers is wrong.
        LedgerError: the URL of the ledger is wrong.
    """
    runtime = None
    if metrics or temporal_metrics:
        # These modules are imported here and below, since a worker without metrics does not need their library.
        from agent.exposition import parsed_address
        from controlplane.worker_metrics import temporal_runtime

        if metrics:
            parsed_address(metrics)
        runtime = temporal_runtime(temporal_metrics) if temporal_metrics else None
    receivers = notice_settings(notices)
    store = VersionStore(versions) if versions else None
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    client = await connect_patiently(stopped, plugins, runtime)
    if client is None:
        return
    await register(client)
    ledger = Ledger(ledger_url)
    agents = AgentClients()
    events = EventWriter(ledger)
    cluster = own_cluster()
    watcher = Watcher(client, agents, task_queue, events.accept, cluster)
    times = TrainingTimes(client, ledger, watcher.watched)
    gc.freeze()  # imported objects stay alive: the collector skips them from now on
    gc.set_threshold(*COLLECT_AFTER)
    tools = Tools(agents, ledger, watcher=watcher, cluster=cluster, notices=receivers, versions=store)
    worker = build(client, tools, task_queue=task_queue)
    log.info("worker is up", pid=os.getpid(), namespace=client.namespace, task_queue=task_queue, ledger=str(ledger.url))
    served = contextlib.AsyncExitStack()
    if metrics:
        from controlplane.worker_metrics import metrics_server

        await served.enter_async_context(metrics_server(metrics, watcher, events, times, task_queue))
    async with served, worker, asyncio.TaskGroup() as group:
        loops = [watcher.run(), events.run(), LeftoverCleaner(client, agents, task_queue).run(), times.run()]
        loops += [keep_ledger(ledger, retention or Retention()), keep_pool(client, task_queue)]
        if receivers.receiver:
            ui_url = os.environ.get(environment.UI_URL, "")
            loops.append(Announcer(client, receivers, task_queue, ui_url, paced_jobs=watcher.paced_jobs).run())
        running = [group.create_task(loop) for loop in loops]
        await stopped.wait()
        for task in running:
            task.cancel()
    await agents.close()
