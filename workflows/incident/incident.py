"""One incident as its stages share it: its state, its timeline, the operator's signals, and ways to wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.evict.rules import OPERATOR
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
    from workflows.operator import read_request
    from workflows.options import TASK_TIMEOUT

T = TypeVar("T")
LEDGER_S = 5.0
"""Time for entries to reach the ledger before an incident continues as new."""


class Abandoned(Exception):  # control flow: an operator ended the incident
    """An operator, or the end of the job, ended the incident."""


@dataclass(frozen=True, slots=True)
class Secured:
    """Machines that are to leave a job, and those that are ready in their places."""

    leaving: list[Eviction]
    replaced: Replaced
    unfit: list[Eviction]
    """Of those that came, who could not be made ready after all."""


class Incident:
    """Of one workflow; its stages are functions over it."""

    def __init__(self, state: IncidentState) -> None:
        self.state = state
        """All that outlives this run of the workflow."""
        self.id = incident_workflow_id(state.job, state.number)
        self.timeline = IncidentTimeline(state, self.id)
        self.first_step_s = 0.0
        """How long the last launch took to its first step; 0: no step was seen."""
        self.noted: Evidence | None = None
        """The evidence that the ledger has."""
        self.answer: str | None = None
        """What an operator answered while the job is parked."""
        self.accepting = False
        """The operator who resumes lets the job go on from the step that is certain."""
        self.answered_by = ""
        """The operator who answered."""
        self.abandoned_by = ""
        self.asked_rung: Rung | None = None
        """The rung of the ladder that an operator has to approve; None: none."""
        self.overtaken = ""
        """What else was reported to the job meanwhile, which is more urgent; empty: nothing."""
        self.secured: Secured | None = None
        """Machines that were leased while the ranks went on."""

    def begin_again(self) -> None:
        """The job is tried again because somebody wants it: what was before does not count any more."""
        self.state.operator.begun_again_ns = workflow.time_ns()
        self.state.begin_again()

    @property
    def looks_again(self) -> bool:
        """Whether it continued as new while it was parked: the failure at hand is known, and asked about anew."""
        return self.state.continued is Continued.PARKED

    # What an operator may do.

    @property
    def approvable(self) -> str:
        """What an approval lets go on, for people: ``m2 (silent-machine) may leave``."""
        if self.state.evictions.waiting or self.asked_rung is None:
            return f"{named(self.state.evictions.waiting)} may leave"
        return f"{self.asked_rung} may begin for"

    def take(self, answer: str, raw: Any, more: tuple[Any, ...]) -> None:
        """Take a signal; one that makes no sense is shown on the page."""
        request = read_request(raw, *more)
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
        """Why there is nothing that an operator may approve, and what to do instead; empty: there is."""
        if self.timeline.stage != Stage.PARKED:
            return f"nothing is to approve: the job is not parked, its incident is at stage {self.timeline.stage}"
        if not self.state.evictions.waiting and self.asked_rung is None:
            return (
                f"nothing is to approve: the job is parked for another reason, {self.timeline.reason}; "
                "'resume' lets it try again, 'abandon' gives it up"
            )
        return ""

    # Which machines the job has.

    def silent_for(self, unreachable: list[str]) -> dict[str, float]:
        """Since how many seconds each machine that does not answer was asked in vain."""
        now = workflow.time()
        return {name: now - self.state.evictions.silent_since.get(name, now) for name in unreachable}

    def heard(self, unreachable: list[str], asked: float) -> None:
        """Machines were asked; ``unreachable`` did not answer since ``asked``, by the workflow's clock."""
        self.state.evictions.silent_since = {
            name: self.state.evictions.silent_since.get(name, asked) for name in unreachable
        }

    async def change_machines(self, machines: list[Machine], leaving: list[Eviction]) -> None:
        """Some machines left the job; its workflow hears of it at once."""
        ranks = dict(self.state.assignment.each())
        gone = {
            one.machine: list(ranks[one.machine]) for one in leaving if one.machine in self.state.evictions.silent_since
        }
        self.state.evictions.done += leaving
        decided = [one for one in leaving if one.rule != OPERATOR and not one.approved_by]
        self.state.evictions.done_ns += [workflow.time_ns()] * len(decided)
        self.state.replaced(machines, gone)
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.state.job))
        await handle.signal("incident_machines", args=[self.state.number, machines])

    # Which version of its code the job runs.

    def change_version(self, change: VersionChange) -> asyncio.Task[None]:
        """Another version comes with the next launch.

        Returns:
            Is over once the job's workflow has heard of it: that goes out with the launch, which need not wait for it.
        """
        self.state.come(change, workflow.time_ns())
        self.state.version_changes.append(change)
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.state.job))
        told = handle.signal("incident_versions", args=[self.state.number, self.state.book.changed()])
        return asyncio.create_task(told, name="tell the job")

    def take_versions(self, versions: list[JobVersion]) -> None:
        """The job knows of other versions: one was found fit, or was withdrawn."""
        book = self.state.book
        book.take(one for one in versions if one.number != book.running)

    @property
    def is_updated(self) -> bool:
        """While it is parked somebody asked for an update that does not wait."""
        return bool(self.state.book.urgent())

    # Waiting.

    async def unless_abandoned(self, started: workflow.ActivityHandle[T], *, or_overtaken: bool = False) -> T:
        """Wait for an activity, but not longer than an operator wants.

        Args:
            started: The activity.
            or_overtaken: Nor than until something happens that is more urgent.

        Raises:
            Abandoned: an operator ended the incident, or it was overtaken.
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
        """Wait for a child's workflow, but not longer than an operator wants; the child goes on.

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
        """Wait for some time, with a label for the timeline, but not longer than an operator wants.

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

    async def tell_job(self, stage: str = "") -> None:
        """Tell the job's workflow where the incident stands."""
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.state.job))
        await handle.signal("incident_stage", args=[self.state.number, web_ui.summary(stage or self.timeline.stage)])

    async def renew(self, how: Continued) -> None:
        """Continue as new where the history grows long; no activity is under way here, and nothing is lost."""
        if not workflow.info().is_continue_as_new_suggested():
            return
        if how is Continued.REATTEMPTED:
            self.state.reattempted_in_vain()
        with contextlib.suppress(TimeoutError):  # no recovery waits long for the ledger
            async with asyncio.timeout(LEDGER_S):
                await self.timeline.written()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self.abandoned_by:
            raise Abandoned
        self.state.continued = how
        self.state.cut()
        workflow.continue_as_new(self.state, task_timeout=TASK_TIMEOUT)
