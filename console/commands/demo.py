"""``everstep demo``: show how a training job recovers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from console.commands.shared import finish


def demo(
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep", help="Leave the cluster up afterwards. Default: only on a terminal.", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and the progress on standard error.")
    ] = False,
) -> None:
    """Run a training job that crashes, recovers and continues.

    The command starts a local cluster named demo and trains the example GPT on 4 machines x 2 ranks (tp 2, pp 2, dp 2):
    once without a fault, and once with rank 5 killed in step 20. It follows the recovery live, and compares the losses
    of both runs bit for bit. This takes about a minute.

    On a terminal the cluster stays up, so that the links work; in a pipe and with --json it is taken down. The output
    shows how to take it down.

    Examples:

        everstep demo

        everstep demo --no-keep

        everstep demo --json | jq .recovered_s

    Exit codes: 0 recovered, and all losses are equal; 1 otherwise; 3 the cluster does not start; 130 interrupted.
    """
    from console.demo import run_demo

    if keep is None:
        keep = sys.stdout.isatty() and not as_json
    finish(run_demo(keep=keep, as_json=as_json))
