"""Writes the life of a job into the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.activity import Bounds
    from activities.ledger.record_job import RecordJob
    from activities.ledger.records import NumbersUsed
    from everstep.model.job_state import JobState
    from everstep.model.launch import Confirmation, Launched
    from everstep.model.version import JobVersion
    from workflows.start_activity import start_activity


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
