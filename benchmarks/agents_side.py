"""Two agents without a control plane: one runs the ranks, the other keeps their backups."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.client import AgentClient
from agent.v1 import agent_pb2 as pb
from everstep import environment
from everstep.errors import AgentUnreachable, ClusterError

HOST = "127.0.0.1"
START_S = 60.0


class Agents:
    """An async context manager; its folders and processes go with it."""

    async def __aenter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self._shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-benchmark-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients: list[AgentClient] = []
        try:
            for machine in ("m0", "m1"):
                await self._start(machine)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _start(self, machine: str) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            address = f"{HOST}:{probe.getsockname()[1]}"
        folders = ["--state-dir", str(self.folder / machine), "--shm-dir", str(self._shm / machine)]
        command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", machine, "--listen", address]
        with (self.folder / f"{machine}.log").open("wb") as log:
            started = subprocess.Popen([*command, *folders], stdout=log, stderr=log)  # noqa: ASYNC220
        self._processes.append(started)
        client = AgentClient(address)
        self._clients.append(client)
        deadline = time.monotonic() + START_S
        while True:
            try:
                await client.describe(timeout_s=2)
                return
            except AgentUnreachable:
                if time.monotonic() > deadline or started.poll() is not None:
                    text = (self.folder / f"{machine}.log").read_text()[-500:]
                    raise ClusterError(f"the agent of {machine} does not come: {text}") from None
                await asyncio.sleep(0.05)

    async def _end(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for client in self._clients:
            await client.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        shutil.rmtree(self._shm, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def cpu_s(self) -> list[float]:
        """CPU seconds that each agent has used, its children not counted."""
        import psutil

        return [sum(psutil.Process(one.pid).cpu_times()[:2]) for one in self._processes]

    async def train(
        self, script: Path, args: Sequence[str], *, job: str, ranks: int, backup: bool, limit_s: float
    ) -> None:
        """Run a job of so many ranks on the first machine to its end, and release it.

        Raises:
            ClusterError: a rank failed, or it took too long.
        """
        first, second = self._clients
        for client in (first, second):
            await client.prepare(pb.PrepareRequest(request_id="prepare", job=job), timeout_s=START_S)
        store = await first.start_store(
            pb.StartStoreRequest(request_id="store", job=job, generation=1, world_size=ranks), timeout_s=START_S
        )
        shared = {
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            environment.TOPOLOGY: f"1,{ranks},1,1,pp-dp-tp",
        }
        request = pb.LaunchRequest(
            request_id="launch",
            job=job,
            generation=1,
            script=str(script),
            args=args,
            env=shared,
            resume_step=0,
            checkpoint=pb.CheckpointOptions(
                slots=3, overlap=True, backup=backup, backup_slots=2, backup_every_steps=1, backup_chunk_mb=4.0
            ),
        )
        for rank in range(ranks):
            request.ranks.add(rank=rank, local_rank=rank, env={"RANK": str(rank), "LOCAL_RANK": str(rank)})
            if backup:
                request.peers.add(rank=rank, machine="m1", address=second.address)
        await first.launch(request, timeout_s=START_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._finished(job, ranks)
        except TimeoutError:
            raise ClusterError(f"{job} did not end within {limit_s:.0f} s") from None
        finally:
            for client in self._clients:
                stop = pb.StopRequest(request_id="stop", job=job, generation=1)
                await client.stop(stop, timeout_s=START_S)
                await client.release(pb.ReleaseRequest(request_id="release", job=job), timeout_s=START_S)

    async def _finished(self, job: str, ranks: int) -> None:
        """Wait until all ranks have ended well; their backups' progress is noted on the way."""
        async for reply in self._clients[0].progress(pb.ProgressRequest(job=job, interval_s=0.5)):
            self.newest = list(reply.ranks)
            ended = [one for one in reply.ranks if not one.alive]
            bad = [one for one in ended if one.exit.kind != pb.Exit.CODE or one.exit.value]
            if bad:
                log = b"".join(
                    [
                        chunk.data
                        async for chunk in self._clients[0].read_log(
                            pb.ReadLogRequest(job=job, rank=bad[0].rank, tail_bytes=2000)
                        )
                    ]
                )
                raise ClusterError(f"rank {bad[0].rank} failed: {log.decode(errors='replace')[-1000:]}")
            if len(ended) == ranks:
                return
