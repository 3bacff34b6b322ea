"""``everstep demo``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def demo(
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep", help="Leave the cluster up, to look at it; default: on a terminal.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the story on stderr.")] = False,
) -> None:
    """Show a training job that crashes and goes on.

    Starts a local cluster named demo, trains the example GPT on 4 machines x 2 ranks (tp 2, pp 2, dp 2) once
    undisturbed and once with rank 5 killed in step 20, follows the recovery live, and compares the losses of both runs
    bit for bit. Takes about a minute.

    On a terminal the cluster stays up, so that the links work; in a pipe and
    with --json it is taken down. The story says which, and how to end it.

    Examples:

        everstep demo

        everstep demo --no-keep

        everstep demo --json | jq .recovered_s

    Exit codes: 0 recovered, and all losses equal; 1 not; 3 the cluster does not come up; 130 interrupted.
    """
    from console.commands.exit_codes import finish
    from console.demo import run_demo

    if keep is None:
        keep = sys.stdout.isatty() and not as_json
    finish(run_demo(keep=keep, as_json=as_json))
