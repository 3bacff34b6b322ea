"""Measures the activity that diagnoses a thousand machines: its seconds, the events of the history, and their bytes.

On one computer run a real Temporal server, a worker that has only this activity, and simulated agents with real gRPC
(``benchmarks/scale_agents.py``). The time of the tests themselves is not included.

    python -P benchmarks/diagnose.py --machines 1024
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from datetime import timedelta
from typing import Any, cast

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.agents.diagnose_machines import DiagnoseMachines
from activities.registry import function
from activities.tools import Tools
from agent.client import AgentClients
from benchmarks.common import Row, finish, say, show, show_json
from benchmarks.scale import Agents, temporal
from everstep.model.diagnosis import BETWEEN_MACHINES, Diagnosis, Diagnostic
from workflows.start_activity import start_activity

ODD = "machine-0007"
"""The machine whose bits differ in the simulation."""


@workflow.defn
class DiagnoseOnly:
    """A workflow that runs only the activity."""

    @workflow.run
    async def run(self, activity: DiagnoseMachines) -> Diagnosis:
        """Run the activity."""
        return await start_activity(activity)


async def measure(client: Client, agents: Agents, tests: list[str], found: dict[str, float]) -> str:
    """Run one diagnosis, and add its figures to ``found``; return what is wrong with its answer, or ""."""
    pool, name = AgentClients(), " ".join(tests) if len(tests) == 1 else f"{len(tests)} tests"
    async with Worker(
        client,
        task_queue="diagnose",
        workflows=[DiagnoseOnly],
        activities=[function(DiagnoseMachines, Tools(pool, cast(Any, None)))],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_heartbeat_throttle_interval=timedelta(milliseconds=300),
    ):
        began = time.monotonic()
        handle = await client.start_workflow(
            DiagnoseOnly.run,
            DiagnoseMachines(machines=agents.machines, tests=tests),
            id=f"diagnose-{uuid.uuid4().hex[:8]}",
            task_queue="diagnose",
        )
        answer = await handle.result()
        found[f"{name}: whole diagnosis, s"] = time.monotonic() - began
    await pool.close()
    history = await handle.fetch_history()
    results = [event.activity_task_completed_event_attributes for event in history.events]
    found[f"{name}: events of the history, count"] = float(len(history.events))
    found[f"{name}: result of the activity, kB"] = sum(one.ByteSize() for one in results) / 1000
    found[f"{name}: whole history, kB"] = sum(event.ByteSize() for event in history.events) / 1000
    expected = [ODD] if Diagnostic.BITWISE in tests else []
    return "" if answer.faulty == expected else f"{name}: named {answer.faulty}, not {expected}"


async def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, float] = {}
    problems = []
    alone = [str(test) for test in Diagnostic if test not in BETWEEN_MACHINES]
    async with temporal() as (client, _):
        agents = await asyncio.to_thread(Agents, given.machines)
        try:
            for tests in (alone, [str(Diagnostic.ALL_GATHER)], [str(test) for test in Diagnostic]):
                say(f"{', '.join(tests)} on {given.machines} machines")
                problems.append(await measure(client, agents, tests, found))
        finally:
            agents.close()
    rows = [Row(name, name.rpartition(", ")[2], value, None) for name, value in found.items()]
    title = f"a diagnosis of {given.machines} machines"
    show_json(title, rows) if given.json else show(title, rows)
    finish([problem for problem in problems if problem])


if __name__ == "__main__":
    asyncio.run(main())
