"""``everstep report``: summarize what went wrong in the last days."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from console.commands.shared import ClusterOption, JsonOption, LedgerOption, known_cluster, open_ledger, print_json
from everstep.errors import ConfigError


def report(
    days: Annotated[int, typer.Option("--days", metavar="N", min=1, max=3660, help="Report the last N days.")] = 7,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots instead of printing.")
    ] = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Summarize the last days: incidents by symptom and owner, time lost by cause, evicted machines, ETTR of each job.

    The ledger is read, so the cluster need not be up. Facts that the ledger does not have are shown as unknown. The
    page of --html is one file, without scripts and without external parts.

    Examples:

        everstep report

        everstep report --days 30 --html report.html

        everstep report --json | jq .lost

    Exit codes: 0 done, also when nothing happened; 1 the ledger cannot be read; 2 the page cannot be written.
    """
    from console.views.ledger_report import headline, report_lines
    from controlplane.queries.report import ledger_report

    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        found = ledger_report(opened, days=days, now_ns=time.time_ns())
    if html is not None:
        from console.views.report_page import report_page

        try:
            html.write_text(report_page(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the page {html} cannot be written: {error.strerror}; name another file") from error
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print(f"{html}: {headline(found)}" if html else "\n".join(report_lines(found)))
