"""What a job writes into the ledger of its own life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities import messages
    from activities.ledger.records import NumbersUsed
    from activities.messages import RecordInput
    from everstep.model.job_state import JobState
    from everstep.model.launch import Confirmation, Launched
    from everstep.model.version import JobVersion
    from workflows import web_ui
    from workflows.options import on_ledger


def record(
    state: JobState,
    *,
    started_ns: int = 0,
    launched: Launched | None = None,
    confirmation: Confirmation | None = None,
    versions: Sequence[JobVersion] = (),
    label: str = "",
    options: Mapping[str, Any] | None = None,
) -> workflow.ActivityHandle[NumbersUsed]:
    """Write what happened to a job, and how it ended once it has.

    Args:
        state: Of the job.
        started_ns: It starts now; 0: that is written already.
        launched: Its first generation, where it was just launched.
        confirmation: Of that generation.
        versions: Of its code, that changed.
        label: What it is, for people; empty: it goes without saying.
        options: Of the activity; None: those of a write that the job waits for.
    """
    entry = RecordInput(
        spec=state.spec,
        time_ns=workflow.time_ns(),
        started_ns=started_ns,
        launched=launched,
        confirmation=confirmation,
        outcome=state.outcome,
        versions=list(versions),
    )
    label = label or state.outcome or (f"generation {launched.generation}" if launched else "started")
    return workflow.start_activity(
        messages.RECORD, entry, result_type=NumbersUsed, summary=web_ui.summary(label), **(options or on_ledger())
    )
