"""The entries that a job's workflow writes into the ledger: its life, its code versions, and closed incidents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.activity import Bounds
    from activities.ledger.records import NumbersUsed
    from activities.write_to_ledger import ON_LEDGER_WHEN_BACK, RecordJob, WriteConclusion
    from everstep.base.text import listed
    from everstep.model.incident import Anomaly, IncidentReport
    from everstep.model.job_state import JobState
    from everstep.model.launch import Confirmation, Launched
    from everstep.model.version import JobVersion, VersionStatus
    from workflows.start_activity import start_activity

NAMED = 4
"""The largest number of versions that the label of an entry names."""


def record(
    state: JobState,
    *,
    started_ns: int = 0,
    launched: Launched | None = None,
    confirmation: Confirmation | None = None,
    versions: Sequence[JobVersion] = (),
    label: str = "",
    bounds: Bounds | None = None,
) -> workflow.ActivityHandle[NumbersUsed]:
    """Start to write the state of a job, and its outcome once it has ended.

    Args:
        state: The job's state.
        started_ns: The start of the job, nanoseconds; 0: it is written already.
        launched: The first generation, if it was just launched.
        confirmation: The confirmation of that generation.
        versions: The code versions that changed.
        label: A text about the entry, for the timeline; empty: none is needed.
        bounds: The time limits of the write; None: those of a write that the job waits for.
    """
    entry = RecordJob(
        spec=state.spec,
        time_ns=workflow.time_ns(),
        started_ns=started_ns,
        launched=launched,
        confirmation=confirmation,
        outcome=state.outcome,
        versions=list(versions),
        label=label,
    )
    return start_activity(entry, bounds)


class VersionNotes:
    """Writes a job's code versions into the ledger, because the job's history is not kept for ever.

    The job does not wait for these writes, and starts none during an incident.

    Args:
        state: The job's state.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._noted = {version.number: version for version in state.versions} if state.launched else {}
        """The versions that the ledger has, or will have after the running writes."""
        self._writing: set[workflow.ActivityHandle[NumbersUsed]] = set()

    @property
    def under_way(self) -> bool:
        """Whether a write is running that would be lost if the job continued as new."""
        return bool(self._writing)

    def first_launch(self, *, noted: bool) -> None:
        """Note whether the ledger entry of the first launch has the versions."""
        self._noted = {version.number: version for version in self._state.versions} if noted else {}

    def write_changes(self) -> None:
        """Start to write the versions that changed."""
        state = self._state
        if not state.launched or state.outcome or state.status in {"starting", "recovering"}:
            return
        changed = [version for version in state.versions if not _alike(version, self._noted.get(version.number))]
        if not changed:
            return
        label = listed([f"v{version.number} {version.status}" for version in changed], NAMED)
        writing = record(state, versions=changed, label=label, bounds=ON_LEDGER_WHEN_BACK)
        self._writing.add(writing)
        writing.add_done_callback(partial(self._written, changed))
        self._noted |= {version.number: version for version in changed}

    def _written(self, changed: list[JobVersion], writing: workflow.ActivityHandle[NumbersUsed]) -> None:
        self._writing.discard(writing)
        if writing.cancelled() or writing.exception() is not None:  # the next write repeats it
            for version in changed:
                if self._noted.get(version.number) is version:
                    del self._noted[version.number]


class Closings:
    """Ledger entries that the job writes to close incidents.

    No recovery waits for these writes, and they are retried for an hour while the ledger is unreachable. A write is
    lost when the job's workflow ends or continues as new. So the job continues as new only after all writes, and
    repeats the unfinished writes when it ends.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[workflow.ActivityHandle[Any], WriteConclusion]] = []

    @property
    def pending(self) -> list[WriteConclusion]:
        """The entries that are not written yet."""
        return [entry for writing, entry in self._begun if not writing.done()]

    def write(
        self, job: str, incident: str, anomaly: Anomaly, opened_ns: int, report: IncidentReport, *, position: int
    ) -> None:
        """Write an entry, which may exist already.

        Args:
            job: The name of the job.
            incident: The id of the incident's workflow.
            anomaly: The anomaly that opened the incident.
            opened_ns: The time of the opening, nanoseconds.
            report: The report of the incident.
            position: The position of the entry within the incident.
        """
        entry = WriteConclusion(
            incident=incident,
            job=job,
            anomaly=anomaly,
            opened_ns=opened_ns,
            position=position,
            time_ns=workflow.time_ns(),
            stage="closed",
            text=report.headline,
            launched=report.launched,
            report=report.model_copy(update={"unwritten": 0, "launched": None}),
        )
        writing = start_activity(entry, ON_LEDGER_WHEN_BACK)
        self._begun = [begun for begun in self._begun if not begun[0].done()] + [(writing, entry)]

    def again(self) -> list[workflow.ActivityHandle[Any]]:
        """Start the unfinished writes again because the job is over; each is retried for half a minute."""
        return [start_activity(entry) for entry in self.pending]


def _alike(version: JobVersion, noted: JobVersion | None) -> bool:
    """Return whether two states of a version are equal for the ledger; the progress of a trial is not stored."""
    if version is noted:
        return True
    if noted is None or version.status is not VersionStatus.CHECKING:
        return version == noted
    return version.model_copy(update={"why": ""}) == noted.model_copy(update={"why": ""})
