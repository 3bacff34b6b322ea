"""The parts that several commands share: options, exit codes, default subcommands, and access to the ledger."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from controlplane.shown import clean
from everstep.base.addresses import Ports
from everstep.errors import ClusterError, LedgerError

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from controlplane.local.cluster_file import ClusterFile

EXIT_NOTHING_UP, EXIT_UNKNOWN = 3, 4

LedgerOption = Annotated[
    str,
    typer.Option(
        "--ledger",
        metavar="URL",
        envvar="EVERSTEP_LEDGER_URL",
        help="sqlite:////path/ledger.db or postgresql+psycopg://user@host/database. Default: the cluster's ledger.",
    ),
]
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Name of the local cluster.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class DefaultCommand(TyperGroup):
    """A command group with a default subcommand: ``everstep policy gpt`` is short for ``everstep policy show gpt``."""

    default = ""
    """Name of the default subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the default subcommand if the arguments do not begin with a subcommand."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default, *args])


def port_range(text: str) -> Ports:
    """Parse the value of an option with a port or a range of ports.

    Raises:
        BadParameter: the text is neither.
    """
    try:
        return Ports.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def finish(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Run the work of a command and exit with its code; the code is 3 if no cluster or no Temporal answers."""
    try:
        code = asyncio.run(work)
    except ClusterError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        code = EXIT_NOTHING_UP
    raise typer.Exit(code)


def known_cluster(name: str) -> ClusterFile | None:
    """The description of a cluster that is up, or was up; None: there is no cluster with this name."""
    from controlplane.local.cluster_file import ClusterFile

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
        LedgerError: the ledger cannot be opened.
    """
    if not url and cluster is None:
        raise ClusterError(
            f"there is no cluster {name!r}, so the location of its ledger is not known: start the cluster with "
            "'everstep up', or name a ledger with --ledger or EVERSTEP_LEDGER_URL"
        )
    from activities.ledger.ledger import Ledger

    return Ledger.open(url or (cluster.ledger_url if cluster else ""), create=False)


def check_known(ledger: Ledger, job: str) -> None:
    """Check that the ledger has this job, so that a wrong name leads to an error and not to an empty answer.

    Raises:
        LedgerError: the ledger has no such job; the message lists the jobs that it has.
    """
    names = sorted({run.name for run in ledger.jobs()})
    if job not in names:
        raise LedgerError(f"the ledger has no job {job!r}; it has: {', '.join(names) or 'none'}")


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
