"""The incident: from an anomaly to a job that steps again, or to an operator.

Stages: stop → decide → restore, where state has to be brought to a machine →
reattempt → confirm, again while the policy allows, else parked. One incident per
fault; the job's workflow starts it as its child.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.messages import LaunchInput
    from everstep.decisions.checkpoints.choose_restore import Restore
    from everstep.decisions.checkpoints.lineage import Runs
    from everstep.decisions.recover.policy import Decision, RestartFacts, decide_reattempt, steady
    from everstep.decisions.recover.state import RecoveryState
    from everstep.model.incident import (
        NOT_CONFIRMED,
        Confirmation,
        Evidence,
        Failure,
        IncidentReport,
        Launched,
        Stage,
    )
    from everstep.model.job_state import incident_workflow_id, job_workflow_id
    from workflows import activity_calls, web_ui
    from workflows.first_step import confirm_restart
    from workflows.incident.carry_over import carried, take_up
    from workflows.incident.find_copies import CopySearch, RestoreChoice
    from workflows.incident.report import abandoned_report, recovered_report
    from workflows.incident.timeline import OPERATOR_JSON, IncidentTimeline
    from workflows.messages import IncidentInput
    from workflows.operator import read_request
    from workflows.options import TASK_TIMEOUT

T = TypeVar("T")
LEDGER_S = 5.0
"""What is on its way into the ledger has this long to arrive before an incident continues as new (ours)."""


class Abandoned(Exception):  # control flow: an operator ended the incident
    """An operator, or the end of the job, ended the incident."""


@workflow.defn(name="Incident")
class IncidentWorkflow:
    """Brings a job back after one fault."""

    @workflow.init
    def __init__(self, given: IncidentInput) -> None:
        self.given = given
        self.id = incident_workflow_id(given.job, given.number)
        self.story = IncidentTimeline(given, self.id)
        self.case = RecoveryState(
            spec=given.spec,
            machines=given.machines,
            anomaly=given.anomaly,
            generation=given.generation,
            resume_step=given.resume_step,
            lineage=list(given.lineage),
            folder=given.resume_path,
            folder_step=given.resume_path_step,
            runs=Runs(given.run, tuple(given.origin_runs)),
            showing=given.showing,
            emptied=set(given.emptied),
        )
        self.hold = given.hold
        """Why an operator has to say how the job goes on; empty once one did."""
        self.history = list(given.history)
        self.failures: list[Failure] = []
        self.attempts = 0
        self.launched: Launched | None = None
        self.first_step_s = 0.0
        """Of the last launch; 0: no step was seen."""
        self.noted: Evidence | None = None
        """What the ledger has."""
        self.looking = CopySearch(given, self.case, self.story, self._unless_abandoned, self._wait)
        self.accepting = False
        """The operator who resumes lets the job go on from what is certain."""
        self.resumed_by = ""
        self.abandoned_by = ""
        self.answer: str | None = None
        if given.carried:
            take_up(self, given.carried)

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
        to_accept = self.story.to_accept if self.story.stage == "parked" else ""
        found = self.story.said or self.story.headline
        return Stage(name=self.story.stage, seconds=0.0, found=found, to_accept=to_accept)

    def _take(self, answer: str, raw: Any, more: tuple[Any, ...]) -> None:
        request = read_request(raw, *more)
        if isinstance(request, str):
            self.story.reject(f"{answer}: {request}")
            return
        who = request.operator + (f" ({request.note})" if request.note else "")
        if answer == "abandon":
            self.abandoned_by = self.abandoned_by or who
        elif self.story.stage == "parked":
            self.answer, self.resumed_by, self.accepting = answer, who, request.accept_loss
        else:
            self.story.reject(f"resume by {who}: the incident is not parked, it is at stage {self.story.stage}")

    # The flow.

    @workflow.run
    async def run(self, given: IncidentInput) -> IncidentReport:
        """Bring the job back; see the module's docstring."""
        # A task of its own gives the call stack in the Web UI the line that waits.
        flow = asyncio.create_task(self._flow(), name="incident flow")
        try:
            await workflow.wait([flow])
        except asyncio.CancelledError:
            # It ends here: what the flow waits for, e.g. a signal under way, may come to its end in spite of a
            # cancellation, and the flow would go on.
            if workflow.patched("a cancellation ends an incident"):
                raise
            flow.cancel()
        return await flow

    async def _flow(self) -> IncidentReport:
        self.story.enter("stop")
        before = self.given.carried
        resumed = before is not None and before.resumed
        again = resumed or (before is not None and before.came_back)
        try:
            evidence = await self._look_again() if again else await self._stop()
            while True:
                if not again:
                    failure = self._failure(evidence, first=not self.failures)
                    if not self.failures:
                        self.history = steady(self.history, failure, self.given.spec.policy)
                    self.failures.append(failure)
                decision, restore = await self._agree(evidence, resumed=resumed)
                resumed = again = False
                confirmation, evidence = await self._reattempt(decision, restore)
                if confirmation is not None and confirmation.ok:
                    return await self._recovered(confirmation)
                self.history.append(self.failures[-1])
        except Abandoned:
            return await self._given_up()

    async def _stop(self) -> Evidence:
        """Stop the generation; returns what the machines know."""
        case = self.case
        began = self.story.enter("stop")
        try:
            evidence = await self._until_gone()
        except ActivityError as error:
            # Not knowing is no reason to go on: the job is parked, and asked again when an operator says so.
            evidence = Evidence(generation=case.generation, problem=str(error.cause or error)[:300])
        evidence = case.heard(evidence)
        self.story.leave(began, "stop", web_ui.stopped_text(evidence, case.headline(evidence)))
        return evidence

    async def _until_gone(self) -> Evidence:
        """Ask the machines to stop, again while killed ranks are not gone: that can take minutes, and is said."""
        given, policy = self.given, self.given.spec.policy
        deadline = workflow.time() + policy.kill_patience_s
        said = False
        while True:
            evidence = await self._unless_abandoned(
                activity_calls.stop(given.spec, given.machines, given.run, self.case.generation)
            )
            if not evidence.dying or not workflow.patched("wait for dying ranks"):
                break
            text = web_ui.listed(evidence.dying, 3)
            if workflow.time() >= deadline:
                return evidence.model_copy(update={"problem": f"{text}; they have {policy.kill_patience_s:g} s"})
            self.story.say(text)
            await self._tell_job(f"stop: {text}")
            said = True
        if said:
            self.story.say("")
            await self._tell_job()
        return evidence

    def _failure(self, evidence: Evidence, *, first: bool) -> Failure:
        self.story.headline = self.case.headline(evidence) or self.story.headline
        return self.case.failure(evidence, now_ns=workflow.time_ns(), first=first)

    async def _look_again(self) -> Evidence:
        """Ask the machines once more: what is known of the failure at hand may have changed."""
        evidence = await self._stop()
        self.failures[-1] = self._failure(evidence, first=len(self.failures) == 1)
        return evidence

    async def _agree(self, evidence: Evidence, *, resumed: bool) -> tuple[Decision, Restore]:
        """Decide, and bring the state to where it is needed: what is returned can be launched.

        ``resumed``: an operator has decided already.
        """
        while True:
            decision = Decision("reattempt", "an operator says so")
            choice = None
            if resumed and not (evidence.unreachable or evidence.problem):
                choice = await self.looking.choice(evidence)
                evidence, choice = choice.evidence, choice if choice.doubt is None else None
            resumed = False
            if choice is None:
                choice = await self.looking.choice(evidence)
                decision = self._decide(choice)
            if decision.action == "park":
                resumed = await self._park(decision, choice)
                await self._renew(resumed=resumed, came_back=not resumed)
                evidence = await self._look_again()
                continue
            restore = choice.restore
            if restore.unverified and not workflow.patched("verify chosen slots"):
                restore = replace(restore, unverified=())
            wanted = restore.copies or restore.unverified
            changed = await self._restore(restore, choice.evidence) if wanted else None
            if changed is None:
                return decision, restore
            evidence = changed

    def _decide(self, choice: RestoreChoice) -> Decision:
        evidence, restore = choice.evidence, choice.restore
        facts = RestartFacts(
            failure=self.failures[-1],
            history=tuple(self.history),
            attempts=self.attempts,
            evidence=evidence,
            restore_step=restore.step,
            world_size=self.given.spec.topology().world_size,
            resume_step=self.case.resume_step,
            restore_reason=restore.reason,
            unreached=tuple(self.case.unreached),
            doubt=choice.why,
            hold=self.hold,
        )
        decision = decide_reattempt(facts, self.given.spec.policy)
        began = self.story.enter("decide")
        if decision.action == "park":
            text = f"park: {decision.reason}"
        else:
            wait = f", after {decision.delay_s:.0f} s" if decision.delay_s else ""
            text = f"reattempt {restore.origin}{wait}: {decision.reason} ({restore.reason})"
        self.story.leave(began, "decide", text)
        self.story.note("decide", text, None if evidence is self.noted else evidence)
        self.noted = evidence
        return decision

    async def _restore(self, restore: Restore, evidence: Evidence) -> Evidence | None:
        """Bring what is not in its place; returns None when all of it is, else what to choose from now."""
        began = self.story.enter("restore")
        try:
            restored = await self._unless_abandoned(
                activity_calls.restore(self.given.spec, self.given.machines, self.given.run, restore, evidence)
            )
        except ActivityError as error:
            self.story.leave(began, "restore", f"failed: {error.cause or error}")
            self.attempts += 1
            return await self._look_again()
        text = web_ui.restored_text(restored)
        self.story.leave(began, "restore", text)
        self.story.note("restore", text)
        choose_again = self.case.brought(restored)
        if restored.unreachable:
            # Such a machine may come back empty, and the backups that it had are gone then.
            self.attempts += 1
            return await self._look_again()
        return evidence if choose_again else None

    async def _reattempt(self, decision: Decision, restore: Restore) -> tuple[Confirmation | None, Evidence]:
        """One restart; returns its confirmation, or what the machines know when it failed."""
        if decision.delay_s:
            self.story.enter("backoff")
            await self._wait(timedelta(seconds=decision.delay_s), "BACKOFF")
        self.attempts += 1
        self.case.launch(restore)
        given = LaunchInput(
            spec=self.given.spec,
            machines=self.given.machines,
            generation=self.case.generation,
            resume_step=restore.step,
            reason=self.id,
            reshard_from=restore.folder,
            run=self.given.run,
        )
        began = self.story.enter("reattempt")
        confirmation: Confirmation | None = None
        try:
            self.launched = launched = await self._unless_abandoned(activity_calls.launch(given, restore.origin))
            self.story.leave(began, "reattempt", f"generation {given.generation} {restore.origin}")
            began = self.story.enter("confirm")
            confirmation = await self._confirm(launched, restore)
            self.story.leave(began, "confirm", confirmation.reason)
            if confirmation.ok:
                self.first_step_s = workflow.time() - began if confirmation.confirmed else 0.0
                return confirmation, Evidence(generation=given.generation)
        except ActivityError as error:
            self.story.leave(began, self.story.stage, f"failed: {error.cause or error}")
        await self._renew(resumed=False)
        return confirmation, await self._stop()

    async def _confirm(self, launched: Launched, restore: Restore) -> Confirmation:
        given = self.given

        async def ask(bound_s: float) -> Confirmation:
            showing, size = self.case.showing, restore.largest
            return await self._unless_abandoned(
                activity_calls.confirm(
                    given.spec, given.machines, launched, bound_s=bound_s, showing=showing, state_bytes=size
                )
            )

        return await confirm_restart(ask, lambda wait: self._wait(wait, "ASK AGAIN"), given)

    async def _park(self, decision: Decision, choice: RestoreChoice) -> bool:
        """Wait for an operator, or for machines that are silent; nothing is lost meanwhile.

        Returns:
            Whether an operator says that it is to go on; else those machines answer again.
        """
        self.answer, self.accepting = None, False
        self.story.to_accept = choice.restore.origin if choice.doubt else ""
        began = self.story.enter("parked", decision.reason)
        await self._tell_job()
        patience = timedelta(hours=self.given.spec.policy.parked_timeout_h)
        silent = [machine for machine in self.given.machines if machine.name in decision.silent]
        back: workflow.ActivityHandle[list[str]] | None = None
        if silent and workflow.patched("machines that come back"):
            back = activity_calls.await_machines(silent, patience)

        def came_back() -> bool:
            return back is not None and back.done() and back.exception() is None and not back.result()

        try:
            await self._wait(patience, "PARKED", until=lambda: self.answer is not None or came_back())
        finally:
            self.story.parked.append((int(began * 1e9), workflow.time_ns()))
            if back is not None:
                back.cancel()
        if self.answer is None and came_back():
            text = f"{web_ui.listed(decision.silent)} answers again"
            self.story.leave(began, "parked", text)
            self.story.note("parked", text)
            self.story.enter("stop")
            await self._tell_job()
            return False
        if self.answer is None:
            self.abandoned_by = "nobody answered in time"
            raise Abandoned
        self.story.leave(began, "parked", f"resumed by {self.resumed_by}")
        self.story.note("parked", f"resumed by {self.resumed_by}")
        if self.accepting and choice.doubt is not None:
            accepted = self.case.accept(choice.restore, choice.doubt, self.resumed_by)
            self.story.leave(workflow.time(), "accepted", accepted)
            self.story.note("accepted", accepted)
        self.history, self.attempts, self.hold = [], 0, ""
        self.looking.begin_again()
        self.case.try_everything_again()
        self.story.enter("reattempt")
        await self._tell_job()
        return True

    async def _renew(self, *, resumed: bool, came_back: bool = False) -> None:
        """Continue as new where the history grows long; nothing is under way here, and nothing is lost."""
        if not workflow.info().is_continue_as_new_suggested() or not workflow.patched("continue incident as new"):
            return
        if not resumed and not came_back:
            self.history.append(self.failures[-1])
        with contextlib.suppress(TimeoutError):  # no recovery waits long for the ledger
            async with asyncio.timeout(LEDGER_S):
                await self.story.written()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self.abandoned_by:
            raise Abandoned
        workflow.continue_as_new(carried(self, resumed=resumed, came_back=came_back), task_timeout=TASK_TIMEOUT)

    # The end.

    async def _recovered(self, confirmation: Confirmation) -> IncidentReport:
        report = recovered_report(self, confirmation)
        self.story.enter("recovered" if confirmation.confirmed else NOT_CONFIRMED, report.headline)
        return await self.story.close(report, self.launched)

    async def _given_up(self) -> IncidentReport:
        report = abandoned_report(self)
        self.story.enter("abandoned", report.headline)  # ranks must not live on unowned; a launch may be under way
        why = f"generation {self.case.generation}: leave nothing running"
        with contextlib.suppress(ActivityError):  # the job's release ends what this could not
            given = self.given
            await activity_calls.stop(given.spec, given.machines, given.run, self.case.generation, why=why)
        return await self.story.close(report, self.launched)

    # Waiting.

    async def _unless_abandoned(self, started: workflow.ActivityHandle[T]) -> T:
        """Wait for an activity, but not longer than an operator wants."""
        abandoned = asyncio.create_task(workflow.wait_condition(lambda: bool(self.abandoned_by)))
        await workflow.wait([started, abandoned], return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            abandoned.cancel()
            return started.result()
        started.cancel()
        raise Abandoned

    async def _wait(self, duration: timedelta, label: str, *, until: Callable[[], bool] = lambda: False) -> None:
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

    async def _tell_job(self, stage: str = "") -> None:
        handle = workflow.get_external_workflow_handle(job_workflow_id(self.given.job))
        await handle.signal("incident_stage", args=[self.given.number, web_ui.summary(stage or self.story.stage)])
