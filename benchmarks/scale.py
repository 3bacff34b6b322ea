"""Measures a worker that watches thousands of machines: while nothing happens, and after faults.

There are three faults: one rank is killed, all ranks exit, and the agents of a third of the machines stop. A real
Temporal server, a real worker with its watcher, and simulated agents with real gRPC but without ranks
(``benchmarks/scale_agents.py``) run on one computer. ``--against`` also measures the worker of another checkout.

    python -P benchmarks/scale.py --machines 500
    python -P benchmarks/scale.py --machines 1000 --against ../everstep-before --json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.payloads import DATA_CONVERTER
from benchmarks.common import Row, finish, say, show, show_json
from controlplane.local import temporal_binary
from controlplane.local.temporal_server import DYNAMIC_CONFIG
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import TASK_QUEUE, JobState, job_workflow_id
from everstep.model.machine import Machine
from workflows import attributes
from workflows.job import JobWorkflow

HERE = Path(__file__).resolve().parent
JOB, RANKS = "large", 8
WATCH_S, PHASE_S = 15.0, 180.0
"""Time for which the worker is measured while it watches, and longest time of an incident, seconds."""


class DidNotEnd(Exception):
    """A phase exceeded its time limit."""


@dataclass(slots=True)
class Side:
    """The worker of one checkout."""

    code: Path
    found: dict[str, float] = field(default_factory=dict)
    """Name of a figure → its value."""
    failed: list[str] = field(default_factory=list)


class Worker:
    """The process of a worker, and the resources that it uses."""

    def __init__(self, side: Side, folder: Path, address: str) -> None:
        blocked = folder / "blocked"
        blocked.write_bytes(bytes(16))
        environment = os.environ | {"PYTHONPATH": str(side.code), "TEMPORAL_ADDRESS": address}
        command = [sys.executable, "-P", str(HERE / "scale_worker.py"), str(blocked), f"sqlite:///{folder}/ledger.db"]
        with (folder / "worker.log").open("wb") as log:
            self._process = psutil.Popen(command, env=environment, stderr=log, stdout=log, cwd=folder)
        with blocked.open("r+b") as file:
            self._blocked = mmap.mmap(file.fileno(), 16)

    def begin(self) -> tuple[float, float]:
        """Begin a phase; returns the argument for :meth:`cost`."""
        self._blocked[:16] = bytes(16)
        return time.monotonic(), self._cpu_s()

    def cost(self, began: tuple[float, float]) -> dict[str, float]:
        """Return the resources used since the phase began: name of a figure → its value."""
        cpu_s = self._cpu_s() - began[1]
        blocked_s, blocked_cpu_s = struct.unpack("dd", self._blocked[:16])
        return {
            "CPU of the worker, s": cpu_s,
            "cores of the worker": cpu_s / (time.monotonic() - began[0]),
            "loop blocked at most, s": blocked_s,
            "loop blocked at most, s of its CPU": blocked_cpu_s,
            "memory, MB": float(self._process.memory_info().rss / 1e6),
        }

    def close(self) -> None:
        """End the worker."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(20)
        if self._process.is_running():
            self._process.kill()

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class Agents:
    """The simulator's process."""

    def __init__(self, machines: int) -> None:
        command = [sys.executable, "-P", str(HERE / "scale_agents.py"), "--machines", str(machines), "--job", JOB]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.machines = [Machine.model_validate(machine) for machine in json.loads(self._line())]

    def do(self, command: str) -> int:
        """Send a command to the simulator; returns the time by the wall clock, nanoseconds."""
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        """End the simulator."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


@contextlib.asynccontextmanager
async def temporal() -> AsyncIterator[tuple[Client, str]]:
    """Run a Temporal server; yields a client, and the address."""
    found = temporal_binary.installed(say) or temporal_binary.obtain(say)
    settings = [part for pair in DYNAMIC_CONFIG.items() for part in ("--dynamic-config-value", "=".join(pair))]
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(found[0]),
        dev_server_startup_timeout=timedelta(seconds=60),
        dev_server_extra_args=settings,
        dev_server_log_level="error",
        search_attributes=attributes.ALL,
        data_converter=DATA_CONVERTER,
    ) as environment:
        yield environment.client, environment.client.service_client.config.target_host


class Measuring:
    """Measures one side, from the start of a job to its end."""

    def __init__(self, side: Side, client: Client, worker: Worker, agents: Agents) -> None:
        self._side, self._client, self._worker, self._agents = side, client, worker, agents
        self._handle: Any = client.get_workflow_handle(job_workflow_id(JOB))

    async def run(self) -> None:
        """Run all phases; a phase that fails ends the run, and earlier figures stay."""
        try:
            await self._start()
            await self._watch("watching")
            await self._incident("one rank killed", "kill 5", 1)
            await self._incident("all ranks exit", "exit", 2)
            self._agents.do("refuse 0.33")
            await self._watch("a third refuses")
        except DidNotEnd as error:
            self._side.failed.append(str(error))

    async def _start(self) -> None:
        began, cost = time.monotonic(), self._worker.begin()
        machines = self._agents.machines
        spec = JobSpec(name=JOB, script="/job.py", machines=len(machines), ranks_per_machine=RANKS, tp=RANKS)
        state = JobState(spec=spec, machines=machines)
        await self._client.start_workflow(
            JobWorkflow.run, state, id=self._handle.id, task_queue=TASK_QUEUE, task_timeout=timedelta(seconds=3)
        )
        await self._until("the job runs", lambda state: state.status == "running")
        self._note("start: job runs, s", time.monotonic() - began)
        self._costs("start", cost)

    async def _watch(self, phase: str) -> None:
        await asyncio.sleep(5.0)  # the work of the last phase ends
        cost = self._worker.begin()
        await asyncio.sleep(WATCH_S)
        self._costs(phase, cost)

    async def _incident(self, phase: str, fault: str, number: int) -> None:
        cost = self._worker.begin()
        fault_ns = self._agents.do(fault)
        state = await self._until(phase, lambda state: len(state.incidents) >= number and state.status == "running")
        self._costs(phase, cost)
        incident = state.incidents[number - 1]
        handle: Any = self._client.get_workflow_handle(incident.id, result_type=IncidentReport)
        opened = (await handle.describe()).start_time
        self._note(f"{phase}: incident begun, s", opened.timestamp() - fault_ns / 1e9)
        report: IncidentReport = await handle.result()
        for stage in ("stop", "decide", "reattempt", "confirm"):
            took_s = sum(timing.seconds for timing in report.timings if timing.name == stage)
            self._note(f"{phase}: {stage} took, s", took_s)
        self._note(f"{phase}: recovered, s", report.seconds or 0.0)

    async def _until(self, phase: str, ready: Any) -> JobState:
        deadline = time.monotonic() + PHASE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # the worker is busy, or not up yet
                state: JobState = await self._handle.query(
                    "state", result_type=JobState, rpc_timeout=timedelta(seconds=10)
                )
                if ready(state):
                    return state
            await asyncio.sleep(0.25)
        raise DidNotEnd(f"{self._side.code}: {phase}: not within {PHASE_S:.0f} s")

    def _costs(self, phase: str, cost: tuple[float, float]) -> None:
        for name, value in self._worker.cost(cost).items():
            self._note(f"{phase}: {name}", value)

    def _note(self, name: str, value: float) -> None:
        self._side.found[name] = value
        say(f"  {name}: {value:.3f}")


async def measure(side: Side, machines: int) -> None:
    """Measure one side with a Temporal server and agents of its own."""
    say(f"{side.code}, {machines} machines:")
    with tempfile.TemporaryDirectory(prefix="everstep-scale-") as folder:
        async with temporal() as (client, address):
            agents = await asyncio.to_thread(Agents, machines)
            worker = Worker(side, Path(folder), address)
            try:
                await Measuring(side, client, worker, agents).run()
            finally:
                worker.close()
                agents.close()
                if side.failed:
                    say((Path(folder) / "worker.log").read_text()[-3000:])


async def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=500, help="number of simulated machines, with 8 ranks each")
    parser.add_argument("--against", type=Path, help="folder of another checkout, whose worker is measured too")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sides = [Side(HERE.parent)] + ([Side(given.against.resolve())] if given.against else [])
    for side in sides:
        await measure(side, given.machines)
    names = dict.fromkeys(name for side in sides for name in side.found)
    other = sides[1].found if len(sides) > 1 else {}
    rows = [Row(name, name.rpartition(", ")[2], sides[0].found.get(name), other.get(name)) for name in names]
    title = f"{given.machines} machines x {RANKS} ranks"
    show_json(title, rows) if given.json else show(title, rows)
    finish([text for side in sides for text in side.failed])


if __name__ == "__main__":
    asyncio.run(main())
