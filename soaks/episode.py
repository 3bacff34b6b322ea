"""Runs the episodes of a soak: opens a gate, injects the faults, waits for the next gate, and judges there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from temporalio.service import RPCError

from drills.faults.away import LinkDown
from drills.faults.fault import inject
from drills.inject.context import DrillContext, copies_seen
from drills.judge import facts as gather
from drills.judge.compare import compare
from drills.judge.facts import DrillFacts, IncidentFacts
from drills.judge.result import DrillResult
from drills.judge.versions import steps_under_their_versions
from drills.observe import step_records
from drills.observe.processes import CopyWatch
from drills.observe.step_records import Records
from drills.observe.stored_copies import Damaged
from drills.spec.fault import Entry
from drills.verdict import copy_report_problems
from everstep.errors import ClusterError, EverstepError, SoakStuck
from everstep.rank import drill_faults as faults
from soaks.invariants import Baseline, Struck, learn, violations
from soaks.job import SoakJob
from soaks.observe import GateObservations, failed_tasks, observe
from soaks.other_job import BothJobs, OtherJob
from soaks.plan import GAP, Episode
from soaks.result import EpisodeResult, no_result

LIMIT_S = 240.0
"""The job gets from one gate to the next within this time, seconds."""
STAGE_LIMIT_S = 60.0
"""The first fault's incident reaches the stage of the second fault within this time, seconds."""
CLOSED_LIMIT_S = 15.0
"""An incident whose job steps again is over within this time, seconds; a killed worker may have to start first."""
MAY_LEAVE_S = 8.0
"""If a link is down for longer, its machine may leave the job, seconds."""
POLL_S = 0.05
STATE_S = 1.0
"""Time between two checks of whether the job is parked or over, seconds."""


