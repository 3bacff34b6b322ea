"""Versions of a job's code are noted in the ledger as they change, for the time when the job's history is gone."""

from __future__ import annotations

from functools import partial

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.ledger.bounds import ON_LEDGER_WHEN_BACK
    from activities.ledger.records import NumbersUsed
    from everstep.base.text import listed
    from everstep.model.job_state import JobState
    from everstep.model.version import JobVersion, VersionStatus
    from workflows.recorded import record

NAMED = 4


class VersionNotes:
    """Of one job. Nothing waits for them: while an incident is open none is begun.

    Args:
        state: The job's.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._noted = {one.number: one for one in state.versions} if state.launched else {}
        """As the ledger has them, or is about to."""
        self._writing: set[workflow.ActivityHandle[NumbersUsed]] = set()

    @property
    def under_way(self) -> bool:
        """Whether something is written that would be lost if the job continued as new."""
        return bool(self._writing)

    def first_launch(self, *, noted: bool) -> None:
        """Whether the entry of the first launch has the versions."""
        self._noted = {one.number: one for one in self._state.versions} if noted else {}

    def look(self) -> None:
        """Write what changed."""
        state = self._state
        if not state.launched or state.outcome or state.status in {"starting", "recovering"}:
            return
        changed = [one for one in state.versions if not _alike(one, self._noted.get(one.number))]
        if not changed:
            return
        label = listed([f"v{one.number} {one.status}" for one in changed], NAMED)
        writing = record(state, versions=changed, label=label, bounds=ON_LEDGER_WHEN_BACK)
        self._writing.add(writing)
        writing.add_done_callback(partial(self._written, changed))
        self._noted |= {one.number: one for one in changed}

    def _written(self, changed: list[JobVersion], writing: workflow.ActivityHandle[NumbersUsed]) -> None:
        self._writing.discard(writing)
        if writing.cancelled() or writing.exception() is not None:  # with the next change, or the job's end
            for one in changed:
                if self._noted.get(one.number) is one:
                    del self._noted[one.number]


def _alike(version: JobVersion, noted: JobVersion | None) -> bool:
    """How far a trial has come is not noted."""
    if version is noted:
        return True
    if noted is None or version.status is not VersionStatus.CHECKING:
        return version == noted
    return version.model_copy(update={"why": ""}) == noted.model_copy(update={"why": ""})
