"""The options of commands that read the ledger, and how they open it; the cluster need not be up."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.local.cluster_file import ClusterFile
from everstep.errors import ClusterError, LedgerError

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger

LedgerOption = Annotated[
    str,
    typer.Option(
        "--ledger",
        metavar="URL",
        envvar="EVERSTEP_LEDGER_URL",
        help="sqlite:////path/ledger.db or postgresql+psycopg://user@host/database; default: the cluster's.",
    ),
]
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Name of the cluster.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def known_cluster(name: str) -> ClusterFile | None:
    """A cluster that is or was up; None: there is no cluster with this name."""
    with suppress(ClusterError):
        return ClusterFile.load(name)
    with suppress(OSError, ValueError):
        return ClusterFile.model_validate_json((ClusterFile.home_of(name) / "last.json").read_text())
    return None


def open_ledger(url: str, name: str, cluster: ClusterFile | None) -> Ledger:
    """Open the ledger that an option names, or else the cluster's ledger.

    Args:
        url: URL from the option; empty: the cluster's ledger.
        name: Name of the cluster.
        cluster: Result of :func:`known_cluster`.

    Raises:
        ClusterError: there is neither an option nor a cluster with a ledger.
        LedgerError: it cannot be opened.
    """
    if not url and cluster is None:
        raise ClusterError(
            f"there is no cluster {name!r}, so its ledger is not known: start it with 'everstep up', "
            "or give --ledger or EVERSTEP_LEDGER_URL"
        )
    from activities.ledger.ledger import Ledger

    return Ledger.open(url or (cluster.ledger_url if cluster else ""), create=False)


def check_known(ledger: Ledger, job: str) -> None:
    """Check that the ledger has this job, so that an empty answer is not mistaken for a wrong name.

    Raises:
        LedgerError: the ledger has no such job; the message lists the jobs that it has.
    """
    names = sorted({known.name for known in ledger.jobs()})
    if job not in names:
        raise LedgerError(f"the ledger knows no job {job!r}; it knows: {', '.join(names) or 'none'}")


def print_json(value: object) -> None:
    """Print a value as JSON, in the form that all commands use."""
    print(json.dumps(value, indent=2))
