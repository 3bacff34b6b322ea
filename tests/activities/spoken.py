"""Agents that answer what a test wants, over real gRPC on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from agent.v1 import agent_pb2_grpc
from everstep.model.machine import Machine
from tests.hosts import own_host

HOST = own_host(31)


@contextlib.asynccontextmanager
async def serving(agents: Sequence[agent_pb2_grpc.AgentServicer]) -> AsyncIterator[list[Machine]]:
    """Serve each agent on a port of its own; yields them as machines m0, m1, ..."""
    servers, machines = [], []
    for number, agent in enumerate(agents):
        server = grpc.aio.server()
        agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        servers.append(server)
        machines.append(Machine(name=f"m{number}", address=f"{HOST}:{port}"))
    try:
        yield machines
    finally:
        for server in servers:
            await server.stop(None)
