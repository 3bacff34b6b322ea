"""What the rules of eviction said in an incident: from the ledger, or from the incident itself while it is open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from controlplane.references import parse_incident
from everstep.decisions.evict.explain import Explanation, StoryLine, explained, quiet_rules
from everstep.errors import LedgerError
from everstep.model.eviction import EvictAnswer
from everstep.model.incident import CLOSED_OUTSIDE, Stage
from everstep.model.job_state import incident_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy

if TYPE_CHECKING:  # SQLAlchemy: no command waits for it that needs no ledger
    from activities.ledger import IncidentRecord, Ledger
    from controlplane.client import Control

TOLD = frozenset({Stage.EVICT, Stage.DECIDE, Stage.PARKED})
"""Stages of which the story is told."""


def find_incident(ledger: Ledger, reference: str) -> tuple[IncidentRecord, RecoveryPolicy | None]:
    """The incident that is meant by ``gpt`` (its newest), ``gpt/2`` or ``incident/gpt/0002``, and its job's policy.

    Raises:
        ConfigError: that names no incident.
        LedgerError: the ledger has none like that.
    """
    job, number = parse_incident(reference)
    if number is None:
        newest = ledger.incidents(job, limit=1)
        id = newest[0].id if newest else ""
    else:
        id = incident_workflow_id(job, number)
    record = ledger.incident(id) if id else None
    if record is None:
        raise LedgerError(f"the ledger has no incident {reference}: 'everstep incidents' lists those it has")
    spec = next((known.spec for known in ledger.jobs() if known.run == record.run), None)
    return record, _policy(spec)


def from_ledger(record: IncidentRecord, policy: RecoveryPolicy | None) -> Explanation | None:
    """The explanation of a closed incident; None: it is open, or its report does not have the answers."""
    report = record.parsed_report()
    if record.closed_ns is None or report is None or report.resolution == CLOSED_OUTSIDE:
        return None
    return _explanation(
        record,
        policy,
        headline=report.headline,
        outcome=report.resolution,
        evicted=report.evicted,
        asked=report.asked,
    )


async def from_workflow(control: Control, record: IncidentRecord, policy: RecoveryPolicy | None) -> Explanation:
    """The same from the incident's workflow.

    Raises:
        ClusterError: Temporal does not answer, or no worker does.
        ConfigError: Temporal has it no more.
    """
    known, stage = await control.evictions(record.id), await control.stage(record.id)
    return _explanation(
        record,
        policy,
        headline=record.headline or "",
        outcome=record.resolution or f"open, {stage.name}: {stage.found}",
        evicted=[one.machine for one in known.done],
        asked=known.asked,
    )


def _explanation(
    record: IncidentRecord,
    policy: RecoveryPolicy | None,
    *,
    headline: str,
    outcome: str,
    evicted: Sequence[str],
    asked: Sequence[EvictAnswer],
) -> Explanation:
    over = record.closed_ns is not None
    quiet, off = quiet_rules(asked, policy) if policy else (None, [])
    return Explanation(
        incident=record.id,
        headline=headline,
        over=over,
        outcome=outcome,
        evicted=list(evicted),
        answers=explained(asked, evicted, over=over),
        nothing_to_say=quiet,
        not_asked=off,
        fault_ns=record.fault_ns or 0,
        story=[
            StoryLine(time_ns=event.time_ns, stage=event.stage, text=event.text)
            for event in record.events
            if event.stage in TOLD
        ],
    )


def _policy(spec: dict[str, Any] | None) -> RecoveryPolicy | None:
    try:
        return RecoveryPolicy.model_validate((spec or {})["policy"])
    except (KeyError, ValidationError):
        return None