class Episodes:
    """Runs the episodes of a soak's job in sequence.

    Args:
        job: The soak's job, which is started already.
        reference: Step records of a run without faults.
        other: The second job; None: there is none.
    """

    def __init__(self, job: SoakJob, reference: Records, other: OtherJob | None = None) -> None:
        self.job, self.cluster = job, job.cluster
        self.both = BothJobs(job, other)
        self._reference = reference
        self._baseline = Baseline()
        self._incidents = 0
        self._generation = 0
        self._damaged: list[Damaged] = []
        self._damaged_before: list[Damaged] = []
        self._behind = False
        """Whether machines backed up only named steps at the last gate."""

    async def begin(self) -> list[str]:
        """Wait until the job is at the first gate; returns the violations there."""
        watch = self._watch()
        try:
            await self._reach(0)
        except SoakStuck as error:
            return [f"the job steps: {error}"]
        finally:
            await asyncio.to_thread(watch.stop)
        context = self._context(0, 0)
        seen = await self._seen(context, self.job.plan.gate(0), Records())
        await self.both.observe(seen, Struck())
        _watched(seen, watch, [context])
        return self._judged(seen, Struck())

    async def run(self, index: int) -> EpisodeResult:
        """Run the episode with this index, from its gate to the next one."""
        episode, began = self._episode(index), time.monotonic()
        self._running = episode
        result = no_result(episode)
        result.steps = (self.job.plan.gate(index), self.job.plan.gate(index + 1))
        contexts = [self._context(index, position) for position in range(len(episode.faults))]
        hold = await self._arm(index, contexts)
        watch = self._watch()
        striking = asyncio.create_task(self._strike(index, contexts, hold))
        try:
            self.job.gate(index).open()
            await self._reach(index + 1)
            # All waits of the injector are limited. A part that was away must be back before the observations.
            result.not_fired = await striking + _unfired(contexts)
        except SoakStuck as error:
            result.violations.append(f"the job steps: {error}")
        finally:
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
            await asyncio.to_thread(watch.stop)
        if not result.violations:
            await self._observe_and_judge(result, contexts, watch)
        if not result.violations:
            result.violations = await self.both.put_back(contexts)
        result.seconds = round(time.monotonic() - began, 3)
        return result

    async def _observe_and_judge(self, result: EpisodeResult, contexts: list[DrillContext], watch: CopyWatch) -> None:
        """Observe the job at the gate, and add the violations to the result."""
        gate, step = result.steps
        hung = self._behind or any(context.request.fault.delays_backups for context in contexts)
        struck = self._struck(contexts, gate)
        try:
            seen = await self._seen(contexts[0], step, self._rescued(contexts), gate, hung=hung, lost=struck.gone)
            await self.both.observe(seen, struck)
            seen.unreported = await self._unreported(contexts, seen.incidents)
        except (EverstepError, RPCError, OSError) as error:
            result.violations.append(f"the job can be observed: {error}")
            return
        _watched(seen, watch, contexts)
        result.violations = self._judged(seen, struck)
        self._behind = seen.backed_up < step
        result.incidents = [incident.id for incident in seen.incidents]
        result.steps_lost = sum(incident.report.lost_steps or 0 for incident in seen.incidents if incident.report)
        result.recovered_s = recovered_s(contexts, seen.incidents)

    async def _unreported(self, contexts: list[DrillContext], incidents: list[IncidentFacts]) -> list[str]:
        """Return the parts that did not come back; for a single fault, also the problems that the judge of drills finds
        in reports."""
        found = [
            f"{context.request.fault.name} of {context.target.name}: it did not come back"
            for context in contexts
            if context.seen.absence and context.seen.absence.back_ns is None
        ]
        if len(contexts) == 1 and contexts[0].planned.outside:
            texts = [text for incident in incidents for text in await self._texts(incident)]
            seen, request = contexts[0].seen, contexts[0].request
            new = [copy for copy in seen.damaged if copy not in self._damaged_before]
            facts = DrillFacts(seen=replace(seen, damaged=new), incidents=incidents, texts=texts)
            evicted = [name for incident in incidents if incident.report for name in incident.report.evicted]
            found += copy_report_problems(request, facts, DrillResult(fault=request.fault.name, evicted=evicted))
        return found

    async def _texts(self, incident: IncidentFacts) -> list[str]:
        """Return the texts of an incident; only those of its report if the ledger is not back yet."""
        try:
            return await gather.texts(self.cluster, incident)
        except EverstepError:
            return [incident.report.headline, *incident.report.stages] if incident.report else []

    def _rescued(self, contexts: list[DrillContext]) -> Records:
        """Return the step records of machines that were emptied since the last gate; remember damaged copies."""
        rescued, self._damaged_before = Records(), list(self._damaged)
        for context in contexts:
            rescued.join(context.seen.records)
            self._damaged += [copy for copy in context.seen.damaged if copy not in self._damaged]
        return rescued

    def _struck(self, contexts: list[DrillContext], gate: int) -> Struck:
        promises = [context.seen.promise for context in contexts if context.seen.promise]
        cut = [c for c in contexts if isinstance(c.request.fault, LinkDown) and c.request.fault.seconds > MAY_LEAVE_S]
        return Struck(
            tuple(context.request for context in contexts),
            tuple(promises),
            gate,
            gone=[name for context in contexts for name in _gone(context)],
            away=[context.target.name for context in cut] + [name for context in contexts for name in _hung(context)],
            second_job_gone=self.both.second_job_gone,
            behind=self._behind,
        )

    def _episode(self, index: int) -> Episode:
        return self.job.plan.episodes[index]

    def _context(self, index: int, position: int) -> DrillContext:
        request = self.job.plan.request(index, position)
        planned = self.job.planned(index, position)
        context = DrillContext(self.cluster, request, self.job.spec, self.job.machines, planned)
        context.seen.damaged = list(self._damaged)
        return context

    def _watch(self) -> CopyWatch:
        watch = CopyWatch(self.cluster.tree())
        watch.start()
        return watch

    # Striking.

    async def _arm(self, index: int, contexts: list[DrillContext]) -> Entry | None:
        """Write the workers' entries; returns the hold in which a recovery waits for the second fault, if there is
        one."""
        workers: list[Entry] = [fault for context in contexts for fault in context.planned.workers]
        within = self._episode(index).how == "within" and contexts[1].planned.outside
        hold = self._stage_hold(index) if within else None
        await asyncio.to_thread(self.job.arm_workers, [*workers, *([hold] if hold else [])])
        return hold

    async def _strike(self, index: int, contexts: list[DrillContext], hold: Entry | None) -> list[str]:
        """Inject the faults that strike from outside; returns problems."""
        first = contexts[:1] if self._running.how == "within" else contexts
        releasing = asyncio.create_task(self._release_strikes(index, first))
        injected = [
            self._inject(context, hold if position else None)
            for position, context in enumerate(contexts)
            if context.planned.outside
        ]
        try:
            trouble = await asyncio.gather(*injected, self.both.strike_other(contexts[0], self._running.other))
        finally:
            releasing.cancel()
            self.job.strikes(index).open()
        return [text for text in trouble if text]

    async def _release_strikes(self, index: int, contexts: list[DrillContext]) -> None:
        """Let ranks that wait for faults from outside continue once these have struck."""
        outside = [(context, fault["id"]) for context in contexts for fault in context.planned.outside]
        while not all(context.fired(name) for context, name in outside):  # noqa: ASYNC110 - files show it
            await asyncio.sleep(POLL_S)
        self.job.strikes(index).open()

    def _stage_hold(self, index: int) -> Entry:
        episode, folder = self._episode(index), self.job.episode_folder(index)
        return {
            "id": "stage",
            "fault": "hold",
            "job": self.job.spec.name,
            "in_stage": episode.stage,
            "moment": episode.moment,
            "until": str(folder / "struck"),
            "marks": str(folder / "stage.json"),
        }

    async def _inject(self, context: DrillContext, hold: Entry | None) -> str:
        """Inject a fault from outside; if there is a hold, only once a recovery has reached it. Return the problem."""
        if hold is None:
            return await self._injected(context)
        try:
            await context.until(
                lambda: faults.fired(context.planned.plan, hold) is not None,
                STAGE_LIMIT_S,
                f"no incident reached the {hold['moment']} of stage {hold['in_stage']}",
            )
        except ClusterError as error:
            return str(error)
        injecting = asyncio.create_task(self._injected(context))
        try:
            while not injecting.done() and not all(context.fired(fault["id"]) for fault in context.planned.outside):  # noqa: ASYNC110 - files show it
                await asyncio.sleep(POLL_S)
        finally:
            await asyncio.to_thread(Path(hold["until"]).touch)
        return await injecting

    async def _injected(self, context: DrillContext) -> str:
        try:
            await inject(context)
        except (EverstepError, OSError) as error:
            return f"{context.request.fault.name}: {error}"
        return ""

    # Waiting.

    async def _reach(self, index: int) -> None:
        """Wait until all ranks wait at the gate with this index.

        Raises:
            SoakStuck: the ranks do not reach it, or the job is parked or over.
        """
        gate, deadline, checked = self.job.gate(index), time.monotonic() + LIMIT_S, time.monotonic()
        while not await asyncio.to_thread(lambda: gate.reached):
            if time.monotonic() - checked > STATE_S:
                checked = time.monotonic()
                if over := await self._over(index - 1):
                    raise SoakStuck(over)
            if time.monotonic() > deadline:
                raise SoakStuck(f"the job did not reach step {gate.step} within {LIMIT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _over(self, index: int) -> str:
        """Return why the job can reach no further gate; empty: it can."""
        try:
            state = await self.cluster.control.state(self.job.spec.name)
        except EverstepError:
            return ""  # the fault struck the control plane
        if state.outcome:
            return f"the job is over: {state.outcome}"
        away = index >= 0 and self._episode(index).setting == "network"  # the job resumes by itself
        if state.status == "parked" and not away:
            incident = state.incidents[-1] if state.incidents else None
            return f"the job is parked: {incident.headline if incident else state.status_text}"
        return ""

    # Judging.

    async def _seen(
        self,
        context: DrillContext,
        step: int,
        rescued: Records,
        gate: int = 0,
        *,
        hung: bool = False,
        lost: Sequence[str] = (),
    ) -> GateObservations:
        """Observe the job at a gate, and add the observations since the last gate.

        Args:
            context: Context of one of the faults.
            step: The step of the gate.
            rescued: Step records of machines that were emptied.
            gate: Step of the last gate.
            hung: Whether an agent hung. That agent counts the time of its hang as that of a slow disk, and writes fewer
                steps for a while. Its backups may be behind too, and then all machines back up only named steps.
            lost: Machines that were lost and have no records.
        """
        incidents = await self._closed()
        before = {machine.name: machine for machine in self.job.machines if machine.name not in lost}
        await self.job.refresh()
        context = replace(context, machines=self.job.machines)
        machines = list((before | {machine.name: machine for machine in self.job.machines}).values())
        seen = await observe(context, step, late=GAP if hung else 0, unheld_before=self._baseline.unheld or ())
        seen.incidents = [incident for incident in incidents if not gather.is_observed(incident)]
        self._incidents += len(incidents)
        for incident in seen.incidents:
            seen.failed_tasks += await failed_tasks(self.cluster, incident.id)
        agents, name = self.cluster.control.agents, self.job.spec.name
        found = await step_records.collect(agents, name, machines, rescued, from_step=gate)
        newest = max((record.generation for records in found.of.values() for record in records), default=0)
        seen.generation = self._generation = max(newest, self._generation)
        world_size = self.job.spec.topology().world_size
        since = found.between(gate, step)
        seen.versions = (await self.cluster.control.state(name)).versions
        seen.other_versions = steps_under_their_versions(seen.versions, since)
        seen.comparison = compare(self._reference.between(gate, step), since, world_size)
        seen.redone = since.redone()
        return seen

    async def _closed(self) -> list[IncidentFacts]:
        """Wait until the incidents since the last gate are over; a killed worker may have to start first."""
        deadline = time.monotonic() + CLOSED_LIMIT_S
        while True:
            found = await gather.incidents(self.cluster, self.job.spec.name, self._incidents + 1)
            if all(incident.report for incident in found) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(POLL_S)

    def _judged(self, seen: GateObservations, struck: Struck) -> list[str]:
        found = violations(seen, struck, self.job.spec, self._baseline)
        learn(seen, self._baseline)
        return found


def _gone(context: DrillContext) -> list[str]:
    """Return the machines of the job that a fault takes away for good."""
    if not context.request.fault.stays_away:
        return []
    return [context.machines[index].name for index in context.request.fault.loss(context.spec).machines]


def _hung(context: DrillContext) -> list[str]:
    """Return the machines of the job with ranks that hang. They leave the job unless another fault ends all ranks
    first."""
    if not context.request.fault.hangs:
        return []
    topology = context.spec.topology()
    return [context.machines[topology.machine(rank)].name for rank in context.request.fault.struck_ranks(context.spec)]


def _watched(seen: GateObservations, watch: CopyWatch, contexts: Sequence[DrillContext]) -> None:
    seen.copies, seen.shared, seen.blind_s = copies_seen(watch.copies, contexts), sorted(watch.shared), watch.blind_s


def _unfired(contexts: Sequence[DrillContext]) -> list[str]:
    return [
        f"fault {position + 1} ({context.request.fault.name}): {name}"
        for position, context in enumerate(contexts)
        for name, mark in context.planned.fired().items()
        if mark is None
    ]


def recovered_s(contexts: Sequence[DrillContext], incidents: Sequence[IncidentFacts]) -> float | None:
    """Return the time from the first fault until all ranks stepped after the last incident, seconds; None: no incident
    recovered."""
    marks = [
        mark
        for context in contexts
        if not context.request.fault.is_control  # such a fault strikes within another fault's incident
        for mark in context.planned.fired().values()
        if mark
    ]
    reports = [incident.report for incident in incidents if incident.report and incident.report.recovered]
    stepped = [report.confirmation.stepped_ns for report in reports if report.confirmation]
    return round((max(stepped) - min(int(mark["time_ns"]) for mark in marks)) / 1e9, 3) if marks and stepped else None
