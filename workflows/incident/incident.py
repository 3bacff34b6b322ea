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
    from everstep.decisions.act.recover.climbed import Climbed
    from everstep.decisions.act.recover.state import RecoveryState
    from everstep.decisions.act.versions.book import VersionBook
    from everstep.decisions.act.versions.next_version import VersionChange
    from everstep.decisions.keep.lineage import Runs
    from everstep.model.eviction import Eviction, EvictionState, named
    from everstep.model.evidence import Evidence
    from everstep.model.hang import HangFound
    from everstep.model.job_state import incident_workflow_id, job_workflow_id
    from everstep.model.ladder import Rung
    from everstep.model.launch import Launched
    from everstep.model.machine import Machine
    from everstep.model.pool import Replaced
    from everstep.model.slow import SlowFound
    from everstep.model.stage import Stage
    from everstep.model.version import JobVersion
    from workflows import web_ui
    from workflows.incident.carry_over import carried, take_up
    from workflows.incident.timeline import IncidentTimeline
    from workflows.messages import IncidentInput
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

    def __init__(self, input: IncidentInput) -> None:
        self.input = input
        self.id = incident_workflow_id(input.job, input.number)
        self.timeline = IncidentTimeline(input, self.id)
        self.state = RecoveryState(
            spec=input.spec,
            machines=input.machines,
            anomaly=input.anomaly,
            generation=input.generation,
            resume_step=input.resume_step,
            lineage=list(input.lineage),
            folder=input.resume_path,
            folder_step=input.resume_path_step,
            runs=Runs(input.run, tuple(input.origin_runs)),
            showing=input.showing,
            emptied=set(input.emptied),
            history=list(input.history),
            hold=input.hold,
            book=VersionBook.of(input.versions, input.spec.version),
            ladder=Climbed(remembered=list(input.tried)),
        )
        self.launched: Launched | None = None
        self.first_step_s = 0.0
        """Of the last launch; 0: no step was seen."""
        self.noted: Evidence | None = None
        """What the ledger has."""
        self.resumed = False
        """An operator has just said that it is to go on: the next plan goes by that."""
        self.answer: str | None = None
        """Of an operator, while parked."""
        self.accepting = False
        """The operator who resumes lets the job go on from what is certain."""
        self.answered_by = ""
        """The operator who gave it."""
        self.resumed_by = ""
        """The last operator who resumed the job; empty: nobody did."""
        self.begun_again_ns = input.carried.begun_again_ns if input.carried else 0
        """When it was tried again with a fresh ladder, the last time; 0: it never was."""
        self.abandoned_by = ""
        self.asked_rung: Rung | None = None
        """Of the ladder, that an operator has to approve; None: none."""
        self.evictions = EvictionState()
        self.hang: HangFound | None = None
        """What looks at the ranks showed; of the generation that it names."""
        self.hang_stays = False
        """No machine was there in the place of those that it names: the job is tried again with them."""
        self.slow: SlowFound | None = None
        """What a vote over the ranks said; of the generation that it names."""
        self.overtaken = ""
        """What else the job's workflow was told of meanwhile, which is more urgent; empty: nothing."""
        self.secured: Secured | None = None
        """What was got while the ranks went on."""
        self.version_changes: list[VersionChange] = []
        """Other versions of the code that came in this incident."""
        self.missing = 0
        """So many machines the pool has too few."""
        self._silent_since: dict[str, float] = {}
        if input.carried:
            take_up(input.carried, self.state, self.timeline)
            self.launched, self.resumed_by = input.carried.launched, input.carried.resumed_by
            self.resumed, self.hang, self.slow = input.carried.resumed, input.carried.hang, input.carried.slow
            self.timeline.picture = (
                self.hang.picture if self.hang else "\n".join(self.slow.evidence if self.slow else ())
            )
            self.version_changes = [VersionChange(*change) for change in input.carried.version_changes]
            self.evictions = input.carried.evictions.model_copy(deep=True)
            self.state.gone, self.state.joined = dict(self.evictions.gone), set(self.evictions.joined)

    def begin_again(self) -> None:
        """Somebody has it tried again: what was before does not count any more."""
        self.begun_again_ns = workflow.time_ns()
        self.state.begin_again()

    @property
    def looks_again(self) -> bool:
        """Whether it continued as new while it was parked: the failure at hand is known, and asked about anew."""
        return self.input.carried is not None and (self.input.carried.resumed or self.input.carried.came_back)

    # What an operator may do.

    @property
    def approvable(self) -> str:
        """What an approval lets go on, for people: ``m2 (silent-machine) may leave``."""
        if self.evictions.waiting or self.asked_rung is None:
            return f"{named(self.evictions.waiting)} may leave"
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
        if not self.evictions.waiting and self.asked_rung is None:
            return (
                f"nothing is to approve: the job is parked for another reason, {self.timeline.reason}; "
                "'resume' lets it try again, 'abandon' gives it up"
            )
        return ""

    # Which machines the job has.

    def silent_for(self, unreachable: list[str]) -> dict[str, float]:
        """Since how many seconds each machine that does not answer was asked in vain."""
        now = workflow.time()
        return {name: now - self._silent_since.get(name, now) for name in unreachable}

    def heard(self, unreachable: list[str], asked: float) -> None:
        """Machines were asked; ``unreachable`` did not answer since ``asked``, by the workflow's clock."""
        self._silent_since = {name: self._silent_since.get(name, asked) for name in unreachable}

    async def change_machines(self, machines: list[Machine], leaving: list[Eviction]) -> None:
        """Some machines left the job; its workflow hears of it at once."""
        ranks = dict(self.state.assignment.each())
        gone = {one.machine: list(ranks[one.machine]) for one in leaving if one.machine in self._silent_since}
        self.evictions.done += leaving
        decided = [one for one in leaving if one.rule != OPERATOR and not one.approved_by]
        self.evictions.done_ns += [workflow.time_ns()] * len(decided)
        self.state.replaced(machines, gone)
        self.input = self.input.model_copy(update={"machines": machines})
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.input.job))
        await handle.signal("incident_machines", args=[self.input.number, machines])

    # Which version of its code the job runs.

    def change_version(self, change: VersionChange) -> asyncio.Task[None]:
        """Another version comes with the next launch.

        Returns:
            Is over once the job's workflow has heard of it: that goes out with the launch, which need not wait for it.
        """
        self.state.come(change, workflow.time_ns())
        self.version_changes.append(change)
        self.input = self.input.model_copy(update={"spec": self.state.spec})
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.input.job))
        told = handle.signal("incident_versions", args=[self.input.number, self.state.book.changed()])
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
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.input.job))
        await handle.signal("incident_stage", args=[self.input.number, web_ui.summary(stage or self.timeline.stage)])

    async def renew(self, *, resumed: bool, came_back: bool = False) -> None:
        """Continue as new where the history grows long; nothing is under way here, and nothing is lost.

        Args:
            resumed: An operator has just said that it is to go on.
            came_back: Machines that it waited for have just answered.
        """
        if not workflow.info().is_continue_as_new_suggested():
            return
        if not resumed and not came_back:
            self.state.reattempted_in_vain()
        with contextlib.suppress(TimeoutError):  # no recovery waits long for the ledger
            async with asyncio.timeout(LEDGER_S):
                await self.timeline.written()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self.abandoned_by:
            raise Abandoned
        next_input = carried(self.input, self.state, self.timeline)
        assert next_input.carried is not None
        own = {
            "resumed": resumed,
            "came_back": came_back,
            "launched": self.launched,
            "resumed_by": self.resumed_by,
            "begun_again_ns": self.begun_again_ns,
            "hang": self.hang,
            "slow": self.slow,
            "version_changes": [(one.number, one.why, one.suspect) for one in self.version_changes],
            "evictions": self.evictions.model_copy(
                update={"gone": dict(self.state.gone), "joined": sorted(self.state.joined)}
            ),
        }
        next_input = next_input.model_copy(update={"carried": next_input.carried.model_copy(update=own)})
        workflow.continue_as_new(next_input, task_timeout=TASK_TIMEOUT)
