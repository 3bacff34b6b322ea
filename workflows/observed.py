"""Faults with which a job goes on: each is told by an incident of its own, in which nothing is done.

Where the rules of eviction want the machine out, it is the job's next incident that does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.evict.plan_evictions import EvictFacts, plan_evictions
    from everstep.decisions.blame.alerts import alerts_kept
    from everstep.decisions.detect.machine_fault import operator_anomaly, without
    from everstep.model.incident import Anomaly, IncidentReport, Symptom
    from everstep.model.job_state import IncidentSummary, JobState
    from everstep.model.pool import OperatorMove
    from workflows.child_incident import open_incident
    from workflows.messages import lost_incident

AGAIN_S = 3600.0
"""The same fault of the same part is told again after this time at the earliest."""
SLOW = "the job is slow"
"""What a vote for a slow machine is about, among what was told."""
WAITING = 32
"""Faults that wait to be told, at most: more of them say nothing new."""
TOLD = 200
"""Faults of which it is remembered that they were told."""


class ObservedFaults:
    """Of one job.

    Args:
        state: The job's.
        note: Notes that an incident was opened; returns its number.
        close: Takes the number of an incident that is over, when it was opened, its anomaly and its report.
    """

    def __init__(
        self,
        state: JobState,
        note: Callable[[Anomaly], int],
        close: Callable[[int, int, Anomaly, IncidentReport], None],
    ) -> None:
        self._state = state
        self._note = note
        self._close = close
        self.goes_on = False
        """The job goes on although an incident is open."""
        self._telling: set[asyncio.Task[None]] = set()

    def take(self, anomaly: Anomaly) -> str:
        """Take a fault; returns what is done with it, for people."""
        state, now_ns = self._state, workflow.time_ns()
        if state.status not in {"starting", "running"} and not self.goes_on:
            return "an incident is open, and asks the machines itself"
        if anomaly.symptom is Symptom.SLOW:
            return self._take_slow(anomaly, now_ns)
        known = {about for about, told_ns in state.observed_told.items() if now_ns - told_ns < AGAIN_S * 1e9}
        new = without(anomaly, known)
        if new is None:
            return "told already"
        if len(state.observed) >= WAITING:
            return f"{WAITING} others wait"
        self._remember({found.about: now_ns for found in new.findings})
        state.alerts = alerts_kept(state.alerts, new.findings, now_ns)
        state.observed.append(new)
        return "taken"

    def _take_slow(self, anomaly: Anomaly, now_ns: int) -> str:
        """Take that the job became slow, once in a while: looking into it costs the ranks something."""
        state = self._state
        told_ns = state.observed_told.get(SLOW)
        if anomaly.generation != state.generation:
            return f"generation {anomaly.generation} is over"
        if told_ns is not None and now_ns - told_ns < state.spec.policy.slow.again_after_s * 1e9:
            return "told already"
        self._remember({SLOW: now_ns})
        state.observed.append(anomaly)
        return "taken"

    def _remember(self, told_now: dict[str, int]) -> None:
        """Note what is told now, and forget what was told longest ago."""
        newest = sorted({**self._state.observed_told, **told_now}.items(), key=lambda entry: entry[1])[-TOLD:]
        self._state.observed_told = dict(newest)

    def take_move(self, move: OperatorMove) -> None:
        """Take what an operator says of a machine, as often as it is said, unless it does not concern the job now."""
        state = self._state
        waiting = {name for anomaly in (*state.observed, *state.pending) for name in anomaly.machines}
        ours = move.machine in {machine.name for machine in state.machines}
        if state.status == "running" and ours and move.machine not in waiting:
            state.observed.append(operator_anomaly(move, state.generation, workflow.time_ns()))

    def _is_to_leave(self, anomaly: Anomaly) -> bool:
        state = self._state
        if anomaly.more_findings:
            return False  # what so many have at once they have in common
        facts = EvictFacts(
            now_ns=workflow.time_ns(),
            machines=[machine.name for machine in state.machines],
            findings=anomaly.findings,
            earlier=state.alerts,
            evicted_ns=state.evicted_ns,
        )
        return bool(plan_evictions(facts, state.spec.policy).evict)

    @property
    def due(self) -> bool:
        """Whether one can be told now."""
        return bool(self._state.observed) and self._state.status == "running"

    @property
    def under_way(self) -> bool:
        """Whether an incident that tells one is open."""
        return bool(self._telling)

    def begin(self) -> None:
        """Open the incidents of all that wait; nobody waits for their end.

        That of a machine that is to leave the job waits for the job itself, as does that of a job that became slow.
        """
        waiting, self._state.observed = self._state.observed, []
        for anomaly in waiting:
            is_slow = anomaly.symptom is Symptom.SLOW
            if is_slow or self._is_to_leave(anomaly):
                self._state.pending.append(anomaly.model_copy(update={"generation": self._state.generation}))
                continue
            task = asyncio.create_task(self._tell(anomaly), name="observed fault")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def told(self) -> None:
        """Wait until all that are open are over."""
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def _tell(self, anomaly: Anomaly) -> None:
        while True:
            number, opened_ns = self._note(anomaly), workflow.time_ns()
            try:
                child = await open_incident(self._state, number, anomaly, only_tells=True)
                break
            except WorkflowAlreadyStartedError:
                summaries: list[IncidentSummary] = self._state.incidents
                self._state.incidents = [summary for summary in summaries if summary.number != number]
        try:
            report = await child
        except ChildWorkflowError as error:
            report = lost_incident(anomaly, self._state.generation, str(error.cause or error))
        self._close(number, opened_ns, anomaly, report)
