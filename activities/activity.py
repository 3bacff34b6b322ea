"""The base of all activities: an activity is an effect on the outside world that a workflow asks for.

Each activity is a class derived from :class:`Activity`. Its fields are the input. The class also has the name, the time
limits, the code, and a line that describes the activity in Temporal's Web UI. ``activities/registry.py`` lists all
activities, and workflows start them by ``workflows.start_activity`` (ADR 0049). Workflows load these files, so heavy
modules (agents, the ledger, stores) are imported inside the methods that use them. Inputs are stored in histories, so
fields may only be added, and with defaults.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from everstep.model.message import Model

if TYPE_CHECKING:
    from activities.heartbeat import Say
    from activities.tools import Tools

Result = TypeVar("Result")

HEARTBEAT_TIMEOUT = timedelta(seconds=2)
"""The server retries an activity when its worker has sent no heartbeat for this time."""
FAST_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=5)
)
FEW_TRIES = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=3)
"""The retry policy of activities that the machine pool repeats anyway at a later poll."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The time limits of an activity, and its retry policy.

    The values decide how long a dead worker delays an incident; they were measured on Temporal 1.31
    (docs/architecture.md).
    """

    attempt: timedelta
    """The time limit of each attempt."""
    total: timedelta | None
    """The time limit of all attempts together; None: the activity is retried until it succeeds."""
    retry: RetryPolicy = field(default_factory=lambda: FAST_RETRY)


def twice(limit: timedelta) -> Bounds:
    """Return the bounds of an activity on machines: the limit for each attempt, and twice the limit for all attempts
    together."""
    return Bounds(limit, 2 * limit)


def within(limit: timedelta, retry: RetryPolicy = FAST_RETRY) -> Bounds:
    """Return the bounds of an activity whose attempts must all end within the limit, counted from the first one."""
    return Bounds(limit, limit, retry)


ASKED_OFTEN = 60
"""An activity that only waits asks this many times in quick succession before it asks less often."""
SOON, LATER = timedelta(seconds=1), timedelta(seconds=15)
"""The times between two such questions: at first, and later."""


def awaiting(question: timedelta, patience: timedelta) -> Bounds:
    """Return the bounds of an activity that asks whether something has happened, and fails with :func:`not_yet` until
    it has.

    Args:
        question: The time limit of each question.
        patience: How long it is asked.
    """
    return Bounds(question, patience, RetryPolicy(initial_interval=SOON, backoff_coefficient=1.0))


def not_yet(why: str, attempt: int) -> ApplicationError:
    """Return the error with which an activity says that it has to ask again.

    The server asks again after a pause. During the pause no worker is occupied, and the history does not grow.

    Args:
        why: What is still missing.
        attempt: The number of the question, from 1 on.
    """
    pause = SOON if attempt < ASKED_OFTEN else LATER
    return ApplicationError(why, type="NotYet", next_retry_delay=pause, category=ApplicationErrorCategory.BENIGN)


class Activity(Model, Generic[Result]):
    """An activity: the fields are its input, and the class has its name, its bounds and its code."""

    name: ClassVar[str]
    """The activity type in Temporal; histories contain this name."""

    @classmethod
    def result_type(cls) -> Any:
        """Return the type of the activity's result."""
        generics = [base.__pydantic_generic_metadata__ for base in cls.__mro__ if issubclass(base, Activity)]
        return next(generic["args"][0] for generic in generics if generic["origin"] is Activity)

    @abstractmethod
    def line(self) -> str:
        """Return a line for Temporal's timeline: what the activity works on, e.g. its machines."""

    @abstractmethod
    def bounds(self) -> Bounds:
        """Return the activity's time limits."""

    @abstractmethod
    async def perform(self, tools: Tools, say: Say) -> Result:
        """Do the work. An activity may run twice, and two attempts may overlap.

        Args:
            tools: The clients and stores of the worker.
            say: Shows a line about what the activity waits for.
        """
