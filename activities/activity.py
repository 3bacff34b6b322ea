"""What an activity is: something that a workflow asks of the outside world.

Each activity is one file, with a class derived from :class:`Activity`: its fields are the input, and the class has the
name, the bounds, the line for people and the code. ``activities/registry.py`` lists all of them, and workflows start
them by ``workflows.start_activity`` (ADR 0049). Workflows load these files, so the code imports what is heavy (agents,
the ledger, stores) where it runs. Inputs are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from temporalio.common import RetryPolicy

from everstep.model.message import Model

if TYPE_CHECKING:
    from activities.heartbeat import Say
    from activities.tools import Tools

Result = TypeVar("Result")

HEARTBEAT_TIMEOUT = timedelta(seconds=2)
"""An activity of a dead worker is tried elsewhere after this long."""
FAST_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=5)
)
FEW_TRIES = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=3)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long an activity may take, and how it is tried again.

    The values decide how long a dead worker delays an incident; they were measured on Temporal 1.31
    (docs/architecture.md).
    """

    attempt: timedelta
    """Limit of one attempt."""
    total: timedelta | None
    """Limit of all attempts together; None: it is tried until it succeeds."""
    retry: RetryPolicy = field(default_factory=lambda: FAST_RETRY)


def twice(limit: timedelta) -> Bounds:
    """Bounds of an activity on machines: an attempt has the limit, and all of them together twice as long."""
    return Bounds(limit, 2 * limit)


def within(limit: timedelta, retry: RetryPolicy = FAST_RETRY) -> Bounds:
    """Bounds of an activity whose attempts have the limit all together."""
    return Bounds(limit, limit, retry)


class Activity(Model, Generic[Result]):
    """The input of an activity, with all else that it is."""

    name: ClassVar[str]
    """How Temporal calls it; histories have this name."""

    @classmethod
    def result_type(cls) -> Any:
        """The type of its result."""
        return cls.__mro__[1].__pydantic_generic_metadata__["args"][0]  # type: ignore[attr-defined]

    @abstractmethod
    def line(self) -> str:
        """What it does, for people who read the timeline."""

    @abstractmethod
    def bounds(self) -> Bounds:
        """How long it may take."""

    @abstractmethod
    async def perform(self, tools: Tools, say: Say) -> Result:
        """Do it. It may run twice, and overlap with itself.

        Args:
            tools: What its worker has.
            say: Takes what it waits for, for people.
        """
