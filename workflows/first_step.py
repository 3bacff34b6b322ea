"""Waits for the first step of a generation that no incident waits for. This is the generation of the job's first
launch, or of a restart that was not confirmed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.agents.confirm_steps import ConfirmSteps
    from everstep.decisions.act.recover.confirm import confirm_bound_s
    from everstep.decisions.act.recover.rules import backoff_s
    from everstep.model.incident import Anomaly, Symptom
    from everstep.model.job_state import JobState
    from everstep.model.launch import Confirmation, Launched
    from workflows.start_activity import start_activity

LEAST_BOUND_S = 1.0
"""The shortest time limit of a check, for ranks that should have stepped by now, seconds."""


class FirstStepWatch:
    """Waits for the first step of the newest generation; all of its data is in the job's state.

    Args:
        state: The job's state, which is changed.
        interrupted: Returns whether the job has other work; the wait ends then.
    """

    def __init__(self, state: JobState, interrupted: Callable[[], bool]) -> None:
        self._state = state
        self._interrupted = interrupted
        self._unanswered = 0
        """The number of checks in a row that had no result."""

    @property
    def due(self) -> bool:
        """Whether the first step of a generation is awaited."""
        return self._state.confirm_by_ns > 0

    def expect(self) -> None:
        """Expect the first step of the newest generation, which was just launched."""
        self._state.confirm_by_ns = workflow.time_ns() + int(self._bound_s() * 1e9)

    def leave(self) -> None:
        """Stop waiting: an incident stops the newest generation, and waits for the next ones itself."""
        self._state.confirm_by_ns, self._state.unconfirmed = 0, ""

    async def ask(self, launched: Launched | None = None) -> tuple[bool, Confirmation | None]:
        """Wait until it is known whether the newest generation steps, or until interrupted.

        Args:
            launched: The result of the launch, if it is still known.

        Returns:
            Whether the wait was completed, and the result; None: there is none.
        """
        state = self._state
        known_alive = state.unconfirmed != ""
        confirmed = start_activity(
            ConfirmSteps(
                job=state.placed,
                launched=launched or Launched(generation=state.generation, resume_step=state.resume_step, started_ns=0),
                timeout_s=max((state.confirm_by_ns - workflow.time_ns()) / 1e9, LEAST_BOUND_S),
                showing=state.showing,
                known_alive=known_alive,
            )
        )
        event = asyncio.create_task(workflow.wait_condition(self._interrupted))
        await workflow.wait([confirmed, event], return_when=asyncio.FIRST_COMPLETED)
        event.cancel()
        if not confirmed.done():
            confirmed.cancel()
            return False, None
        if error := confirmed.exception():
            workflow.logger.warning("it is not known whether the ranks step", extra={"error": str(error)})
            self._unanswered += 1
            return True, None
        self._unanswered = 0
        self._apply(confirmed.result(), known_alive=known_alive)
        return True, confirmed.result()

    async def back_off(self) -> None:
        """Wait before a check that had no result is repeated."""
        if self._unanswered and self.due:
            wait_s = max(backoff_s(self._unanswered, self._state.spec.policy), LEAST_BOUND_S)
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    self._interrupted, timeout=timedelta(seconds=wait_s), timeout_summary="ASK AGAIN"
                )

    def _bound_s(self) -> float:
        return confirm_bound_s(self._state.first_step_s, self._state.spec.policy)

    def _apply(self, confirmation: Confirmation, *, known_alive: bool) -> None:
        state = self._state
        if confirmation.showing.kind:
            state.showing = confirmation.showing
        if confirmation.ok:
            if state.status == "starting":
                state.unproductive_s = (confirmation.stepped_ns - state.started_ns) / 1e9
            state.status = "running"
            state.unconfirmed = "" if confirmation.confirmed else confirmation.reason
            if confirmation.confirmed:
                took_s = self._bound_s() - (state.confirm_by_ns - workflow.time_ns()) / 1e9
                state.first_step_s = max(state.first_step_s, round(took_s, 3))
            elif not known_alive:
                return  # the ranks are alive; it is not known yet whether they step
        elif confirmation.emptied:
            # Watchers may not have seen ranks that were lost so early.
            suspect(state, Symptom.CRASH, confirmation.reason)
        elif confirmation.timed_out:
            # Watchers detect no hang before the first step; they report ends of ranks themselves.
            suspect(state, Symptom.HANG, confirmation.reason)
        state.confirm_by_ns = 0


def suspect(state: JobState, symptom: Symptom, headline: str) -> None:
    """Add an anomaly that the job itself has detected in its newest generation."""
    state.pending.append(
        Anomaly(
            id=f"{symptom.replace(' ', '-')}-{state.spec.name}-{state.generation}",
            generation=state.generation,
            symptom=symptom,
            headline=headline,
            seen_ns=workflow.time_ns(),
        )
    )
