"""Runs two agents without a control plane: one runs the ranks, and the other keeps their backups."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from activities.agents.convert import checkpoint_options, rank_launches, shared_environment
from agent.client import AgentClient
from agent.security import ClientSecurity, Presented
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable, ClusterError
from everstep.model.job import JobSpec
from everstep.system import private_files as private

HOST = "127.0.0.1"
START_S = 60.0
"""Time limit of each call and of an agent's start, seconds."""


class Agents:
    """Two agents with their folders. The class is an async context manager: it starts and ends both agents."""

    async def __aenter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self._shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-benchmark-"))
        self._token = self.folder / "token"
        private.replace(self._token, secrets.token_urlsafe())
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
        folders += ["--token-file", str(self._token)]
        command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", machine, "--listen", address]
        with (self.folder / f"{machine}.log").open("wb") as log:
            started = subprocess.Popen([*command, *folders], stdout=log, stderr=log)  # noqa: ASYNC220
        self._processes.append(started)
        client = AgentClient(address, Presented(ClientSecurity(token_file=self._token)))
        self._clients.append(client)
        deadline = time.monotonic() + START_S
        while True:
            try:
                await client.describe(timeout_s=2)
                return
            except AgentUnreachable:
                if time.monotonic() > deadline or started.poll() is not None:
                    text = (self.folder / f"{machine}.log").read_text()[-500:]
                    raise ClusterError(f"the agent of {machine} does not start: {text}") from None
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
        """Return the CPU seconds of each agent, without its children."""
        import psutil

        return [sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self._processes]

    async def train(self, spec: JobSpec, *, limit_s: float) -> None:
        """Run a job to its end on the first machine, with its backups on the second machine, then release it on both.

        Raises:
            ClusterError: a rank failed, or the job exceeded the time limit.
        """
        first, second = self._clients
        job, launches = spec.name, rank_launches(spec, 0)
        for client in (first, second):
            await client.prepare(pb.PrepareRequest(request_id="prepare", job=job), timeout_s=START_S)
        store = await first.start_store(
            pb.StartStoreRequest(request_id="store", job=job, generation=1), timeout_s=START_S
        )
        request = pb.LaunchRequest(
            request_id="launch",
            job=job,
            generation=1,
            program=pb.Program(
                script=spec.script, args=spec.args, env=shared_environment(spec, store.host, store.port, 1)
            ),
            ranks=launches,
            resume_step=0,
            checkpoint=checkpoint_options(spec),
        )
        if spec.checkpoint.backup:
            for launch in launches:
                request.peers.add(rank=launch.rank, machine="m1", address=second.address)
        await first.launch(request, timeout_s=START_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._finished(job, len(launches))
        except TimeoutError:
            raise ClusterError(f"{job} did not end within {limit_s:.0f} s") from None
        finally:
            for client in self._clients:
                stop = pb.StopRequest(request_id="stop", job=job, generation=1)
                await client.stop(stop, timeout_s=START_S)
                await client.release(pb.ReleaseRequest(request_id="release", job=job), timeout_s=START_S)

    async def _finished(self, job: str, ranks: int) -> None:
        """Wait until all ranks have ended with success, and keep their last progress in ``newest``."""
        async for reply in self._clients[0].progress(pb.ProgressRequest(job=job, interval_s=0.5)):
            self.newest = list(reply.ranks)
            ended = [rank for rank in reply.ranks if not rank.alive]
            failed = [rank for rank in ended if rank.exit.kind != pb.Exit.CODE or rank.exit.value]
            if failed:
                log = b"".join(
                    [
                        chunk.data
                        async for chunk in self._clients[0].read_log(
                            pb.ReadLogRequest(job=job, rank=failed[0].rank, tail_bytes=2000)
                        )
                    ]
                )
                raise ClusterError(f"rank {failed[0].rank} failed: {log.decode(errors='replace')[-1000:]}")
            if len(ended) == ranks:
                return
