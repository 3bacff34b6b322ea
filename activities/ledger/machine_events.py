"""Writes machine events (e.g. an agent is back, a fork server died) into the ledger, without delaying the watcher."""

from __future__ import annotations

import asyncio

import structlog

from activities.ledger.ledger import Ledger
from activities.ledger.records import MachineEventRecord
from agent.reporting.observations import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.base.backoff import Backoff

RETRY_S = (1.0, 30.0)
"""The first and the longest wait before the ledger is tried again, seconds."""
TOGETHER = 500
"""The largest number of events in one transaction."""

log = structlog.get_logger("ledger")
Written = asyncio.Future[None]


class EventWriter:
    """Writes the machine events of a worker. Several workers may write the same event, several times."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: asyncio.Queue[tuple[MachineEventRecord, Written]] = asyncio.Queue()
        self.waiting = 0
        """The number of events that the ledger does not have yet."""

    def accept(self, observation: pb.Observation) -> Written:
        """Accept an observation.

        Returns:
            A future that is done once the ledger has the event. Until then the observation must not be acknowledged.
        """
        written: Written = asyncio.get_running_loop().create_future()
        self.waiting += 1
        # The queue has no limit of its own: the agents limit how many observations they keep.
        self._queue.put_nowait((event_of(observation), written))
        return written

    async def run(self) -> None:
        """Write events until cancelled; a write that failed is repeated until the ledger is reachable again."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < TOGETHER and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            wait = Backoff(*RETRY_S)
            while True:
                try:
                    await self._ledger.call(Ledger.machine_events_seen, [event for event, _ in batch])
                    break
                except Exception as error:
                    log.warning("the ledger did not store machine events yet; they are written again", error=str(error))
                    await asyncio.sleep(wait.next_s())
            self.waiting -= len(batch)
            for _, written in batch:
                if not written.done():
                    written.set_result(None)


def event_of(observation: pb.Observation) -> MachineEventRecord:
    """Return the ledger's row of an observation."""
    return MachineEventRecord(
        observation=observation.id,
        machine=observation.machine,
        job=observation.job,
        time_ns=observation.time_ns,
        kind=observation.WhichOneof("what") or "unknown",
        text=event_text(observation),
    )


def event_text(observation: pb.Observation) -> str:
    """Return a line about a machine event."""
    match observation.WhichOneof("what"):
        case "agent_started":
            started = observation.agent_started
            return f"agent started (pid {started.pid}), adopted {started.adopted_ranks} ranks"
        case "fork_server_died":
            return f"fork server (pid {observation.fork_server_died.pid}) died; its ranks continue"
        case "machine_finding":
            found = finding_of(observation.machine_finding.finding)
            over = "not active any more: " if observation.machine_finding.over else ""
            whose = f"owner: {found.owner}, remedy: {found.remedy}"
            return f"{over}{found.verdict}: {found.headline} ({found.reason}; {whose})"
        case "metric_noted":
            return f"rank {observation.metric_noted.rank}: {observation.metric_noted.text}"
        case other:
            return str(other)
