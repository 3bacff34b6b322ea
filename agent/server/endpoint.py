"""This module makes the gRPC server of an agent or of a fake agent, with its options, its port and health checks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from agent.security import Interceptor
from everstep.base.addresses import Address, Ports, parse_address_with_ports
from everstep.errors import ConfigError
from everstep.system.listening import listen

SERVICE = "everstep.agent.v1.Agent"
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not a second listener
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def listening(
    address: str, credentials: grpc.ServerCredentials | None = None, interceptors: Sequence[Interceptor] = ()
) -> tuple[grpc.aio.Server, Address]:
    """Make a server that has its port and is not started yet.

    Args:
        address: ``host:port``, or ``host:first-last`` for the first free port of a range; port 0 is any free port.
        credentials: TLS credentials; None: no TLS.
        interceptors: Interceptors of every call.

    Returns:
        The server, and its address.

    Raises:
        ConfigError: no port is free, the machine does not have the address, or it is no address.
    """
    try:
        host, ports = parse_address_with_ports(address)
    except ValueError as error:
        raise ConfigError(f"the agent cannot listen: {error}") from error
    server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
    for port in ports:
        wanted = str(Address(host, port))
        with contextlib.suppress(RuntimeError):
            taken = server.add_secure_port(wanted, credentials) if credentials else server.add_insecure_port(wanted)
            return server, Address(host, taken)
    raise ConfigError(f"the agent cannot listen on {address}: {_why(host, ports)}")


def _why(host: str, ports: Ports) -> str:
    """Return why no port could be used. gRPC does not say why."""
    try:
        listen(host, ports).close()
    except OSError as error:
        return error.strerror or str(error)
    return f"gRPC does not accept {host}, although its ports are free"


async def add_health(server: grpc.aio.Server) -> None:
    """Add a health service that reports "serving" to a server that is not started yet."""
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
