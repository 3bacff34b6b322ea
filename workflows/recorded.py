"""What a job writes into the ledger of its own life."""

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
    """Write what happened to a job, and how it ended once it has.

    Args:
        state: Of the job.
        started_ns: It starts now; 0: that is written already.
        launched: Its first generation, where it was just launched.
        confirmation: Of that generation.
        versions: Of its code, that changed.
        label: What it is, for people; empty: it goes without saying.
        bounds: Of the write; None: those of one that the job waits for.
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
