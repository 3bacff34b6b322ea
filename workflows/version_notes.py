"""Writes the versions of a job's code into the ledger when they change, because the job's history is not kept for
ever."""

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
    """The ledger entries of a job's versions. The job does not wait for them, and starts none during an incident.

    Args:
        state: The job's state.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._noted = {one.number: one for one in state.versions} if state.launched else {}
        """The versions that the ledger has, or will have after the running writes."""
        self._writing: set[workflow.ActivityHandle[NumbersUsed]] = set()

    @property
    def under_way(self) -> bool:
        """Return whether a write is running that would be lost if the job continued as new."""
        return bool(self._writing)

    def first_launch(self, *, noted: bool) -> None:
        """Note whether the ledger entry of the first launch has the versions."""
        self._noted = {one.number: one for one in self._state.versions} if noted else {}

    def look(self) -> None:
        """Write the versions that changed."""
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
        if writing.cancelled() or writing.exception() is not None:  # the next write repeats it
            for one in changed:
                if self._noted.get(one.number) is one:
                    del self._noted[one.number]


def _alike(version: JobVersion, noted: JobVersion | None) -> bool:
    """Return whether two states of a version are equal for the ledger; the progress of a trial is not stored."""
    if version is noted:
        return True
    if noted is None or version.status is not VersionStatus.CHECKING:
        return version == noted
    return version.model_copy(update={"why": ""}) == noted.model_copy(update={"why": ""})
