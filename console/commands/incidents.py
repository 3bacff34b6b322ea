"""``everstep incidents`` and ``everstep incident``: show the incidents in the ledger."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.commands.shared import (
    ClusterOption,
    JsonOption,
    LedgerOption,
    check_known,
    known_cluster,
    open_ledger,
    print_json,
)
from console.terminal import PlainConsole, aligned, styled
from controlplane.shown import clean_line
from everstep.errors import ConfigError, LedgerError
from everstep.model.job_state import incident_workflow_id

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from activities.ledger.records import IncidentRecord
    from console.views.incident_report import Block
    from controlplane.local.cluster_file import ClusterFile

COLUMNS = ("Incident", "When", "Symptom", "Outcome", "Took", "Steps", "What")
IncidentArgument = Annotated[
    str,
    typer.Argument(
        metavar="INCIDENT",
        help="incident/gpt/0001, or gpt/1, or 1. Default: the newest incident.",
        show_default=False,
    ),
]


def incidents(
    job: Annotated[str, typer.Argument(help="Show only incidents of this job.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many incidents, the newest.")] = 50,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """List incidents, the newest first: time, symptom, outcome, duration, lost steps, and a headline.

    The ledger is read, so the cluster need not be up.

    Examples:

        everstep incidents

        everstep incidents gpt --json

    Exit codes: 0 listed, also if there are none; 1 the ledger cannot be read or does not have the job.
    """
    described = known_cluster(cluster)
    with open_ledger(ledger, cluster, described) as opened:
        records = opened.incidents(job or None, limit=limit)
        if job and not records:
            check_known(opened, job)
    if as_json:
        print_json([_listed(record, described) for record in records])
        return
    from console.views.incident_report import summary_row

    if not records:
        print(f"job {job} has no incidents" if job else "the ledger has no incidents")
        return
    _print_table(COLUMNS, [summary_row(record) for record in records])
    if sys.stdout.isatty():
        print(f"\nDetails: everstep incident {records[0].id}")


def incident(
    id: IncidentArgument = "",
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Show one incident: observations, decisions and actions with the seconds since the fault, and the evidence.

    Examples:

        everstep incident

        everstep incident gpt/1

        everstep incident incident/gpt/0001 --json

    Exit codes: 0 shown; 1 not found, or the ledger cannot be read; 2 not an id.
    """
    described = known_cluster(cluster)
    with open_ledger(ledger, cluster, described) as opened:
        full_id = id_of(opened, id)
        record = opened.incident(full_id) if full_id else None
    if record is None:
        raise LedgerError(f"the ledger has no incident {id}: 'everstep incidents' lists its incidents")
    if as_json:
        print_json(record.model_dump(mode="json") | {"link": _link(record, described)})
        return
    from console.views.incident_report import report_blocks

    _print_blocks(report_blocks(record, _link(record, described)))


def id_of(ledger: Ledger, reference: str) -> str | None:
    """The full id for a short name of an incident; None: there is no such incident.

    Raises:
        ConfigError: this is no name of an incident, or several incidents have this number.
        LedgerError: the name is empty, and the ledger has no incidents.
    """
    match = re.fullmatch(r"(?:(?:incident/)?(?P<job>[a-z0-9-]+)/)?(?P<number>[0-9]+)", reference)
    if match and match["job"]:
        return incident_workflow_id(match["job"], int(match["number"]))
    if reference and not match:
        raise ConfigError(f"{reference!r} is not an incident: write incident/gpt/0001, gpt/1 or 1")
    records = ledger.incidents(limit=None if match else 1)
    if match is None:
        if not records:
            raise LedgerError("the ledger has no incidents")
        return records[0].id
    ids = sorted({record.id for record in records if record.number == int(reference)})
    if len(ids) > 1:
        raise ConfigError(f"{reference} may be {', '.join(ids[:5])}: name the job too, e.g. {ids[0]}")
    return ids[0] if ids else None


def _link(record: IncidentRecord, cluster: ClusterFile | None) -> str:
    from console.views.incident_report import link

    return link(record.id, cluster.ui_url, cluster.namespace) if cluster else ""


def _listed(record: IncidentRecord, cluster: ClusterFile | None) -> dict[str, Any]:
    listed = record.model_dump(mode="json", exclude={"anomaly", "evidence", "report", "events"})
    return listed | {"link": _link(record, cluster)}


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if not sys.stdout.isatty():
        print("\n".join(aligned(rows)))
        return
    from rich.table import Table

    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        style = {"open": "yellow", "abandoned": "red"}.get(row[3], "")
        table.add_row(*(styled(cell, style if cell == row[3] else "") for cell in row))
    PlainConsole().print(table)


def _print_blocks(blocks: list[Block]) -> None:
    if not sys.stdout.isatty():
        for number, block in enumerate(blocks):
            print(("" if number == 0 else "\n") + clean_line(block.title))
            print("\n".join(aligned(block.rows, indent="  ")))
        return
    from rich.padding import Padding
    from rich.table import Table

    console = PlainConsole()
    for number, block in enumerate(blocks):
        console.print(("" if number == 0 else "\n") + clean_line(block.title), style="bold")
        table = Table(box=None, pad_edge=False, show_header=False)
        for row in block.rows:
            table.add_row(*row)
        console.print(Padding(table, (0, 0, 0, 2)))
