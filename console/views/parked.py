"""The lines about a parked job: why it is parked, the first failure, and the commands for an operator."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from console.views.incident_report import how_it_ended, plain
from controlplane import text
from controlplane.client import Control
from everstep.decisions.blame.first_failure import first_failure
from everstep.errors import EverstepError
from everstep.model.eviction import Eviction, named
from everstep.model.evidence import Evidence, RankExit
from everstep.model.job_state import IncidentSummary

LOG_LINES = 6
LEDGER_PATIENCE_S = 3.0
"""The longest wait for the evidence, seconds. It is written during the recovery, and may arrive a moment later."""


async def parked_lines(control: Control, job: str, incident: IncidentSummary) -> list[str]:
    """The lines for an operator: the reason, the first rank that failed, its log, and the commands."""
    why, to_accept = incident.headline, ""
    to_approve: list[Eviction] = []
    with suppress(EverstepError):
        stage = await control.stage(incident.id)
        why, to_accept, to_approve = stage.found, stage.to_accept, stage.to_approve
    evidence = await _evidence(control, incident.id)
    option = control.option
    lines = [f"why       {why}", *evidence_lines(job, evidence, option)]
    if to_approve:
        lines.append(f"approve   everstep approve {job}{option}    replaces {named(to_approve)} by another machine")
    again = "with the same machines" if to_approve else "with a new budget of attempts"
    lines.append(f"resume    everstep resume {job}{option}    tries again {again}")
    if to_accept:
        lines.append(
            f"or        everstep resume {job} --accept-loss{option}    continues {to_accept}, and gives up newer steps"
        )
    return [
        *lines,
        f"give up   everstep abandon {job}{option}",
        f"incident  {control.link(incident.id) or incident.id}",
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
    if classification := first.classification:
        lines.append(f"class     {plain(classification.fault)}, owner {plain(classification.owner)}")
    tail = [line for line in plain(first.log_tail).splitlines() if line.strip()][-LOG_LINES:]
    lines += [f"          | {line}" for line in tail]
    return [*lines, f"logs      everstep logs {job} --rank {first.rank}{option}"]


def exit_line(end: RankExit) -> str:
    """The end of one rank: ``rank 5 on m2, after 20 steps, SIGKILL, 12:00:01.123``."""
    parts = [f"rank {end.rank} on {end.machine}"]
    parts += [f"after {end.completed_steps} steps"] if end.completed_steps >= 0 else []
    parts.append(how_it_ended(end))
    parts += [plain(end.exception)] if end.exception else []
    parts += [text.clock(end.time_ns)] if end.time_ns else []
    return ", ".join(parts)


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
