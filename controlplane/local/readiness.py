"""Waits until all processes of a cluster are ready; an error names the process that is not ready, and the reason."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from controlplane.local.cluster_file import ClusterFile
from controlplane.local.plan import State
from controlplane.local.temporal_server import TemporalChoice
from everstep.errors import ClusterError

if TYPE_CHECKING:
    from temporalio.client import Client

T = TypeVar("T")

LIMIT_S = 90.0
"""A process that does not answer within this time counts as failed, seconds."""
DEATHS = 3
"""A process that dies this many times during the wait counts as failed."""
POLL_S = 0.05


class DeathWatch:
    """Raises an error if an awaited process dies again and again, or is not ready in time."""

    def __init__(self, home: Path, names: list[str], what: str) -> None:
        self._home, self._names, self._what = home, names, what
        self._deadline = time.monotonic() + LIMIT_S
        self._before: dict[str, int] = {}

    def check(self, reason: str = "") -> None:
        """Check once.

        Args:
            reason: Why the newest attempt failed.

        Raises:
            ClusterError: a process dies again and again, or the time is over; the message has the last line of its log.
        """
        for name, running in State.load(self._home).processes.items():
            if name not in self._names:
                continue
            if running.restarts - self._before.setdefault(name, running.restarts) >= DEATHS:
                raise ClusterError(f"{name} dies repeatedly after its start: {self._log(name)}")
        if time.monotonic() > self._deadline:
            logs = "; ".join(self._log(name) for name in self._names)
            because = f" ({reason})" if reason else ""
            raise ClusterError(f"{self._what} not ready after {LIMIT_S:.0f} s{because}: {logs}")

    def _log(self, name: str) -> str:
        path = self._home / "logs" / f"{name}.log"
        return f"{path} ends with {last_line(path)!r}"


def last_line(path: Path) -> str:
    """Return the last line with text in a log; "" if there is no such line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also from inside a running event loop."""
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


async def connect(choice: TemporalChoice, address: str, namespace: str) -> Client:
    """A client of the cluster's server; for a configured server, TLS and key are taken from its profile.

    Raises:
        RuntimeError: the server does not answer.
    """
    from temporalio.client import Client
    from temporalio.envconfig import ClientConfig

    if choice.address:
        return await Client.connect(**ClientConfig.load_client_connect_config())
    return await Client.connect(address, namespace=namespace)


async def temporal_ready(choice: TemporalChoice, cluster: ClusterFile, names: list[str]) -> None:
    """Wait until the server answers for the namespace, with all search attributes registered.

    Raises:
        ClusterError: it does not answer, or a configured server lacks the namespace.
    """
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.service import RPCError, RPCStatusCode

    from controlplane import search_attributes

    watch = DeathWatch(cluster.home, names, f"Temporal at {cluster.temporal_address} is")
    while True:
        try:
            client = await connect(choice, cluster.temporal_address, cluster.namespace)
            await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=cluster.namespace))
            await search_attributes.register(client)
            return
        except RPCError as error:
            if choice.address and error.status == RPCStatusCode.NOT_FOUND:
                raise ClusterError(
                    f"the configured server {choice.address} has no namespace {cluster.namespace!r}: create it with "
                    f"'temporal operator namespace create --namespace {cluster.namespace}', or set TEMPORAL_NAMESPACE"
                ) from error
            reason = str(error)
        except RuntimeError as error:
            if choice.address:  # a configured server is not started here, so waiting does not help
                raise ClusterError(
                    f"the configured Temporal server {choice.address} does not answer ({error}): start it, or unset "
                    "TEMPORAL_ADDRESS to use a local server"
                ) from error
            reason = str(error)
        watch.check(reason)
        await asyncio.sleep(POLL_S)


async def workers_poll(choice: TemporalChoice, cluster: ClusterFile, names: list[str]) -> None:
    """Wait until every worker process polls the task queue.

    Raises:
        ClusterError: a worker does not poll the task queue.
    """
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
    from temporalio.service import RPCError

    workers = f"the worker {names[0]} is" if len(names) == 1 else f"the workers {', '.join(names)} are"
    watch = DeathWatch(cluster.home, names, workers)
    client = await connect(choice, cluster.temporal_address, cluster.namespace)
    request = DescribeTaskQueueRequest(
        namespace=cluster.namespace,
        task_queue=TaskQueue(name=cluster.task_queue),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    )
    while True:
        try:
            pollers = (await client.workflow_service.describe_task_queue(request)).pollers
        except RPCError as error:
            watch.check(str(error))
            await asyncio.sleep(POLL_S)
            continue
        # A dead poller stays in the list for minutes, so its length proves nothing. Instead, search the identities of
        # the pollers for the pids of live workers.
        polling = {number for poller in pollers for number in re.findall(r"\d+", poller.identity)}
        processes = State.load(cluster.home).processes
        if all(name in processes and str(processes[name].pid) in polling for name in names):
            return
        watch.check("not all workers poll the task queue")
        await asyncio.sleep(POLL_S)


def agent_serves(cluster: ClusterFile, machine: str, address: str) -> None:
    """Wait until an agent answers its health check with SERVING.

    Raises:
        ClusterError: the agent does not serve.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from agent.security import ClientSecurity

    security = ClientSecurity(ca_file=cluster.agents_ca, token_file=cluster.token_file)
    keys = security.read()
    token, credentials = keys.metadata(), keys.credentials()
    name = f"agent-{machine}"
    watch = DeathWatch(cluster.home, [name], f"{name} at {address} is")
    # Each attempt has its own gRPC pool. Otherwise, after a refused connection, the next attempt would wait for gRPC's
    # back-off.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
    while True:
        with (
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        ) as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, metadata=token)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                reason = "its health is not SERVING"
            except grpc.RpcError as error:
                reason = error.details() if isinstance(error, grpc.Call) else str(error)
        watch.check(reason)
        time.sleep(POLL_S)


def holds(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true; returns False if it is still false after this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
