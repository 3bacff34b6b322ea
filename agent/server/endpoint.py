"""This module makes the gRPC server of an agent or of a fake agent, with its options, its port and health checks."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from agent.security import Interceptor
from everstep.errors import ConfigError

SERVICE = "everstep.agent.v1.Agent"
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not a second listener
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def listening(
    address: str, credentials: grpc.ServerCredentials | None = None, interceptors: Sequence[Interceptor] = ()
) -> tuple[grpc.aio.Server, int]:
    """Make a server that has its port and is not started yet.

    Args:
        address: ``host:port``; port 0 is any free port.
        credentials: TLS credentials; None: no TLS.
        interceptors: Interceptors of every call.

    Returns:
        The server, and its port.

    Raises:
        ConfigError: the port is in use, or the machine does not have the address.
    """
    server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"the agent cannot listen on {address}: the port is taken or the address is not of this machine"
        ) from error
    return server, port


async def add_health(server: grpc.aio.Server) -> None:
    """Add a health service that reports "serving" to a server that is not started yet."""
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
