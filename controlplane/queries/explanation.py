"""The answers of the eviction rules in an incident, from the ledger, or from the workflow of an open incident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from controlplane.client import Control
from controlplane.references import parse_incident
from everstep.decisions.act.evict.explain import Explanation, StoryLine, explained, quiet_rules
from everstep.errors import ClusterError, LedgerError, NoSuchJob
from everstep.model.eviction import EvictAnswer
from everstep.model.incident import CLOSED_OUTSIDE
from everstep.model.job_state import incident_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.stage import Stage

if TYPE_CHECKING:  # The ledger imports SQLAlchemy, which is slow, so only commands that read the ledger import it.
    from activities.ledger.ledger import Ledger
    from activities.ledger.records import IncidentRecord

SHOWN = frozenset({Stage.TRACE, Stage.EVICT, Stage.DIAGNOSE, Stage.REPLAY, Stage.DECIDE, Stage.PARKED})
"""Stages that the explanation shows."""
OVER = frozenset({Stage.OBSERVED, Stage.RECOVERED, Stage.NOT_CONFIRMED, Stage.ABANDONED})
"""The last stages of an incident, which the ledger may record a moment later."""


async def explanation_of(reference: str, ledger: Ledger, cluster: str) -> Explanation:
    """Explain the incident of a reference: ``gpt`` (the job's newest), ``gpt/2`` or ``incident/gpt/0002``.

    Args:
        reference: Name of the incident, as a user writes it.
        ledger: Ledger with the closed incidents.
        cluster: Name of the local cluster whose workflow is asked if the ledger has no answer.

    Raises:
        ConfigError: the reference names no incident.
        LedgerError: neither the ledger nor Temporal has the incident.
        ClusterError: the incident is open, and its workflow does not answer.
    """
    job, number = parse_incident(reference)
    number = number or await _newest(ledger, job, cluster)
    record = ledger.incident(incident_workflow_id(job, number)) if number else None
    if record and record.cleaned:
        raise LedgerError(f"{record.id} cannot be explained any more: {record.cleaned}")
    policy = _policy(ledger, record) if record else None
    if record and (explanation := from_ledger(record, policy)):
        return explanation
    unknown = LedgerError(f"the ledger has no incident {reference}: 'everstep incidents' lists its incidents")
    if not number:
        raise unknown
    try:
        async with await Control.connect(cluster) as control:
            return await from_workflow(control, job, number, record, policy)
    except (ClusterError, NoSuchJob) as error:
        if record:
            raise
        raise unknown from error


async def _newest(ledger: Ledger, job: str, cluster: str) -> int:
    """Number of a job's newest incident, which the ledger may not have yet; 0: the job has no incident."""
    with suppress(ClusterError, NoSuchJob):
        async with await Control.connect(cluster) as control:
            if incidents := (await control.state(job)).incidents:
                return incidents[-1].number
    newest = ledger.incidents(job, limit=1)
    return newest[0].number if newest else 0


def from_ledger(record: IncidentRecord, policy: RecoveryPolicy | None) -> Explanation | None:
    """The explanation of a closed incident; None: it is open, or its report does not have the rules' answers."""
    report = record.parsed_report()
    if record.closed_ns is None or report is None or report.resolution == CLOSED_OUTSIDE:
        return None
    return Explanation(
        incident=record.id,
        headline=report.headline,
        over=True,
        outcome=report.resolution,
        evicted=report.evicted,
        **_answers(report.asked, report.evicted, report.approved, policy, over=True),
        **_story(record),
    )


async def from_workflow(
    control: Control, job: str, number: int, record: IncidentRecord | None, policy: RecoveryPolicy | None
) -> Explanation:
    """The explanation from the incident's workflow.

    Args:
        control: Connection to the cluster.
        job: Name of the job.
        number: Number of the incident.
        record: The incident's record in the ledger; None: the ledger has none.
        policy: Policy of the job; None: the policy of its newest run.

    Raises:
        ClusterError: Temporal does not answer, or no worker does.
        NoSuchJob: Temporal does not have the incident, or has deleted it.
    """
    id = incident_workflow_id(job, number)
    known, stage = await control.evictions(id), await control.stage(id)
    policy = policy or (await control.state(job)).spec.policy
    over = stage.name in OVER or bool(record and record.closed_ns)
    evicted = [one.machine for one in known.done]
    approved = {one.machine: one.approved_by for one in known.done if one.approved_by}
    return Explanation(
        incident=id,
        headline=(record.headline if record else "") or stage.found,
        over=over,
        outcome=(record.resolution if record else "") or f"{'' if over else 'open, '}{stage.name}: {stage.found}",
        evicted=evicted,
        **_answers(known.asked, evicted, approved, policy, over=over),
        **_story(record),
    )


def _answers(
    asked: Sequence[EvictAnswer],
    evicted: Sequence[str],
    approved: Mapping[str, str],
    policy: RecoveryPolicy | None,
    *,
    over: bool,
) -> dict[str, Any]:
    """The fields of an explanation with the answers of the rules."""
    answers = explained(asked, evicted, over=over, approved=approved)
    if not asked or policy is None:
        return {"answers": answers}
    quiet, off = quiet_rules(asked, policy)
    return {"answers": answers, "no_answer": quiet, "not_asked": off}


def _story(record: IncidentRecord | None) -> dict[str, Any]:
    """The fields of an explanation that only the ledger has."""
    if record is None:
        return {}
    events = [event for event in record.events if event.stage in SHOWN]
    lines = [StoryLine(time_ns=event.time_ns, stage=event.stage, text=event.text) for event in events]
    return {"fault_ns": record.fault_ns or 0, "story": lines}


def _policy(ledger: Ledger, record: IncidentRecord) -> RecoveryPolicy | None:
    """The policy of the run that had the incident; None: it is not known."""
    spec = next((known.spec for known in ledger.jobs() if known.run == record.run), None)
    try:
        return RecoveryPolicy.model_validate((spec or {})["policy"])
    except (KeyError, ValidationError):
        return None
