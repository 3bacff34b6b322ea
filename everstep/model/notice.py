"""Defines a notice about an event that needs a person, and the result of the notice's delivery.

These models are sent through Temporal and are stored in histories, so fields are only added, with defaults. Receivers
get ``Notice.body``, which changes only in the same way.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from everstep.model.message import Model, Words

NOTICE_WORKFLOW = "Notice"
"""Type of the workflow that delivers a notice."""
PATIENCE_S = 24 * 3600.0
"""If a receiver does not accept a notice, the delivery is repeated for this long, seconds."""


class NoticeKind(Words):
    """The kinds of events. Receivers choose by these names."""

    PARKED = "parked"
    """A job is stopped and waits for an operator or for machines."""
    BREAKER_TRIPPED = "breaker-tripped"
    """More machines would be evicted than the policy allows without an operator."""
    POOL_SHORT = "pool-short"
    """There are fewer standby machines than wanted."""
    POOL_EMPTY = "pool-empty"
    """There is no standby machine left."""
    EVICTED_TWICE = "evicted-twice"
    """A machine was evicted again."""
    JOB_FAILED = "job-failed"
    """A job ended without being finished or stopped by an operator."""
    SAVES_CHANGED = "saves-changed"
    """A job saves its state after another number of steps, since its saves take longer or shorter than before."""
    TEST = "test"
    """A person tests whether notices arrive."""


class Notice(Model):
    """A notice about one event."""

    kind: NoticeKind
    id: str
    """Id of the event. It is equal whenever and wherever the same event is noticed."""
    text: str
    """The event in one line for people, with what to do about it."""
    time_ns: int
    """When the event happened, nanoseconds of the wall clock."""
    cluster: str = ""
    """Task queue of the cluster."""
    job: str = ""
    incident: str = ""
    machines: list[str] = Field(default_factory=list)
    link: str = ""
    """Page in Temporal's Web UI; empty: its address is not known."""

    def body(self) -> bytes:
        """The bytes that a receiver gets: one line of JSON in UTF-8."""
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
    """A notice and its receivers."""

    notice: Notice
    receivers: list[str]
    """Names of receivers in the notices file of the workers."""
    patience_s: float = PATIENCE_S


class NoticeResult(Model):
    """The result of a delivery. The fields are shown in this order."""

    headline: str
    taken: dict[str, str] = Field(default_factory=dict)
    """Receiver that accepted it → its answer."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Receiver that did not accept it in time → the error of the last try."""


def notice_workflow_id(task_queue: str, event: str) -> str:
    """Id of the workflow that delivers the notice of an event. An event has one workflow, however often it is seen."""
    return f"notice/{task_queue}/{event}"


def stamp(time_ns: int) -> str:
    """A time in the id of an event: ``20261123-233131.042``."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y%m%d-%H%M%S.%f")[:-3]
