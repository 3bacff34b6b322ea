"""Why a job is parked, the first failure, and what an operator can do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from console.views.incident_report import clean
from controlplane import text
from controlplane.client import Control
from everstep.decisions.blame.first_failure import first_failure
from everstep.errors import EverstepError
from everstep.model.eviction import Eviction, named
from everstep.model.evidence import Evidence, RankExit
from everstep.model.job_state import IncidentSummary
from everstep.system.signals import signal_name

LOG_LINES = 6
LEDGER_PATIENCE_S = 3.0
"""Evidence is written while the recovery goes on, so it may arrive a moment later."""


async def parked_lines(control: Control, job: str, incident: IncidentSummary) -> list[str]:
    """The lines that an operator needs: the reason, the first rank that failed, its log, and the commands."""
    why, to_accept = incident.headline, ""
    to_approve: list[Eviction] = []
    with suppress(EverstepError):
        stage = await control.stage(incident.id)
        why, to_accept, to_approve = stage.found, stage.to_accept, stage.to_approve
    evidence = await _evidence(control, incident.id)
    option = control.option
    link = control.link(incident.id)
    return [
        f"why       {why}",
        *evidence_lines(job, evidence, option),
        *(
            [f"approve   everstep approve {job}{option}    {named(to_approve)} leaves, and another takes the place"]
            if to_approve
            else []
        ),
        f"go on     everstep resume {job}{option}    tries again {'as it is' if to_approve else 'with a fresh budget'}",
        *(
            [f"or        everstep resume {job} --accept-loss{option}    goes on {to_accept}, whatever is newer"]
            if to_accept
            else []
        ),
        f"give up   everstep abandon {job}{option}",
        *([f"incident  {link}"] if link else [f"incident  {incident.id}"]),
    ]


def evidence_lines(job: str, evidence: Evidence | None, option: str = "") -> list[str]:
    """The first rank that failed, how it ended, and where its log is."""
    if evidence is None:
        return [f"logs      everstep logs {job}{option}"]
    lines = [f"no answer {', '.join(evidence.unreachable)}"] if evidence.unreachable else []
    first = first_failure(evidence.exits)
    if first is None:
        return [*lines, f"logs      everstep logs {job}{option}"]
    lines.append(f"first     {exit_line(first)}")
    if found := first.classification:
        lines.append(f"class     {clean(found.fault)}, owner {clean(found.owner)}")
    tail = [line for line in clean(first.log_tail).splitlines() if line.strip()][-LOG_LINES:]
    lines += [f"          | {line}" for line in tail]
    return [*lines, f"logs      everstep logs {job} --rank {first.rank}{option}"]


def exit_line(end: RankExit) -> str:
    """How one rank ended: ``rank 5 on m2, step 20, SIGKILL, 12:00:01.123``."""
    parts = [f"rank {end.rank} on {end.machine}"]
    parts += [f"after {end.completed_steps} steps"] if end.completed_steps >= 0 else []
    parts.append(how(end))
    parts += [clean(end.exception)] if end.exception else []
    parts += [text.clock(end.time_ns)] if end.time_ns else []
    return ", ".join(parts)


def how(end: RankExit) -> str:
    """``SIGKILL``, ``exit code 1`` or ``unknown end``."""
    if end.signal:
        return signal_name(end.signal)
    return "unknown end" if end.code is None else f"exit code {end.code}"


async def _evidence(control: Control, incident_id: str) -> Evidence | None:
    ledger = await control.ledger()
    if ledger is None:
        return None
    with suppress(EverstepError, TimeoutError):
        async with asyncio.timeout(LEDGER_PATIENCE_S):
            while True:
                record = await ledger.call(type(ledger).incident, incident_id)
                if record is not None and (evidence := record.parsed_evidence()) is not None:
                    return evidence
                await asyncio.sleep(0.1)
    return None


def incident_rows(incidents: Sequence[IncidentSummary], last: int = 5) -> list[tuple[str, str, str, str]]:
    """The last incidents: number, headline, lost steps, seconds."""
    return [
        (
            f"{incident.number:04d}",
            incident.headline + ("" if incident.resolution else f"  [{incident.stage or 'open'}]"),
            text.DASH if incident.lost_steps is None else str(incident.lost_steps),
            text.duration(incident.seconds),
        )
        for incident in incidents[-last:]
    ]
