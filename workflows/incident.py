"""The incident: from an anomaly to a job that steps again, or to an operator.

Stages: stop → decide → reattempt → confirm, again while the policy allows, else
parked. One incident per fault; the job's workflow starts it as its child.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities import messages
    from activities.messages import ConfirmInput, DecideInput, LaunchInput, StopInput
    from everstep.decisions.first_failure import failure_of, first_failure, headline_of
    from everstep.decisions.reattempt import Decision, Facts, decide_reattempt, steady
    from everstep.decisions.restore import Restore, choose_restore
    from everstep.incident import (
        Confirmation,
        Evidence,
        Failure,
        IncidentReport,
        Launched,
        Stage,
        Symptom,
    )
    from everstep.job_state import incident_workflow_id, job_workflow_id
    from workflows import attributes, page
    from workflows.messages import IncidentInput
    from workflows.operator import read_request
    from workflows.options import on_ledger, on_ranks

T = TypeVar("T")
OPERATOR_JSON = 'e.g. {"operator": "you", "note": "why"}'


class Abandoned(Exception):  # control flow: an operator ended the incident
    """An operator, or the end of the job, ended the incident."""


@workflow.defn(name="Incident")
class IncidentWorkflow:
    """Brings a job back after one fault."""

    @workflow.init
    def __init__(self, given: IncidentInput) -> None:
        self.given = given
        self.id = incident_workflow_id(given.job, given.number)
        self.generation = given.generation
        self.resume_step = given.resume_step
        self.history = list(given.history)
        self.failures: list[Failure] = []
        self.attempts = 0
        self.resumed_by = ""
        self.abandoned_by = ""
        self.answer: str | None = None
        self.rejected: list[str] = []
        self.stages: list[Stage] = []
        self.stage = "open"
        self.notes: list[Awaitable[Any]] = []
        self.parked: list[tuple[int, int]] = []
        self.launched: Launched | None = None
        self.lost_steps: int | None = None
        self.farthest = self.lost_from = -1
        self.headline = given.anomaly.headline
        self.said = ""

    # What an operator may do.

    @workflow.signal(name="resume", description=f"Try again with a fresh budget. {OPERATOR_JSON}")
    def resume(self, request: Any = None, *more: Any) -> None:
        """Leave the parked state and try again."""
        self._take("resume", request, more)

    @workflow.signal(name="abandon", description=f"Give the job up; its ranks stay stopped. {OPERATOR_JSON}")
    def abandon(self, request: Any = None, *more: Any) -> None:
        """End the incident without a recovery."""
        self._take("abandon", request, more)

    @workflow.query(name="stage", description="Stage of the incident and why")
    def current_stage(self) -> Stage:
        """The stage at hand."""
        return Stage(name=self.stage, seconds=0.0, found=self.said or self.headline)

    def _take(self, answer: str, raw: Any, more: tuple[Any, ...]) -> None:
        request = read_request(raw, *more)
        if isinstance(request, str):
            self.rejected.append(f"{answer}: {request}")
            self._show()
            return
        who = request.operator + (f" ({request.note})" if request.note else "")
        if answer == "abandon":
            self.abandoned_by = self.abandoned_by or who
        elif self.stage == "parked":
            self.answer, self.resumed_by = answer, who
        else:
            self.rejected.append(f"resume by {who}: the incident is not parked, it is at stage {self.stage}")
            self._show()

    # The flow.

    @workflow.run
    async def run(self, given: IncidentInput) -> IncidentReport:
        """Bring the job back; see the module's docstring."""
        # A task of its own gives the call stack in the Web UI the line that waits.
        return await asyncio.create_task(self._flow(), name="incident flow")

    async def _flow(self) -> IncidentReport:
        topology, machines = self.given.spec.topology(), [machine.name for machine in self.given.machines]
        self._enter("stop")
        try:
            evidence = await self._stop()
            while True:
                failure = self._failure(evidence)
                if not self.failures:
                    policy = self.given.spec.policy
                    self.history = steady(self.history, step=failure.step, now_ns=workflow.time_ns(), policy=policy)
                self.failures.append(failure)
                held_before = self.resume_step >= 0
                restore = choose_restore(evidence.held, topology, machines, held_before=held_before)
                decision = self._decide(failure, evidence, restore)
                if decision.action == "park":
                    await self._park(decision.reason)
                    # The machines may have changed while the job was parked: look again.
                    evidence = await self._stop()
                    if evidence.unreachable or evidence.problem:
                        continue
                    restore = choose_restore(evidence.held, topology, machines, held_before=held_before)
                self._count_lost(restore)
                confirmation, evidence = await self._reattempt(decision, restore)
                if confirmation is not None and confirmation.ok:
                    return await self._recovered(confirmation)
                self.history.append(failure)
        except Abandoned:
            return await self._given_up()

    async def _stop(self) -> Evidence:
        began = self._enter("stop")
        try:
            evidence: Evidence = await self._unless_abandoned(
                workflow.start_activity(
                    messages.STOP,
                    StopInput(job=self.given.job, generation=self.generation, machines=self.given.machines),
                    result_type=Evidence,
                    summary=page.summary(f"generation {self.generation} on {len(self.given.machines)} machines"),
                    **on_ranks(timedelta(minutes=2)),
                )
            )
        except ActivityError as error:
            # Not knowing is no reason to go on: the job is parked, and asked again when an operator says so.
            evidence = Evidence(generation=self.generation, problem=str(error.cause or error)[:300])
        end = first_failure(evidence.exits)
        self._leave(began, "stop", headline_of(end) if end else "no rank ended by itself")
        return evidence

    def _failure(self, evidence: Evidence) -> Failure:
        end = first_failure(evidence.exits)
        completed = max((one.completed_steps for one in evidence.exits), default=-1)
        self.farthest = step = max(completed, self.resume_step)
        now_ns = workflow.time_ns()
        if end is None:
            symptom = self.given.anomaly.symptom if not self.failures else Symptom.LAUNCH_FAILED
            return Failure(generation=self.generation, step=step, symptom=symptom, cause=str(symptom), time_ns=now_ns)
        self.headline = headline_of(end)
        if end.completed_steps >= 0:
            # The culprit's own step is what comes again when the fault is in the step; its peers may be one ahead.
            step = max(end.completed_steps, self.resume_step)
        return failure_of(end, generation=self.generation, step=step)

    def _decide(self, failure: Failure, evidence: Evidence, restore: Restore) -> Decision:
        facts = Facts(
            failure=failure,
            history=tuple(self.history),
            attempts=self.attempts,
            evidence=evidence,
            restore_step=restore.step,
            world_size=self.given.spec.topology().world_size,
            resume_step=self.resume_step,
        )
        decision = decide_reattempt(facts, self.given.spec.policy)
        began = self._enter("decide")
        if decision.action == "park":
            text = f"park: {decision.reason}"
        else:
            wait = f", after {decision.delay_s:.0f} s" if decision.delay_s else ""
            text = f"reattempt {restore.origin}{wait}: {decision.reason} ({restore.reason})"
        self._leave(began, "decide", text)
        self._note("decide", text, evidence)
        return decision

    def _count_lost(self, restore: Restore) -> None:
        """Steps that are computed anew, from the farthest the job had come to where it goes on now."""
        self.lost_from = max(self.lost_from, self.farthest)
        if restore.step == 0 and self.farthest == self.resume_step > 0:
            # The checkpoints are gone, and with them what would say how far the job had come since it was resumed.
            self.lost_steps = None
        elif self.lost_from >= 0 and restore.step >= 0:
            self.lost_steps = max(self.lost_from - restore.step, 0)

    async def _reattempt(self, decision: Decision, restore: Restore) -> tuple[Confirmation | None, Evidence]:
        """One restart; returns its confirmation, or what the machines know when it failed."""
        if decision.delay_s:
            self._enter("backoff")
            await self._wait(timedelta(seconds=decision.delay_s), "BACKOFF")
        self.attempts += 1
        self.generation += 1
        self.resume_step = restore.step
        began = self._enter("reattempt")
        confirmation: Confirmation | None = None
        try:
            self.launched = launched = await self._launch(restore)
            self._leave(began, "reattempt", f"generation {self.generation} {restore.origin}")
            began = self._enter("confirm")
            confirmation = await self._confirm(launched)
            self._leave(began, "confirm", confirmation.reason)
            if confirmation.ok:
                return confirmation, Evidence(generation=self.generation)
        except ActivityError as error:
            self._leave(began, self.stage, f"failed: {error.cause or error}")
        return confirmation, await self._stop()

    async def _launch(self, restore: Restore) -> Launched:
        spec = self.given.spec
        ranks = spec.topology().world_size
        return await self._unless_abandoned(
            workflow.start_activity(
                messages.LAUNCH,
                LaunchInput(
                    spec=spec,
                    machines=self.given.machines,
                    generation=self.generation,
                    resume_step=restore.step,
                    reason=self.id,
                ),
                result_type=Launched,
                summary=page.summary(f"generation {self.generation}, {ranks} ranks, {restore.origin}"),
                **on_ranks(timedelta(minutes=3)),
            )
        )

    async def _confirm(self, launched: Launched) -> Confirmation:
        patience = timedelta(seconds=self.given.spec.policy.confirm_timeout_s + 30)
        return await self._unless_abandoned(
            workflow.start_activity(
                messages.CONFIRM,
                ConfirmInput(spec=self.given.spec, machines=self.given.machines, launched=launched),
                result_type=Confirmation,
                summary=page.summary(f"generation {self.generation}: every rank completes a step"),
                **on_ranks(patience),
            )
        )

    async def _park(self, reason: str) -> None:
        """Wait for an operator; nothing is lost meanwhile."""
        self.answer = None
        began = self._enter("parked", reason)
        await self._tell_job()
        try:
            await self._wait(timedelta(hours=self.given.spec.policy.parked_timeout_h), "PARKED", resumable=True)
        finally:
            self.parked.append((int(began * 1e9), workflow.time_ns()))
        if self.answer is None:
            self.abandoned_by = "nobody answered in time"
            raise Abandoned
        self._leave(began, "parked", f"resumed by {self.resumed_by}")
        self._note("parked", f"resumed by {self.resumed_by}")
        self.history, self.attempts = [], 0
        self._enter("reattempt")
        await self._tell_job()

    async def _recovered(self, confirmation: Confirmation) -> IncidentReport:
        parked_ns = sum(end - begin for begin, end in self.parked)
        seconds = max(confirmation.stepped_ns - self.given.anomaly.seen_ns - parked_ns, 0) / 1e9
        lost = "" if self.lost_steps is None else f", lost {page.count(self.lost_steps, 'step')}"
        resolution = "resumed by operator" if self.resumed_by else "reattempt"
        how = "after an operator's resume" if self.resumed_by else "by reattempt"
        report = self._report(
            headline=f"Recovered in {seconds:.2f} s {how}{lost}: {self.headline}",
            resolution=resolution,
            seconds=round(seconds, 4),
            confirmation=confirmation,
        )
        self._enter("recovered", report.headline)
        return await self._close(report)

    async def _given_up(self) -> IncidentReport:
        report = self._report(
            headline=f"Abandoned by {self.abandoned_by}: {self.headline}", resolution="abandoned", seconds=None
        )
        self._enter("abandoned", report.headline)
        # The ranks must not live on without an owner; a launch may have been under way.
        with contextlib.suppress(ActivityError):  # the job's release ends what this could not
            await workflow.execute_activity(
                messages.STOP,
                StopInput(job=self.given.job, generation=self.generation, machines=self.given.machines),
                result_type=Evidence,
                summary=page.summary(f"generation {self.generation}: leave nothing running"),
                **on_ranks(timedelta(minutes=2)),
            )
        return await self._close(report)

    def _report(
        self, *, headline: str, resolution: str, seconds: float | None, confirmation: Confirmation | None = None
    ) -> IncidentReport:
        first = self.failures[0] if self.failures else None
        return IncidentReport(
            headline=headline,
            resolution=resolution,
            cause=first.cause if first else str(self.given.anomaly.symptom),
            step=first.step if first else -1,
            lost_steps=self.lost_steps,
            evicted=[],
            stages=[f"{stage.name}, {stage.seconds:.2f} s: {stage.found}" for stage in self.stages],
            generation=self.generation,
            resume_step=self.resume_step,
            recovered=confirmation is not None,
            seconds=seconds,
            failures=self.failures,
            confirmation=confirmation,
            timings=self.stages,
        )

    async def _close(self, report: IncidentReport) -> IncidentReport:
        workflow.upsert_search_attributes(
            attributes.updates({attributes.VERDICT: report.resolution, attributes.LOST_STEPS: report.lost_steps or 0})
        )
        self._note("closed", report.headline, report=report, launched=self.launched)
        # Every note is bounded in time; a ledger that is down does not fail a recovered job.
        await asyncio.gather(*self.notes, return_exceptions=True)
        return report

    # Small things that every stage does.

    async def _unless_abandoned(self, started: workflow.ActivityHandle[T]) -> T:
        """Wait for an activity, but not longer than an operator wants."""
        abandoned = asyncio.create_task(workflow.wait_condition(lambda: bool(self.abandoned_by)))
        await workflow.wait([started, abandoned], return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            abandoned.cancel()
            return started.result()
        started.cancel()
        raise Abandoned

    async def _wait(self, duration: timedelta, label: str, *, resumable: bool = False) -> None:
        try:
            await workflow.wait_condition(
                lambda: bool(self.abandoned_by) or (resumable and self.answer is not None),
                timeout=duration,
                timeout_summary=label,
            )
        except TimeoutError:
            return
        if self.abandoned_by:
            raise Abandoned

    def _enter(self, stage: str, said: str = "") -> float:
        self.stage, self.said = stage, said
        severity = "page" if stage == "parked" else "info"
        workflow.upsert_search_attributes(attributes.updates({attributes.STAGE: stage, attributes.SEVERITY: severity}))
        workflow.logger.info("stage entered", extra={"stage": stage, "correlation": self.given.anomaly.id})
        self._show()
        return workflow.time()

    def _leave(self, began: float, stage: str, found: str) -> None:
        self.stages.append(Stage(name=stage, seconds=round(workflow.time() - began, 4), found=page.summary(found)))
        self._show()

    def _show(self) -> None:
        parked = (
            f"**Parked: needs an operator.** Send the signal `resume` or `abandon`, {OPERATOR_JSON}"
            if self.stage == "parked"
            else ""
        )
        rejected = "\n".join(f"- REJECTED: {line}" for line in self.rejected[-5:])
        workflow.set_current_details(
            page.incident_page(
                self.said
                if self.stage in {"recovered", "abandoned"}
                else f"{self.stage}: {self.said or self.headline}",
                self.stages,
                workflow.info().namespace,
                job_workflow_id(self.given.job),
                "\n\n".join(part for part in (parked, rejected) if part),
            )
        )

    def _note(
        self,
        stage: str,
        text: str,
        evidence: Evidence | None = None,
        report: IncidentReport | None = None,
        launched: Launched | None = None,
    ) -> None:
        """Write a conclusion into the timeline and the ledger, without holding up the recovery."""
        given = DecideInput(
            incident=self.id,
            job=self.given.job,
            anomaly=self.given.anomaly,
            opened_ns=self.given.opened_ns,
            position=len(self.notes) + 1,
            time_ns=workflow.time_ns(),
            stage=stage,
            text=text,
            evidence=evidence,
            launched=launched,
            report=report,
            parked=self.parked if report else [],
        )
        self.notes.append(workflow.start_activity(messages.DECIDE, given, summary=page.summary(text), **on_ledger()))

    async def _tell_job(self) -> None:
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.given.job))
        await handle.signal("incident_stage", args=[self.given.number, self.stage])
