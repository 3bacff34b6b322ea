"""Workflows of another release, whose answers this release cannot read completely."""

from __future__ import annotations

from typing import Any

from temporalio import workflow

UNREADABLE: dict[str, Any] = {
    "spec": {"name": "new", "script": "/x.py", "order": ["pp", "ep", "dp", "tp"]},
    "machines": [],
}
"""The state of a job whose mesh has an axis that only a later release knows."""


FAILING = "failing"
"""The state of a job that answers no query, since each of its workflow tasks fails."""


@workflow.defn(name="Job", sandboxed=False)
class OtherJob:
    """A job that returns its input as its state, and does nothing else."""

    @workflow.init
    def __init__(self, state: Any) -> None:
        self.state = state
        self.over = False

    @workflow.query(name="state")
    def current_state(self) -> Any:
        """Return the input."""
        return self.state

    @workflow.signal(name="stop")
    def stop(self, request: Any) -> None:
        """End the job."""
        self.over = True

    @workflow.run
    async def run(self, state: Any) -> Any:
        """Run until the job is stopped."""
        if state == FAILING:
            raise RuntimeError("no task of this workflow succeeds")
        await workflow.wait_condition(lambda: self.over)
        return {"headline": "over", "outcome": "stopped", "generations": 1, "incidents": []}
