"""``everstep standbys``: how many standbys a cluster should have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.ledgers import ClusterOption, JsonOption, LedgerOption, known_cluster, open_ledger, print_json
from everstep.decisions.pool.demand import Refill

if TYPE_CHECKING:
    from controlplane.local.cluster_file import ClusterFile
    from everstep.decisions.pool.demand import FailureRecord


def standbys(  # noqa: PLR0917 - options of a command
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what both rules say, and how they would do.")
    ] = False,
    machines: Annotated[
        int | None,
        typer.Option(
            "--machines", metavar="N", min=1, help="That jobs may have; default: those of the inventory or the cluster."
        ),
    ] = None,
    failures: Annotated[
        Path | None, typer.Option("--failures", metavar="FILE", help="Recorded failures; default: the ledger's.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="R", min=0.0, max=1.0, help="Failures of one machine in a day, instead of a record."
        ),
    ] = None,
    refill: Annotated[
        Refill,
        typer.Option("--refill", help="The pool is filled again by repaired machines, or daily from outside."),
    ] = Refill.REPAIR,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Say how many standbys a cluster should have.

    Two rules answer, and the greater number holds: the paper's (ByteRobust, table 5), a quantile of the binomial, and
    ours, which asks what the failures of the past would have taken: in bursts, while others were in repair, and again
    on machines that had been repaired. docs/guides/standbys.md explains both, and the file of failures.

    Failures are the evictions in the ledger. Where nothing is known the rate is the paper's 0.0012 in a day.

    Examples:

        everstep standbys

        everstep standbys --explain --machines 512 --rate 0.002

        everstep standbys --explain --failures failures.jsonl --json

    Exit codes: 0 shown; 1 the ledger cannot be read; 2 wrong options or a wrong file, or the number of machines is
    not known.
    """
    from controlplane.queries.standbys import standby_report
    from everstep.errors import ConfigError

    if failures is not None and rate is not None:
        raise ConfigError("--failures and --rate both say how often machines fail: give one of them")
    described = known_cluster(cluster)
    there = _machines(described)
    record, source = None, ""
    if failures is not None:
        from controlplane.failure_file import read_failures

        record, source = read_failures(failures), str(failures)
    elif rate is None:
        record, source = _of_ledger(ledger, cluster, described, there), "the ledger"
    count = machines or there or (record.machines if record else None)
    if not count:
        raise ConfigError(
            f"how many machines is not known: there is no inventory and no cluster {cluster!r}; give --machines"
        )
    report = standby_report(count, record, source, rate=rate, refill=refill, explain=explain)
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    from console.views.standbys import explanation, headline

    print("\n".join(explanation(report) if explain else [headline(report)]))


def _machines(cluster: ClusterFile | None) -> int | None:
    """Number of machines for jobs, from the inventory or else the cluster; None: not known."""
    from controlplane.inventory import inventory_path, load

    if path := inventory_path(None):
        return len(load(path).offered)
    return len(cluster.machines) - cluster.standbys if cluster else None


def _of_ledger(url: str, name: str, cluster: ClusterFile | None, machines: int | None) -> FailureRecord | None:
    """The failures in the ledger; None: it has none, or there is no ledger yet and no option names one."""
    import time

    from activities.ledger.database import LedgerUrl
    from controlplane.queries.standbys import ledger_record

    if not url and (cluster is None or ((file := LedgerUrl(cluster.ledger_url).file) and not file.exists())):
        return None
    with open_ledger(url, name, cluster) as opened:
        return ledger_record(opened, machines, now_ns=time.time_ns())
