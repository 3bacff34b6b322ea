"""Waits of an incident that has too few machines: for its silent machines, or for others from the pool."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from activities.agents.await_machines import AwaitMachines
    from activities.pool.requests import AwaitStandbys
    from everstep.model.machine import Machine
    from workflows.start_activity import start_activity

THERE_ARE_OTHERS = "there is a replacement for each machine that leaves the job"


class Awaited:
    """Two waits at the same time. Each is an activity that succeeds when its wait is over, and that occupies no worker
    between its questions."""

    def __init__(self, silent: list[Machine], missing: int, patience: timedelta) -> None:
        """Start the waits.

        Args:
            silent: Machines that do not answer.
            missing: The number of machines that the pool lacks.
            patience: The longest wait.
        """
        self._back: ActivityHandle[None] | None = None
        self._others: ActivityHandle[None] | None = None
        if silent:
            self._back = start_activity(AwaitMachines(machines=silent, patience_s=patience.total_seconds()))
        if missing:
            self._others = start_activity(AwaitStandbys(count=missing, patience_s=patience.total_seconds()))

    @property
    def came_back(self) -> bool:
        """Return whether all silent machines answer again."""
        back = self._back
        return back is not None and back.done() and back.exception() is None

    @property
    def there_are_others(self) -> bool:
        """Return whether the pool has as many machines as were missing."""
        others = self._others
        return others is not None and others.done() and others.exception() is None

    @property
    def either(self) -> bool:
        """Return whether the incident can continue."""
        return self.came_back or self.there_are_others

    @property
    def stay_silent(self) -> bool:
        """Return whether the silent machines did not answer in time."""
        return self._back is not None and self._back.done() and not self.came_back

    def cancel(self) -> None:
        """Cancel both waits."""
        for waiting in (self._back, self._others):
            if waiting is not None:
                waiting.cancel()
