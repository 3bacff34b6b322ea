"""Faults with which a job continues: an incident of its own records each, and does nothing else.

If the rules of eviction want the machine to leave, the job's next incident evicts it.
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
"""A fault of the same part is recorded again only after this time, seconds."""
SLOW = "the job is slow"
"""The key of a vote for a slow machine among the recorded faults."""
WAITING = 32
"""The largest number of faults that wait to be recorded; more add nothing."""
TOLD = 200
"""The number of recorded faults that are remembered."""


class ObservedFaults:
    """The faults with which a job continues.

    Args:
        state: The job's state.
        note: Notes that an incident was opened; returns its number.
        close: Closes an incident; the arguments are its number, the time of its opening, its anomaly and its report.
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
        """Whether the job continues although an incident is open."""
        self._telling: set[asyncio.Task[None]] = set()

    def take(self, anomaly: Anomaly) -> str:
        """Accept a fault; returns what is done with it, as text."""
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
        """Accept that the job is slow, but not too often, because an investigation costs the ranks time."""
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
        """Note the faults that are recorded now, and drop the oldest."""
        newest = sorted({**self._state.observed_told, **told_now}.items(), key=lambda entry: entry[1])[-TOLD:]
        self._state.observed_told = dict(newest)

    def take_move(self, move: OperatorMove) -> None:
        """Accept an operator's request to evict a machine, unless the job has not got it or handles it already."""
        state = self._state
        waiting = {name for anomaly in (*state.observed, *state.pending) for name in anomaly.machines}
        ours = move.machine in {machine.name for machine in state.machines}
        if state.status == "running" and ours and move.machine not in waiting:
            state.observed.append(operator_anomaly(move, state.generation, workflow.time_ns()))

    def _is_to_leave(self, anomaly: Anomaly) -> bool:
        state = self._state
        if anomaly.more_findings:
            return False  # so many faults at once have a common cause
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
        """Return whether a fault can be recorded now."""
        return bool(self._state.observed) and self._state.status == "running"

    @property
    def under_way(self) -> bool:
        """Return whether an incident that records a fault is open."""
        return bool(self._telling)

    def begin(self) -> None:
        """Open the incidents of all faults that wait, and do not wait for their end.

        Faults of a machine that must leave, and of a slow job, become incidents that the job itself waits for.
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
        """Wait until all open incidents are closed."""
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
