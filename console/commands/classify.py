"""``everstep classify``: what ended a job, from its logs alone."""

from __future__ import annotations

from typing import Annotated

import typer

EXIT_NOT_KNOWN = 4


def classify(
    logs: Annotated[
        list[str] | None,
        typer.Argument(metavar="LOG…", help="Files (also .gz), folders with logs, or - for standard input."),
    ] = None,
    exit_code: Annotated[
        int | None,
        typer.Option(
            "--exit-code", metavar="N", help="Of the job or rank: 137 as shells tell it, or -9.", min=-64, max=255
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what ended a training job, who owns the fault, and which lines say so. No cluster is needed.

    Of the logs of many ranks the first cause is told from its consequences: a
    peer's "connection reset" is one. Where the logs do not tell, the class is
    unknown and the candidates are named. docs/concepts/classification.md has the classes.

    Examples:

        everstep classify slurm-4242.out

        everstep classify logs/ --exit-code 137

        kubectl logs gpt-worker-3 | everstep classify - --json

    Exit codes: 0 a class was found, "no failure" included; 2 a log is missing, no file or not readable; 4 unknown.
    """
    # Here, so that the other commands need not wait for the rules.
    from console.views.classification import as_object, text_of
    from everstep.decisions.blame.classify.first_cause import first_cause
    from everstep.decisions.blame.classify.rule import FaultClass
    from everstep.decisions.blame.classify.rules import LineMatcher
    from everstep.decisions.blame.classify.scan import LogScanner
    from everstep.system.log_files import log_files, pieces

    matcher = LineMatcher()
    scanned = []
    for name in log_files(logs or []):
        scanner = LogScanner(name, matcher=matcher)
        for piece in pieces(name):
            scanner.feed(piece)
        scanned.append(scanner.close())
    verdict = first_cause(scanned, exit_code)
    print(as_object(verdict) if as_json else text_of(verdict))
    raise typer.Exit(EXIT_NOT_KNOWN if verdict.fault is FaultClass.UNKNOWN else 0)
