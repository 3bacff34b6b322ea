"""``everstep verdict``: record the true cause of an incident, after a person has found it."""

from __future__ import annotations

import getpass
import time
from typing import Annotated

import typer

from console.commands.shared import ClusterOption, LedgerOption, known_cluster, open_ledger
from controlplane.references import parse_incident
from everstep.errors import ConfigError, LedgerError
from everstep.model.finding import Owner
from everstep.model.job_state import incident_workflow_id

CAUSES = ("machine", "code", "network", "storage", "data", "external", "scheduler", "unknown")
"""The causes that a person can name: the owners of faults."""


def verdict(  # noqa: PLR0917 - options of a command
    incident: Annotated[str, typer.Argument(metavar="INCIDENT", help="gpt/2 or incident/gpt/0002.")],
    was: Annotated[str, typer.Option("--was", metavar="OWNER", help=f"What it was: {', '.join(CAUSES)}.")],
    note: Annotated[str, typer.Option("--note", help="How you know the cause; shown in the report.")] = "",
    operator: Annotated[str, typer.Option("--operator", help="Who found the cause. Default: your user name.")] = "",
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Record the true cause of an incident, after a person has found it.

    `everstep report` compares it with what everstep decided: how many verdicts were right, which inspections raise
    false alarms, and which machines left without a fault. The newest verdict of a person counts; nothing else changes.

    Examples:

        everstep verdict gpt/2 --was machine

        everstep verdict incident/gpt/0002 --was code --note 'the loader of v7 had a deadlock'

    Exit codes: 0 recorded; 1 the ledger has no such incident, or cannot be written; 2 wrong usage.
    """
    if was not in CAUSES:
        raise ConfigError(f"--was is {was!r}: it must be one of {', '.join(CAUSES)}")
    job, number = parse_incident(incident)
    if not number:
        raise ConfigError(
            f"{incident!r} names no incident: give its number, as in {job}/2 ('everstep incidents {job}')"
        )
    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        record = opened.incident(incident_workflow_id(job, number))
        if record is None:
            raise LedgerError(f"the ledger has no incident {incident}: 'everstep incidents' lists its incidents")
        who = operator or getpass.getuser()
        opened.verdict_given(record, was=str(Owner(was)), operator=who, note=note, time_ns=time.time_ns())
    print(f"{record.id} was {was}, as {who} found out: everstep report")
