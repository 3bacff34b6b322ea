"""The incident: from an anomaly to a job that steps again, or to an operator.

The stages run in this order; some of them run only in the case that the parentheses name:

    vote (the job became slow), trace (it hangs) → stop → evict (machines must leave) → decide → diagnose or replay (the
    ladder wants the machines tested, or the job repeated on groups of them) → restore (state must be moved to a
    machine) → reattempt → confirm

The stages are repeated while the policy allows it; after that the job is parked. There is one incident per fault, a
child of the job's workflow. Each stage is a file of ``workflows/incident/stages``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.stop_ranks import StopRanks
    from everstep.decisions.act.recover.incident_state import Continued, IncidentState
    from everstep.decisions.act.recover.rules import Action
    from everstep.model.eviction import EvictionState
    from everstep.model.incident import STILL_RUNNING, IncidentReport, Symptom
    from everstep.model.launch import Confirmation
    from everstep.model.stage import CurrentStage, Stage
    from everstep.model.version import JobVersion
    from workflows.incident.incident import Abandoned, Incident
    from workflows.incident.report import abandoned_report, observed_report, recovered_report
    from workflows.incident.stages.align import align, align_before_leaving
    from workflows.incident.stages.decide import decide
    from workflows.incident.stages.diagnose import diagnose
    from workflows.incident.stages.evict import evict, note_answers, secure
    from workflows.incident.stages.park import park
    from workflows.incident.stages.reattempt import back_off, reattempt
    from workflows.incident.stages.replay import replay
    from workflows.incident.stages.restore import restore
    from workflows.incident.stages.stop import refresh_evidence, stop
    from workflows.incident.stages.trace import trace
    from workflows.incident.stages.vote import vote
    from workflows.incident.timeline import OPERATOR_JSON
    from workflows.messages import OperatorRequest, read_list, read_request
    from workflows.start_activity import start_activity


@workflow.defn(name="Incident")
class IncidentWorkflow:
    """Recovers a job from one fault."""

    @workflow.init
    def __init__(self, state: IncidentState) -> None:
        self.incident = Incident(state)

    @workflow.signal(name="resume", description=f"Try again with a fresh budget. {OPERATOR_JSON}")
    def resume(self, request: Any = None, *more: Any) -> None:
        """Leave the parked state and try again."""
        self.incident.apply("resume", request, more)

    @workflow.signal(name="abandon", description=f"Give the job up; its ranks stay stopped. {OPERATOR_JSON}")
    def abandon(self, request: Any = None, *more: Any) -> None:
        """End the incident without a recovery."""
        self.incident.apply("abandon", request, more)

    @workflow.signal(name="approve", description=f"Approve that machines leave the job. {OPERATOR_JSON}")
    def approve(self, request: Any = None, *more: Any) -> None:
        """Approve the evictions, or the rung of the ladder, that wait for an operator."""
        self.incident.apply("approve", request, more)

    @workflow.update(name="approve", description=f"As the signal; the answer names the machines. {OPERATOR_JSON}")
    def approve_by_update(self, request: Any = None, *more: Any) -> str:
        """Approve the evictions, or the rung of the ladder, that wait for an operator; returns what was approved, as
        text."""
        approved = self.incident.approvable
        self.incident.apply("approve", request, more)
        return f"{approved} job {self.incident.state.job}"

    @approve_by_update.validator
    def check_approve(self, request: Any = None, *more: Any) -> None:
        """Refuse an approval that is not possible; the message says what to do. A refused update leaves no trace."""
        read = read_request(OperatorRequest, request, *more)
        if refused := read if isinstance(read, str) else self.incident.not_to_approve:
            raise ValueError(refused)

    @workflow.signal(name="versions", description="Sent by its job")
    def versions(self, versions: Any = None, *more: Any) -> None:
        """Accept the job's newest list of code versions."""
        self.incident.accept_versions(read_list(JobVersion, versions))

    @workflow.signal(name="overtaken", description="Sent by its job: an event is more urgent")
    def overtaken(self, why: Any = "", *more: Any) -> None:
        """End the search for a slow machine, because something more urgent happened."""
        self.incident.overtaken = str(why)[:100] or "an event is more urgent"

    @workflow.query(name="stage", description="Stage of the incident and why")
    def current_stage(self) -> CurrentStage:
        """Return the current stage."""
        timeline, state = self.incident.timeline, self.incident.state
        return CurrentStage(
            name=timeline.stage,
            seconds=0.0,
            found=timeline.reason or timeline.page.headline,
            to_accept=timeline.to_accept if timeline.stage == Stage.PARKED else "",
            job=state.job,
            opened_ns=state.opened_ns,
            since_ns=timeline.since_ns,
            machines=list(dict.fromkeys([*state.anomaly.machines, *state.evictions.wanted])),
            to_approve=self.incident.state.evictions.waiting if timeline.stage == Stage.PARKED else [],
            rule=self.incident.parked_by if timeline.stage == Stage.PARKED else "",
            tripped=self.incident.state.evictions.tripped,
        )

    @workflow.query(name="evictions", description="Answers of the eviction rules, and the machines that left the job")
    def current_evictions(self) -> EvictionState:
        """Return the current state of the evictions."""
        return self.incident.state.evictions

    @workflow.run
    async def run(self, state: IncidentState) -> IncidentReport:
        """Recover the job; the module's docstring describes the stages."""
        # With a task of its own, the call stack in the Web UI shows the line that waits.
        flow = asyncio.create_task(self._flow(), name="incident flow")
        # A cancellation must end the incident here. Something that the flow waits for, e.g. a signal that is being
        # sent, may complete although it is cancelled, and then the flow would continue.
        await workflow.wait([flow])
        return await flow

    async def _flow(self) -> IncidentReport:
        incident = self.incident
        if incident.state.anomaly.symptom in STILL_RUNNING and not await self._has_to_stop():
            return await self._observed()
        try:
            if incident.state.anomaly.symptom is Symptom.UPDATE and not incident.looks_again:
                await align(incident)
            await align_before_leaving(incident)
            await trace(incident)
            incident.timeline.enter(Stage.STOP)
            evidence = await (refresh_evidence if incident.looks_again else stop)(incident)
            while True:
                evidence = await evict(incident, evidence)
                plan = await decide(incident, evidence)
                if plan.action is Action.PARK:
                    await park(incident, plan)
                    evidence = await refresh_evidence(incident)
                elif plan.action is Action.DIAGNOSE:
                    await diagnose(incident, plan)
                elif plan.action is Action.REPLAY:
                    await replay(incident, plan)
                elif (changed := await restore(incident, plan)) is not None:
                    evidence = changed
                elif not await back_off(incident, plan):
                    evidence = plan.evidence
                else:
                    confirmation = await reattempt(incident, plan)
                    if confirmation is not None and confirmation.ok:
                        return await self._recovered(confirmation)
                    await incident.renew(Continued.REATTEMPTED)
                    incident.state.record_failed_reattempt()
                    evidence = await stop(incident)
        except Abandoned:
            return await self._given_up()

    async def _has_to_stop(self) -> bool:
        """Return whether the ranks must end because a replacement is ready for a machine that is at fault, or slow."""
        incident = self.incident
        if incident.state.continued:
            return True
        if incident.state.only_tells:
            note_answers(incident)
            return False
        try:
            if incident.state.anomaly.symptom is not Symptom.SLOW:
                return await secure(incident)
            await vote(incident)
            if stops := await secure(incident):
                await incident.notify_job(Stage.STOP)
            return stops
        except Abandoned:
            return False

    async def _observed(self) -> IncidentReport:
        """End the incident while the job continues unchanged."""
        report = observed_report(self.incident)
        self.incident.timeline.enter(Stage.OBSERVED, report.headline)
        return await self.incident.timeline.close(report, None)

    async def _recovered(self, confirmation: Confirmation) -> IncidentReport:
        incident = self.incident
        report = recovered_report(incident, confirmation)
        incident.timeline.enter(Stage.RECOVERED if confirmation.confirmed else Stage.NOT_CONFIRMED, report.headline)
        return await incident.timeline.close(report, incident.state.launched)

    async def _given_up(self) -> IncidentReport:
        incident, state = self.incident, self.incident.state
        report = abandoned_report(incident)
        incident.timeline.enter(Stage.ABANDONED, report.headline)
        with contextlib.suppress(ActivityError):  # the job's release ends the rest
            # No rank may keep running without an incident or a job that watches it; a launch may be under way.
            why = f"generation {state.generation}: no rank may keep running"
            await start_activity(StopRanks(job=state.placed, generation=state.generation, why=why))
        return await incident.timeline.close(report, incident.state.launched)
