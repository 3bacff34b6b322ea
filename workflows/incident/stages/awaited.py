"""What an incident that is short of machines waits for: those that are silent, or others in their places."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from activities.agents.await_machines import AwaitMachines
    from activities.pool.await_standbys import AwaitStandbys
    from everstep.model.machine import Machine
    from workflows.start_activity import start_activity

THERE_ARE_OTHERS = "there are machines for all that leave the job"


class Awaited:
    """Both are asked for at once, by activities that end when it is so."""

    def __init__(self, silent: list[Machine], missing: int, patience: timedelta) -> None:
        """Begin to ask.

        Args:
            silent: Machines that do not answer.
            missing: So many machines the pool has too few.
            patience: Asked no longer than this.
        """
        self._back: ActivityHandle[list[str]] | None = None
        self._others: ActivityHandle[int] | None = None
        if silent:
            self._back = start_activity(AwaitMachines(machines=silent, patience_s=patience.total_seconds()))
        if missing:
            self._others = start_activity(AwaitStandbys(count=missing, patience_s=patience.total_seconds()))
        self._missing = missing

    @property
    def came_back(self) -> bool:
        """All that were silent answer."""
        back = self._back
        return back is not None and back.done() and back.exception() is None and not back.result()

    @property
    def there_are_others(self) -> bool:
        """The pool has as many as were missing."""
        others = self._others
        return others is not None and others.done() and others.exception() is None and others.result() >= self._missing

    @property
    def either(self) -> bool:
        """It can go on."""
        return self.came_back or self.there_are_others

    @property
    def stay_silent(self) -> bool:
        """Those that are silent had all the time."""
        return self._back is not None and self._back.done() and not self.came_back

    def cancel(self) -> None:
        """Ask no longer."""
        for waiting in (self._back, self._others):
            if waiting is not None:
                waiting.cancel()
