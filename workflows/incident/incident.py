"""An incident, shared by its stages: its state, its timeline, the operator's signals, and ways to wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.evict.plan_evictions import counts
    from everstep.decisions.act.recover.incident_state import Continued, IncidentState
    from everstep.decisions.act.versions.next_version import VersionChange
    from everstep.model.eviction import Eviction, named
    from everstep.model.evidence import Evidence
    from everstep.model.job_state import incident_workflow_id, job_workflow_id
    from everstep.model.ladder import Rung
    from everstep.model.machine import Machine
    from everstep.model.pool import Replaced
    from everstep.model.stage import Stage
    from everstep.model.version import JobVersion
    from workflows import web_ui
    from workflows.incident.timeline import IncidentTimeline
    from workflows.messages import OperatorRequest, read_request
    from workflows.start_activity import TASK_TIMEOUT

T = TypeVar("T")
LEDGER_S = 5.0
"""The longest wait for entries to reach the ledger before an incident continues as new."""


class Abandoned(Exception):  # control flow: an operator ended the incident
    """An operator, or the end of the job, ended the incident."""


@dataclass(frozen=True, slots=True)
class Secured:
    """Machines that must leave a job, and the machines that are ready to replace them."""

    leaving: list[Eviction]
    replaced: Replaced
    unfit: list[Eviction]
    """Replacements that could not be made ready."""


class Incident:
    """The incident of one workflow; its stages are functions that take it as an argument."""

    def __init__(self, state: IncidentState) -> None:
        self.state = state
        """The state that outlives this run of the workflow."""
        self.id = incident_workflow_id(state.job, state.number)
        self.timeline = IncidentTimeline(state, self.id)
        self.first_step_s = 0.0
        """The time from the last launch to its first step, seconds; 0: no step was seen."""
        self.noted: Evidence | None = None
        """The newest evidence that was written into the ledger."""
        self.answer: str | None = None
        """The operator's answer while the job is parked."""
        self.accepting = False
        """Whether the operator accepts that the job resumes from a certain step although a newer step may exist."""
        self.answered_by = ""
        """The operator who answered."""
        self.abandoned_by = ""
        self.parked_by = ""
        """The rule that parked the job last; empty: none did."""
        self.asked_rung: Rung | None = None
        """The rung of the ladder that an operator must approve; None: there is none."""
        self.overtaken = ""
        """A more urgent report about the job that arrived meanwhile; empty: there is none."""
        self.secured: Secured | None = None
        """Machines that were leased while the ranks continued."""

    def begin_again(self) -> None:
        """Begin again because an operator wants it: earlier attempts do not count any more."""
        self.state.operator.begun_again_ns = workflow.time_ns()
        self.state.begin_again()

    @property
    def looks_again(self) -> bool:
        """Return whether the incident continued as new while it was parked. It must then ask the machines again."""
        return self.state.continued is Continued.PARKED

    # The actions of an operator.

    @property
    def approvable(self) -> str:
        """Return what an approval allows, e.g. ``m2 (silent-machine) may leave``."""
        if self.state.evictions.waiting or self.asked_rung is None:
            return f"{named(self.state.evictions.waiting)} may leave"
        return f"{self.asked_rung} may begin for"

    def apply(self, answer: str, raw: Any, more: tuple[Any, ...]) -> None:
        """Apply a signal; an invalid signal is shown on the page."""
        request = read_request(OperatorRequest, raw, *more)
        if isinstance(request, str):
            self.timeline.reject(f"{answer}: {request}")
            return
        who = request.operator + (f" ({request.note})" if request.note else "")
        if answer == "abandon":
            self.abandoned_by = self.abandoned_by or who
        elif answer == "approve" and (refused := self.not_to_approve):
            self.timeline.reject(f"approve by {who}: {refused}")
        elif self.timeline.stage == Stage.PARKED:
            self.answer, self.answered_by, self.accepting = answer, who, request.accept_loss
        else:
            self.timeline.reject(f"resume by {who}: the incident is not parked, it is at stage {self.timeline.stage}")

    @property
    def not_to_approve(self) -> str:
        """Return why there is nothing to approve, and what to do instead; empty: there is something."""
        if self.timeline.stage != Stage.PARKED:
            return f"there is nothing to approve: the job is not parked, its incident is at stage {self.timeline.stage}"
        if not self.state.evictions.waiting and self.asked_rung is None:
            return (
                f"there is nothing to approve: the job is parked for another reason, {self.timeline.reason}; "
                "'resume' tries again, 'abandon' gives the job up"
            )
        return ""

    # The machines of the job.

    def silent_for(self, unreachable: list[str]) -> dict[str, float]:
        """Return for how long each machine has not answered, seconds."""
        now = workflow.time()
        return {name: now - self.state.evictions.silent_since.get(name, now) for name in unreachable}

    def dying_for(self, dying: Iterable[str]) -> dict[str, float]:
        """Return for how long each machine has had killed ranks that are not gone, seconds."""
        now = workflow.time()
        return {name: now - self.state.evictions.dying_since.get(name, now) for name in dying}

    def heard(self, unreachable: Iterable[str], dying: Iterable[str], asked: float) -> None:
        """Note which machines did not answer a stop, and which have killed ranks that are not gone.

        Args:
            unreachable: Machines without an answer.
            dying: Machines with such ranks.
            asked: The time of the stop on the workflow's clock.
        """
        evictions = self.state.evictions
        evictions.silent_since = {name: evictions.silent_since.get(name, asked) for name in unreachable}
        evictions.dying_since = {name: evictions.dying_since.get(name, asked) for name in dying}

    async def change_machines(self, machines: list[Machine], leaving: list[Eviction]) -> None:
        """Change the machines of the job, and notify its workflow at once."""
        ranks = dict(self.state.assignment.each())
        unusable = self.state.evictions.silent_since.keys() | self.state.evictions.dying_since.keys()
        gone = {one.machine: list(ranks[one.machine]) for one in leaving if one.machine in unusable}
        self.state.evictions.done += leaving
        self.state.evictions.done_ns += [workflow.time_ns()] * sum(map(counts, leaving))
        self.state.record_replacement(machines, gone)
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.state.job))
        await handle.signal("incident_machines", args=[self.state.number, machines])

    # The version of the job's code.

    def change_version(self, change: VersionChange) -> asyncio.Task[None]:
        """Change the version for the next launch.

        Returns:
            A task that notifies the job's workflow; the launch need not wait for it.
        """
        self.state.switch_version(change, workflow.time_ns())
        self.state.version_changes.append(change)
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.state.job))
        notified = handle.signal("incident_versions", args=[self.state.number, self.state.book.changed()])
        return asyncio.create_task(notified, name="notify the job")

    def accept_versions(self, versions: list[JobVersion]) -> None:
        """Accept the job's newest list of versions: a version passed its trial, or was withdrawn."""
        book = self.state.book
        book.merge(one for one in versions if one.number != book.running)

    # Ways to wait.

    async def unless_abandoned(self, started: workflow.ActivityHandle[T], *, or_overtaken: bool = False) -> T:
        """Wait for an activity, until an operator ends the incident.

        Args:
            started: The activity.
            or_overtaken: Also end the wait when something more urgent happens.

        Raises:
            Abandoned: an operator ended the incident, or something more urgent happened.
        """
        abandoned = asyncio.create_task(
            workflow.wait_condition(lambda: bool(self.abandoned_by or (or_overtaken and self.overtaken)))
        )
        await workflow.wait([started, abandoned], return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            abandoned.cancel()
            return started.result()
        started.cancel()
        raise Abandoned

    async def unless_abandoned_child(self, child: workflow.ChildWorkflowHandle[Any, T]) -> T:
        """Wait for a child workflow, until an operator ends the incident; the child continues.

        Raises:
            Abandoned: an operator ended the incident.
        """
        abandoned = asyncio.create_task(workflow.wait_condition(lambda: bool(self.abandoned_by)))
        await workflow.wait([child, abandoned], return_when=asyncio.FIRST_COMPLETED)
        if not child.done():
            raise Abandoned
        abandoned.cancel()
        return child.result()

    async def wait(self, duration: timedelta, label: str, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for some time, with a label for the timeline, until an operator ends the incident.

        Raises:
            Abandoned: an operator ended the incident.
        """
        try:
            await workflow.wait_condition(
                lambda: bool(self.abandoned_by) or until(),
                timeout=duration,
                timeout_summary=label,
            )
        except TimeoutError:
            return
        if self.abandoned_by:
            raise Abandoned

    async def notify_job(self, stage: str = "") -> None:
        """Notify the job's workflow of the incident's stage."""
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.state.job))
        await handle.signal("incident_stage", args=[self.state.number, web_ui.summary(stage or self.timeline.stage)])

    async def renew(self, how: Continued) -> None:
        """Continue as new if the history is long; no activity may run at this point, so nothing is lost."""
        if not workflow.info().is_continue_as_new_suggested():
            return
        if how is Continued.REATTEMPTED:
            self.state.record_failed_reattempt()
        with contextlib.suppress(TimeoutError):  # a recovery does not wait long for the ledger
            async with asyncio.timeout(LEDGER_S):
                await self.timeline.written()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self.abandoned_by:
            raise Abandoned
        self.state.continued = how
        self.state.shorten()
        workflow.continue_as_new(self.state, task_timeout=TASK_TIMEOUT)
