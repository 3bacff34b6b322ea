"""This module has the client of an agent, with a method for each rpc; it converts gRPC's errors to errors of everstep.

By default, environment variables name the files: ``EVERSTEP_AGENT_CA_FILE`` (if it is set,
TLS is used), ``EVERSTEP_AGENT_TOKEN_FILE``, and, for a client certificate, ``EVERSTEP_AGENT_CERT_FILE`` and
``EVERSTEP_AGENT_KEY_FILE``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from agent.security import CA_FILE, CERT_FILE, KEY_FILE, ClientSecurity, Presented
from agent.statuses import error_of
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.base.addresses import is_loopback, parse_address
from everstep.errors import AgentError, AgentRefuses, AgentUnreachable, CodeMissing, UnknownJob

OPTIONS: list[tuple[str, Any]] = [
    # A restarted agent is reached again within 0.5 s; gRPC's default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # This is also the time limit for making a connection, TLS included. Connections to many machines at once, or to
    # distant machines, need this much time.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # These pings let an open stream detect a machine that vanished.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # Agents are reached directly, without an internet proxy.
    ("grpc.enable_http_proxy", 0),
]

CONNECTING = 64
"""The largest number of connections that are made at the same time."""
TURN_S = 0.2
"""If a client needs longer than this to connect, seconds, the next client may connect too: the machine may be gone."""

VERIFY_FAILED = "CERTIFICATE_VERIFY_FAILED"
"""Part of gRPC's message if the agent's certificate is not accepted."""
UNDER_WAY = {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING}

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class AgentClient:
    """The client of an agent. Every method may raise the errors that :func:`translate` returns.

    Args:
        address: ``host:port`` of the agent.
        presented: CA, token and certificate; by default from the environment.
        gate: Limits how many clients connect at the same time; by default there is no limit.
    """

    def __init__(self, address: str, presented: Presented | None = None, gate: asyncio.Semaphore | None = None) -> None:
        self.address = address
        self._gate = gate
        self._presented = presented or Presented(ClientSecurity.from_environment())
        self._present()
        self._open()

    def _open(self) -> None:
        """Make a channel with the present certificates."""
        credentials = self._keys.credentials()
        self.tls = credentials is not None
        if credentials:
            self.channel = grpc.aio.secure_channel(self.address, credentials, options=OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        self._stub = agent_pb2_grpc.AgentStub(self.channel)

    def _present(self) -> None:
        self._keys = self._presented.keys
        self._metadata = self._keys.metadata()

    async def _error_of(self, error: grpc.aio.AioRpcError) -> Exception:
        """Return the error of everstep for a failed call; after a refusal, the next call presents what the files have
        now."""
        translated = translate(self.address, error, tls=self.tls)
        if isinstance(translated, AgentRefuses):
            await self._renewed()
        return translated

    async def _renewed(self) -> bool:
        """Read the files again; returns whether this client presents something else from now on."""
        await self._presented.reload()
        before = self._keys
        self._present()
        if replace(before, token=self._keys.token) != self._keys:
            self._open()
        return before != self._keys

    async def describe(self, *, timeout_s: float | None = 5.0) -> pb.DescribeReply:
        """Describe the machine and the jobs on it."""
        return await self._call(self._stub.Describe, pb.DescribeRequest(), timeout_s)

    async def prepare(self, request: pb.PrepareRequest, *, timeout_s: float | None = None) -> pb.PrepareReply:
        """Start the job's fork server and wait for it."""
        return await self._call(self._stub.Prepare, request, timeout_s)

    async def start_store(self, request: pb.StartStoreRequest, *, timeout_s: float | None = None) -> pb.StartStoreReply:
        """Start the rendezvous store of a generation."""
        return await self._call(self._stub.StartStore, request, timeout_s)

    async def has_code(self, digests: Iterable[str], *, timeout_s: float | None = 10.0) -> list[str]:
        """Return which of the named snapshots of code the machine has."""
        return list((await self._call(self._stub.HasCode, pb.HasCodeRequest(digests=digests), timeout_s)).digests)

    async def put_code(
        self, digest: str, size: int, archive: AsyncIterable[bytes], *, timeout_s: float | None = None
    ) -> pb.PutCodeReply:
        """Send a snapshot of code to the machine.

        Args:
            digest: The snapshot's name.
            size: Size of the archive, bytes.
            archive: Pieces of the archive; reading stops if the machine has the snapshot already.
            timeout_s: Limit for the whole transfer, seconds.
        """

        async def chunks() -> AsyncIterator[pb.CodeChunk]:
            yield pb.CodeChunk(digest=digest, bytes=size)
            async for piece in archive:
                yield pb.CodeChunk(data=piece)

        try:
            await self._connect()
            return await self._stub.PutCode(chunks(), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error

    async def try_code(self, request: pb.TryCodeRequest, *, timeout_s: float | None = None) -> pb.TryCodeReply:
        """Run a script until it joins the job. This trial is independent of the ranks of the job."""
        return await self._call(self._stub.TryCode, request, timeout_s)

    async def align_ranks(self, request: pb.AlignRanksRequest, *, timeout_s: float | None = 5.0) -> pb.AlignRanksReply:
        """Make all ranks wait at the end of the same step, or end this wait."""
        return await self._call(self._stub.AlignRanks, request, timeout_s)

    async def launch(self, request: pb.LaunchRequest, *, timeout_s: float | None = None) -> pb.LaunchReply:
        """Start this machine's ranks of a generation."""
        return await self._call(self._stub.Launch, request, timeout_s)

    async def stop(self, request: pb.StopRequest, *, timeout_s: float | None = None) -> pb.StopReply:
        """Kill the ranks of generations and fence these generations; returns evidence and checkpoints."""
        return await self._call(self._stub.Stop, request, timeout_s)

    async def checkpoints(
        self, request: pb.CheckpointsRequest, *, timeout_s: float | None = None
    ) -> pb.CheckpointsReply:
        """List the copies of a job's state on the machine, in memory and on disk; kills nothing."""
        return await self._call(self._stub.Checkpoints, request, timeout_s)

    async def check_storage(
        self, request: pb.CheckStorageRequest, *, timeout_s: float | None = None
    ) -> pb.CheckStorageReply:
        """Explain why the machine cannot write to the locations of checkpoints."""
        return await self._call(self._stub.CheckStorage, request, timeout_s)

    async def restore(self, request: pb.RestoreRequest, *, timeout_s: float | None = None) -> pb.RestoreReply:
        """Copy states into the machine's own slots, and verify them."""
        return await self._call(self._stub.Restore, request, timeout_s)

    async def persist(self, request: pb.PersistRequest, *, timeout_s: float | None = 5.0) -> pb.PersistReply:
        """Request that a future step is written to disk as well."""
        return await self._call(self._stub.Persist, request, timeout_s)

    async def align_backups(
        self, request: pb.AlignBackupsRequest, *, timeout_s: float | None = 5.0
    ) -> pb.AlignBackupsReply:
        """Notify the agent of the step that every rank has, and of the step to back up next."""
        return await self._call(self._stub.AlignBackups, request, timeout_s)

    async def pace_saves(self, request: pb.PaceSavesRequest, *, timeout_s: float | None = 5.0) -> pb.PaceSavesReply:
        """Ask the ranks to save after another number of steps."""
        return await self._call(self._stub.PaceSaves, request, timeout_s)

    async def open_exchange(
        self, request: pb.OpenExchangeRequest, *, timeout_s: float | None = 5.0
    ) -> pb.OpenExchangeReply:
        """Return the addresses and the token for sending and fetching state; for calls by other agents."""
        return await self._call(self._stub.OpenExchange, request, timeout_s)

    async def inspect(self, *, timeout_s: float | None = 5.0) -> pb.InspectReply:
        """Return the newest results of the machine's inspections."""
        return await self._call(self._stub.Inspect, pb.InspectRequest(), timeout_s)

    async def check_setup(self, request: pb.CheckSetupRequest, *, timeout_s: float | None = 30.0) -> pb.CheckSetupReply:
        """Check what the agent needs of its machine or container."""
        return await self._call(self._stub.CheckSetup, request, timeout_s)

    async def clear(self, reason: str, *, timeout_s: float | None = 15.0) -> pb.ClearReply:
        """Forget events and baselines of a reason code, and inspect again."""
        return await self._call(self._stub.Clear, pb.ClearRequest(reason=reason), timeout_s)

    async def release(self, request: pb.ReleaseRequest, *, timeout_s: float | None = None) -> pb.ReleaseReply:
        """End the job on the machine."""
        return await self._call(self._stub.Release, request, timeout_s)

    async def acknowledge(
        self, request: pb.AcknowledgeRequest, *, timeout_s: float | None = 5.0
    ) -> pb.AcknowledgeReply:
        """Acknowledge observations, so that the agent need not keep them any more."""
        return await self._call(self._stub.Acknowledge, request, timeout_s)

    def observe(self, request: pb.ObserveRequest) -> AsyncIterator[pb.Observation]:
        """Stream the observations after a number, and then new observations. The stream does not end by itself."""
        return self._stream(self._stub.Observe, request)

    def progress(self, request: pb.ProgressRequest) -> AsyncIterator[pb.ProgressReply]:
        """Stream the progress of each rank, at each change and once a second. The stream does not end by itself."""
        return self._stream(self._stub.Progress, request)

    def steps(self, request: pb.StepsRequest) -> AsyncIterator[pb.StepsReply]:
        """Stream the step records that are kept for a job."""
        return self._stream(self._stub.Steps, request)

    def read_log(self, request: pb.ReadLogRequest) -> AsyncIterator[pb.LogChunk]:
        """Stream the captured output of a rank."""
        return self._stream(self._stub.ReadLog, request)

    def diagnose(self, request: pb.DiagnoseRequest) -> AsyncIterator[pb.DiagnoseReply]:
        """Run diagnostic tests; each result is sent when its test ends."""
        return self._stream(self._stub.Diagnose, request)

    async def sample(self, request: pb.SampleRequest, *, timeout_s: float | None = None) -> pb.SampleReply:
        """Sample the current state of the processes of a job's ranks."""
        return await self._call(self._stub.Sample, request, timeout_s)

    async def stacks(self, request: pb.StacksRequest, *, timeout_s: float | None = None) -> pb.StacksReply:
        """Return whole stacks and flight records of a sample."""
        return await self._call(self._stub.Stacks, request, timeout_s)

    async def close(self) -> None:
        """Close the connection; streams end."""
        await self.channel.close(None)

    async def __aenter__(self) -> AgentClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], request: Request, timeout_s: float | None
    ) -> Reply:
        channel = self.channel  # it stays open until this call ends, also if later calls use another one
        try:
            await self._connect()
            try:
                return await method(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED or not await self._renewed():
                    raise
                return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        finally:
            del channel

    async def _stream(
        self, method: grpc.aio.UnaryStreamMultiCallable[Request, Reply], request: Request
    ) -> AsyncIterator[Reply]:
        await self._connect()
        channel = self.channel
        call = method(request, metadata=self._metadata)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        finally:
            call.cancel()
            del channel

    async def _connect(self) -> None:
        """If many clients connect, wait for this client's turn. The call that follows shows whether it is connected."""
        state = self.channel.get_state()
        if self._gate is None or state is not grpc.ChannelConnectivity.IDLE:
            return
        async with self._gate:
            state = self.channel.get_state(try_to_connect=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    while state in UNDER_WAY:
                        await self.channel.wait_for_state_change(state)
                        state = self.channel.get_state(try_to_connect=True)


def translate(address: str, error: grpc.aio.AioRpcError, *, tls: bool = False) -> Exception:
    """Return the error of everstep for a gRPC status; ``agent/statuses.py`` has the table of both."""
    details = error.details() or error.code().name
    kind = error_of(error.code())
    if kind is AgentRefuses or VERIFY_FAILED in details:
        other = ". It is of another release" if error.code() is grpc.StatusCode.UNIMPLEMENTED else ""
        return AgentRefuses(
            f"the agent at {address} and this process do not accept each other: {details}"
            f"{other}{_tls_hint(address, details, tls=tls)}"
        )
    if kind is AgentUnreachable:
        return AgentUnreachable(
            f"the agent at {address} did not answer: {details}{_tls_hint(address, details, tls=tls)}"
        )
    return kind(
        f"the agent at {address} refused: {details}" if kind in (AgentError, UnknownJob, CodeMissing) else details
    )


def _tls_hint(address: str, details: str, *, tls: bool) -> str:
    """Return the likely mistake with certificates, if gRPC's own message does not name it."""
    if VERIFY_FAILED in details:
        return f". Its certificate is not signed by the authority in {CA_FILE}, has expired, or names another host"
    if tls and ("Socket closed" in details or "handshake" in details.lower()):
        return f". If agents require client certificates, name one in {CERT_FILE} and {KEY_FILE}"
    if "Socket closed" in details and not is_loopback(parse_address(address).host):
        return f". Perhaps it uses TLS: name its authority in {CA_FILE}"
    return ""


class AgentClients:
    """The clients of all agents by address; each client is made once."""

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self._security = security or ClientSecurity.from_environment()
        self._presented: Presented | None = None
        self._clients: dict[str, AgentClient] = {}
        self._gate = asyncio.Semaphore(CONNECTING)

    def get(self, address: str) -> AgentClient:
        """Return the client of an address."""
        if address not in self._clients:
            self._presented = self._presented or Presented(self._security)
            self._clients[address] = AgentClient(address, self._presented, self._gate)
        return self._clients[address]

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
