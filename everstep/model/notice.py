"""What somebody is told: an event that needs a person, and what came of telling it.

These models cross Temporal and are stored in histories: fields are only added, with
defaults. ``Notice.body`` is what receivers get, and as stable.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from everstep.model.message import Model, Words

NOTICE_WORKFLOW = "Notice"
"""Type of the workflow that delivers one."""
PATIENCE_S = 24 * 3600.0
"""A receiver that does not take a notice is tried again for so long, seconds."""


class NoticeKind(Words):
    """What it is about. Receivers choose by these names."""

    PARKED = "parked"
    """A job is stopped, and waits for an operator or for machines."""
    BREAKER_TRIPPED = "breaker-tripped"
    """More machines would be evicted than the policy allows without an operator."""
    POOL_SHORT = "pool-short"
    """Fewer machines can take the place of others than there should be."""
    POOL_EMPTY = "pool-empty"
    """None can."""
    EVICTED_TWICE = "evicted-twice"
    """A machine was evicted again."""
    JOB_FAILED = "job-failed"
    """A job ended, and was neither finished nor stopped by somebody."""
    TEST = "test"
    """Somebody wants to know whether notices arrive."""


class Notice(Model):
    """One event."""

    kind: NoticeKind
    id: str
    """Of the event: who sees it again, in another process or later, gives it the same one."""
    text: str
    """For people: one line, with what to do where there is something."""
    time_ns: int
    """Of the event, nanoseconds of the wall clock."""
    cluster: str = ""
    """Task queue of the cluster."""
    job: str = ""
    incident: str = ""
    machines: list[str] = Field(default_factory=list)
    link: str = ""
    """Page in Temporal's Web UI; empty: it is not known where that is."""

    def body(self) -> bytes:
        """What a receiver gets: JSON in one line, UTF-8."""
        fields: dict[str, Any] = {
            "kind": self.kind,
            "id": self.id,
            "time": datetime.fromtimestamp(self.time_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "text": self.text,
            "cluster": self.cluster,
            "job": self.job,
            "incident": self.incident,
            "machines": self.machines,
            "link": self.link,
        }
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


class NoticeInput(Model):
    """A notice, and who is to get it."""

    notice: Notice
    receivers: list[str]
    """Names in the file of the workers."""
    patience_s: float = PATIENCE_S


class NoticeResult(Model):
    """What came of it. Field order is the order shown."""

    headline: str
    taken: dict[str, str] = Field(default_factory=dict)
    """Receiver that took it → what it answered."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Receiver that did not take it in time → why, the last time that it was tried."""


def notice_workflow_id(task_queue: str, event: str) -> str:
    """Id of the workflow that delivers the notice of an event: there is one, whoever saw the event."""
    return f"notice/{task_queue}/{event}"


def stamp(time_ns: int) -> str:
    """A time in the id of an event: ``20261123-233131.042``."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y%m%d-%H%M%S.%f")[:-3]
