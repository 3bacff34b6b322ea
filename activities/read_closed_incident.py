"""Read closed incident: read from the history what an incident did before it was closed from outside.

The job must know the generations that the incident launched, for two reasons. An agent does not start a fenced
generation, so no number may be used twice. And the copies of a generation count only if the job knows at which step the
generation began. A closed workflow cannot be queried, but Temporal keeps its history.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field
from temporalio import activity
from temporalio.api.common.v1 import Payload
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.activity import Activity, Bounds
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.stop_ranks import StopRanks
from activities.heartbeat import Say
from everstep.decisions.keep.lineage import FROM_NOTHING
from everstep.model.evidence import Evidence
from everstep.model.incident import Left
from everstep.model.launch import Launched
from everstep.model.message import Model

if TYPE_CHECKING:
    from activities.tools import Tools

T = TypeVar("T")
CHARACTERS = 200
"""The largest number of characters of a person's reason."""


class Begun(Model):
    """The relevant part of the state with which a run of an incident began."""

    resume_step: int = -1
    emptied: list[str] = Field(default_factory=list)
    launches: list[tuple[int, int]] = Field(default_factory=list)


class LaunchBegun(Model):
    """The relevant part of a launch's input."""

    generation: int
    resume_step: int
    reshard_from: str = ""


class ReadClosedIncident(Activity[Left]):
    """Read what an incident had done when it was closed; the activity is retried until Temporal answers."""

    name = "Read closed incident"

    incident: str
    """The id of the incident's workflow."""

    def line(self) -> str:
        return f"launches of {self.incident}"

    def bounds(self) -> Bounds:
        return Bounds(timedelta(minutes=2), None)

    async def perform(self, tools: Tools, say: Say) -> Left:
        return await read_closed(activity.client(), self.incident)


async def read_closed(client: Client, incident: str) -> Left:
    """Return what an incident had done when it was closed, from the history of its newest run. The input of this run
    has the launches of earlier runs."""
    reader = Reader(client)
    try:
        async for event in client.get_workflow_handle(incident).fetch_history_events():
            await reader.apply(event)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return Left(how="deleted from outside", known=False)
        raise
    return reader.left


class Reader:
    """Follows the events of one run."""

    def __init__(self, client: Client) -> None:
        self._converter = client.data_converter
        self._launch = 0
        """The id of the event that scheduled the newest launch; 0: there was none."""
        self._stops: set[int] = set()
        self._cancelled_by = ""
        self.left = Left(how="closed from outside")

    async def apply(self, event: HistoryEvent) -> None:
        """Apply the next event."""
        match event.WhichOneof("attributes"):
            case "workflow_execution_started_event_attributes":
                begun = await self._read(event.workflow_execution_started_event_attributes.input.payloads, Begun)
                self._learn(launches=begun.launches, resume_step=begun.resume_step, emptied=begun.emptied)
            case "activity_task_scheduled_event_attributes":
                await self._scheduled(event)
            case "activity_task_completed_event_attributes":
                await self._completed(event)
            case _:
                self._closed(event)

    async def _scheduled(self, event: HistoryEvent) -> None:
        scheduled = event.activity_task_scheduled_event_attributes
        if scheduled.activity_type.name == StopRanks.name:
            self._stops.add(event.event_id)
            self._learn(launched=None)
        elif scheduled.activity_type.name == LaunchRanks.name:
            launch = await self._read(scheduled.input.payloads, LaunchBegun)
            begun = FROM_NOTHING if launch.reshard_from else launch.resume_step
            self._launch = event.event_id
            self._learn(
                launches=[*self.left.launches, (launch.generation, begun)],
                resume_step=launch.resume_step,
                launched=None,
                emptied=[],
            )

    async def _completed(self, event: HistoryEvent) -> None:
        completed = event.activity_task_completed_event_attributes
        if completed.scheduled_event_id == self._launch and self._launch:
            self._learn(launched=await self._read(completed.result.payloads, Launched))
        elif completed.scheduled_event_id in self._stops:
            evidence = await self._read(completed.result.payloads, Evidence)
            self._learn(emptied=sorted({*self.left.emptied, *evidence.emptied}))

    def _closed(self, event: HistoryEvent) -> None:
        match event.WhichOneof("attributes"):
            case "workflow_execution_cancel_requested_event_attributes":
                request = event.workflow_execution_cancel_requested_event_attributes
                self._cancelled_by = _by(request.identity, request.cause)
            case "workflow_execution_canceled_event_attributes":
                self._learn(how=f"cancelled{self._cancelled_by}")
            case "workflow_execution_terminated_event_attributes":
                ended = event.workflow_execution_terminated_event_attributes
                self._learn(how=f"terminated{_by(ended.identity, ended.reason)}")
            case "workflow_execution_failed_event_attributes":
                failure = event.workflow_execution_failed_event_attributes.failure.message
                self._learn(how=f"ended by an error of its own: {failure[:CHARACTERS]}")
            case "workflow_execution_timed_out_event_attributes":
                self._learn(how="ended by a time-out of Temporal")

    def _learn(self, **changes: Any) -> None:
        self.left = self.left.model_copy(update=changes)

    async def _read(self, payloads: Sequence[Payload], kind: type[T]) -> T:
        values: list[T] = await self._converter.decode(payloads, [kind])
        return values[0]


def _by(identity: str, reason: str) -> str:
    """Return e.g. `` by ada@host: too slow``, with the parts that are known."""
    return (f" by {identity}" if identity else "") + (f": {' '.join(reason.split())[:CHARACTERS]}" if reason else "")
