"""Measures the transfer of code to machines: to real agents, and to a thousand simulated ones."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from activities.agents.call_all import on_all
from activities.agents.ship import Shipment
from activities.versions.snapshot import folder_snapshot
from activities.versions.store import VersionStore
from agent.client import AgentClient, AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.model.machine import Machine
from everstep.model.version import CodeVersion

FILE_MB, MB = 20, 1_000_000
HOST = "127.0.0.33"
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Shipped:
    """The transfer of one snapshot to some machines."""

    packed_s: float
    """Seconds until the snapshot was in the store."""
    seconds: float
    """Seconds until the last machine had the snapshot."""
    bytes: int
    machines: int


async def ship(agents: AgentClients, machines: Sequence[Machine], *, megabytes: float) -> Shipped:
    """Make a snapshot that cannot be compressed, and send it to machines.

    Raises:
        TimeoutError: a machine did not get the snapshot.
    """
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder, store = Path(name) / "code", VersionStore(f"{name}/versions")
        await asyncio.to_thread(_fill, folder, megabytes)
        began = time.monotonic()
        with await asyncio.to_thread(folder_snapshot, folder) as taken:
            await store.put("bench", CodeVersion(code=taken.digest, script="train.py"), taken)
            packed_s, size = time.monotonic() - began, taken.bytes
            began = time.monotonic()
            async with Shipment(store, taken.digest, _silent) as shipment:

                async def supply(_: Machine, client: AgentClient) -> bool:
                    await shipment.supply(client)
                    return True

                _, silent = await on_all(agents, machines, supply, patience_s=PATIENCE_S, say=_silent)
        if silent:
            raise TimeoutError(f"{len(silent)} machines did not get it: {list(silent)[:3]}")
        return Shipped(packed_s, time.monotonic() - began, size, len(machines))


async def ship_to_simulated(count: int, *, megabytes: float) -> Shipped:
    """Send a snapshot to simulated agents in this process. They unpack nothing, so only the cost of sending counts."""
    fakes = [
        FakeAgent(f"machine-{index:04d}", has_code=pb.HasCodeReply(), put_code=pb.PutCodeReply())
        for index in range(count)
    ]
    try:
        for fake in fakes:
            await fake.start(f"{HOST}:0")
        machines = [Machine(name=fake.machine, address=fake.address) for fake in fakes]
        agents = AgentClients()
        try:
            return await ship(agents, machines, megabytes=megabytes)
        finally:
            await agents.close()
    finally:
        await asyncio.gather(*(fake.stop() for fake in fakes))


def _fill(folder: Path, megabytes: float) -> None:
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    left, number = int(megabytes * MB), 0
    while left > 0:
        size = min(left, FILE_MB * MB)
        (folder / f"part-{number}").write_bytes(os.urandom(size))
        left, number = left - size, number + 1


def _silent(_: str) -> None:
    """Ignore a line of progress."""
