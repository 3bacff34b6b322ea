"""The parts of an urgent update's time, one after the other, from the request to the first step with the new code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from temporalio.client import WorkflowHandle

from activities.agents.align_ranks import AlignRanks
from activities.agents.check_version import CheckVersion
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.stop_ranks import StopRanks
from activities.make_version import MakeVersion
from benchmarks.timeline import PARTS as RECOVERY_PARTS
from benchmarks.timeline import parts_between
from everstep.model.launch import Confirmation

BEFORE = ("ask", "make", "try", "open", "align", "stop", "decide", "launch")
"""The parts before the ranks run, in order. Each part ends with an event:

- ask: the job begins to make the version;
- make: the version is in the store;
- try: all machines have the version, and have run it until it joined the job;
- open: the incident asks the ranks to align;
- align: all ranks wait at the end of a step;
- stop: all ranks have ended;
- decide: the launch is scheduled;
- launch: the last rank is forked.

The further parts are those of a recovery."""
PARTS = (*BEFORE, *RECOVERY_PARTS[5:])


@dataclass(slots=True)
class Seen:
    """The activities of a history: name → time at which the newest one was scheduled or completed, nanoseconds."""

    scheduled: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def of(cls, handle: WorkflowHandle[object, object], *, since_ns: int) -> Seen:
        """Read the history of a workflow, from a time on."""
        seen, kinds = cls(), dict[int, str]()
        async for event in handle.fetch_history_events():
            at = event.event_time.ToNanoseconds()
            if at < since_ns:
                continue
            if event.HasField("activity_task_scheduled_event_attributes"):
                kinds[event.event_id] = event.activity_task_scheduled_event_attributes.activity_type.name
                seen.scheduled[kinds[event.event_id]] = at
            elif event.HasField("activity_task_completed_event_attributes"):
                over = kinds.get(event.activity_task_completed_event_attributes.scheduled_event_id, "")
                seen.completed[over] = at
        return seen


def parts_of(began_ns: int, seconds: float, job: Seen, incident: Seen, found: Confirmation) -> Mapping[str, float]:
    """Part → seconds.

    Args:
        began_ns: Time of the request, nanoseconds.
        seconds: Time until all ranks had completed a step with the new code.
        job: Activities of the job since the request.
        incident: Activities of the incident that applied the update.
        found: The confirmation of the incident.
    """
    within = found.parts
    forked_ns = found.stepped_ns - int(sum(within.values()) * 1e9)
    ends = {
        "ask": job.scheduled.get(MakeVersion.name, 0),
        "make": job.completed.get(MakeVersion.name, 0),
        "try": job.completed.get(CheckVersion.name, 0),
        "open": incident.scheduled.get(AlignRanks.name, 0),
        "align": incident.completed.get(AlignRanks.name, 0),
        "stop": incident.completed.get(StopRanks.name, 0),
        "decide": incident.scheduled.get(LaunchRanks.name, 0),
        "launch": forked_ns,
    }
    at = forked_ns
    for name in PARTS[len(ends) :]:
        at += int(within.get(name, 0.0) * 1e9)
        ends[name] = at
    return parts_between(seconds, began_ns, [(name, ends[name]) for name in PARTS])
