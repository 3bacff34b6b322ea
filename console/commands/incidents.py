"""``everstep incidents`` and ``everstep incident``: incidents as the ledger has them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.commands.ledgers import (
    ClusterOption,
    JsonOption,
    LedgerOption,
    check_known,
    known_cluster,
    open_ledger,
    print_json,
)
from controlplane.shown import clean_line
from everstep.errors import ConfigError, LedgerError
from everstep.model.job_state import incident_workflow_id

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from activities.ledger.records import IncidentRecord
    from console.views.incident_report import Block
    from controlplane.local.cluster_file import ClusterFile

COLUMNS = ("Incident", "When", "Symptom", "Outcome", "Took", "Steps", "What")


def incidents(
    job: Annotated[str, typer.Argument(help="Only incidents of this job.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 50,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """List incidents, the newest first: when, what, how it ended, how long it took, steps lost.

    The ledger is read, so the cluster need not be up.

    Examples:

        everstep incidents

        everstep incidents gpt --json

    Exit codes: 0 also when there are none; 1 the ledger cannot be read or does not know the job.
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
        print(f"no incidents of job {job}" if job else "no incidents")
        return
    _print_table(COLUMNS, [summary_row(record) for record in records])
    if sys.stdout.isatty():
        print(f"\nMore: everstep incident {records[0].id}")


def incident(
    id: Annotated[
        str, typer.Argument(help="incident/gpt/0001, or gpt/1, or 1; default: the newest.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Show one incident: what was seen, decided and done, seconds after the fault, and the evidence.

    Examples:

        everstep incident

        everstep incident gpt/1

        everstep incident incident/gpt/0001 --json

    Exit codes: 0 found; 1 not found, or the ledger cannot be read; 2 not an id.
    """
    described = known_cluster(cluster)
    with open_ledger(ledger, cluster, described) as opened:
        full_id = id_of(opened, id)
        record = opened.incident(full_id) if full_id else None
    if record is None:
        raise LedgerError(f"the ledger has no incident {id}: 'everstep incidents' lists those it has")
    if as_json:
        print_json(record.model_dump(mode="json") | {"link": _link(record, described)})
        return
    from console.views.incident_report import report_blocks

    _print_blocks(report_blocks(record, _link(record, described)))


def id_of(ledger: Ledger, reference: str) -> str | None:
    """The full id for a short name of an incident; None: there is no such incident."""
    match = re.fullmatch(r"(?:(?:incident/)?(?P<job>[a-z0-9-]+)/)?(?P<number>[0-9]+)", reference)
    if match and match["job"]:
        return incident_workflow_id(match["job"], int(match["number"]))
    if reference and not match:
        raise ConfigError(f"{reference!r} is not an incident: write incident/gpt/0001, gpt/1 or 1")
    known = ledger.incidents(limit=None if match else 1)
    if match is None:
        if not known:
            raise LedgerError("the ledger has no incidents")
        return known[0].id
    fitting = sorted({record.id for record in known if record.number == int(reference)})
    if len(fitting) > 1:
        raise ConfigError(f"{reference} may be {', '.join(fitting[:5])}: name the job too, e.g. {fitting[0]}")
    return fitting[0] if fitting else None


def _link(record: IncidentRecord, cluster: ClusterFile | None) -> str:
    from console.views.incident_report import link

    return link(record.id, cluster.ui_url, cluster.namespace) if cluster else ""


def _listed(record: IncidentRecord, cluster: ClusterFile | None) -> dict[str, Any]:
    listed = record.model_dump(mode="json", exclude={"anomaly", "evidence", "report", "events"})
    return listed | {"link": _link(record, cluster)}


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if not sys.stdout.isatty():
        from console.views.incident_report import aligned

        print("\n".join(aligned(rows)))
        return
    from rich.table import Table

    from console.terminal import PlainConsole, styled

    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        style = {"open": "yellow", "abandoned": "red"}.get(row[3], "")
        table.add_row(*(styled(cell, style if cell == row[3] else "") for cell in row))
    PlainConsole().print(table)


def _print_blocks(blocks: list[Block]) -> None:
    from console.views.incident_report import aligned

    if not sys.stdout.isatty():
        for number, block in enumerate(blocks):
            print(("" if number == 0 else "\n") + clean_line(block.title))
            print("\n".join(aligned(block.rows, indent="  ")))
        return
    from rich.padding import Padding
    from rich.table import Table

    from console.terminal import PlainConsole

    console = PlainConsole()
    for number, block in enumerate(blocks):
        console.print(("" if number == 0 else "\n") + clean_line(block.title), style="bold")
        table = Table(box=None, pad_edge=False, show_header=False)
        for row in block.rows:
            table.add_row(*row)
        console.print(Padding(table, (0, 0, 0, 2)))
