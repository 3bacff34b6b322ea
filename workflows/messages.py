"""Inputs and results of the workflows, and the checks of the messages that they receive.

Temporal accepts invalid signals too. So signals are validated here, and an invalid signal is shown and does not fail
the workflow.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from temporalio.exceptions import ApplicationError

from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import NOT_YET, SHOWN_ALREADY, JobState, ShareTrained
from everstep.model.machine import Machine
from everstep.model.message import Model
from everstep.model.pool import OperatorMove
from everstep.model.replay import GroupRun

M = TypeVar("M", bound=BaseModel)
NEEDS_A_STEP = {Symptom.HANG, Symptom.UNSAVED, Symptom.MACHINE_SILENT}
"""Symptoms that are possible only after the generation completed a step."""


class ReplayCarried(Model):
    """The state that a replay passes to its next run when it continues as new."""

    repeat: int
    """The number of repeats of both phases so far."""
    began: float
    """The start of the workflow's first run, seconds since the epoch."""
    runs: list[GroupRun] = Field(default_factory=list)
    """The trials of groups; equal trials are folded (``everstep.decisions.blame.replay.kept_runs``)."""


class ReplayInput(Model):
    """The input of a replay of a job on groups of its machines."""

    job: str
    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """The id of the job's run; see ``everstep.model.run_id``."""
    why: str = ""
    """Why the replay is the next step, as text."""
    first_step_s: float = 0.0
    """The longest time from a start of the job to its first step, seconds; 0: it is not known."""
    carried: ReplayCarried | None = None
    """The state of a replay that continued as new; None: the replay begins."""


class JobResult(Model):
    """The result of a job. The Web UI shows the fields in this order."""

    headline: str
    outcome: str
    generations: int
    incidents: list[str]


class OperatorRequest(BaseModel):
    """The operator who sends a request, and the reason."""

    model_config = ConfigDict(extra="forbid")

    operator: str = Field(min_length=1, max_length=100)
    note: str = Field(default="", max_length=1000)
    accept_loss: bool = Field(
        default=False, description="Resume from the step that is certain, although a newer step may exist."
    )


def check_generation(generation: int) -> None:
    """Refuse an invalid generation.

    Raises:
        ValueError: the number is below 1.
    """
    if generation < 1:
        raise ValueError(f"generation is {generation}; generations start at 1")


def check_report(state: JobState, anomaly: Anomaly) -> None:
    """Refuse a report with an invalid generation, or one that is too early.

    Raises:
        ValueError: the generation is below 1.
        ApplicationError: the generation must be confirmed first; the type is ``NOT_YET``.
    """
    check_generation(anomaly.generation)
    started = anomaly.generation == state.generation and state.status != "starting"
    if anomaly.symptom in NEEDS_A_STEP and anomaly.generation >= state.generation and not started:
        raise ApplicationError(f"{anomaly.symptom}: generation {anomaly.generation} is not confirmed yet", type=NOT_YET)


def check_trained(state: JobState, share: ShareTrained) -> None:
    """Refuse a share of training time that the job shows already.

    Raises:
        ApplicationError: the job shows it already; the type is ``SHOWN_ALREADY``.
    """
    if (share.ettr, share.last_hour) == (state.ettr, state.ettr_last_hour):
        raise ApplicationError("the job shows this share already", type=SHOWN_ALREADY)


EXAMPLES: dict[type[BaseModel], str] = {
    OperatorRequest: '{"operator": "you", "note": "why"}',
    OperatorMove: '{"machine": "m3", "operator": "you", "reason": "why"}',
}
"""Type of a request → an example of it as JSON."""


def read_request(kind: type[M], raw: Any, *more: Any) -> M | str:
    """Return an operator's request of a type, or why it was rejected.

    A handler must accept any number of arguments, because a wrong number would fail the workflow's task again and
    again.
    """
    if more:
        return f"{1 + len(more)} arguments; send one: {EXAMPLES[kind]}"
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc'])) or 'input'}: {e['msg']}" for e in error.errors())
        return f"{str(raw)[:80]!r}: {'; '.join(problems)}; send {EXAMPLES[kind]}"


def read_list(kind: type[M], raw: Any) -> list[M]:
    """Return the list in a signal of the job or its incidents; empty: the signal is invalid."""
    try:
        return [kind.model_validate(item) for item in raw]
    except (TypeError, ValidationError):
        return []
