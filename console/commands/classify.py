"""``everstep classify``: find what ended a job, from its logs alone."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from console.commands.shared import EXIT_UNKNOWN, JsonOption
from console.terminal import aligned
from controlplane.shown import clean_line
from everstep.base.text import listed
from everstep.decisions.blame.classify.candidates import EvidenceLine
from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.rule import FaultClass
from everstep.decisions.blame.classify.rules import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.system.log_files import log_files, pieces

LONGEST = 200
"""A line of a log is cut to this number of characters when it is shown."""


def classify(
    logs: Annotated[
        list[str] | None,
        typer.Argument(metavar="LOG…", help="Files (also .gz), folders with logs, or - for standard input."),
    ] = None,
    exit_code: Annotated[
        int | None,
        typer.Option(
            "--exit-code",
            metavar="N",
            help="Exit code of the job or the rank: 137 as a shell shows it, or -9.",
            min=-64,
            max=255,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what ended a training job, who owns the fault, and which lines of the logs prove it. No cluster is needed.

    In the logs of many ranks the first cause is separated from its consequences: for example, a peer's "connection
    reset" is a consequence. If the logs do not prove one cause, the class is unknown and the candidates are named.
    docs/concepts/classification.md lists the classes.

    Examples:

        everstep classify slurm-4242.out

        everstep classify logs/ --exit-code 137

        kubectl logs gpt-worker-3 | everstep classify - --json

    Exit codes: 0 a class was found, "no failure" included; 2 a log is missing or cannot be read; 4 unknown.
    """
    matcher = LineMatcher()
    scanned = []
    for name in log_files(logs or []):
        scanner = LogScanner(name, matcher=matcher)
        for piece in pieces(name):
            scanner.feed(piece)
        scanned.append(scanner.close())
    verdict = first_cause(scanned, exit_code)
    print(verdict_json(verdict) if as_json else verdict_text(verdict))
    raise typer.Exit(EXIT_UNKNOWN if verdict.fault is FaultClass.UNKNOWN else 0)


def verdict_text(verdict: LogVerdict) -> str:
    """The verdict in one line, then its facts, the lines of the log that prove it, and other candidates."""
    facts = [
        ("owner", str(verdict.owner)),
        ("reason", verdict.reason),
        ("decided by", verdict.decided_by),
        ("ranks", listed(verdict.ranks)),
        ("in", verdict.place),
        ("exit", verdict.exit.text if verdict.exit else ""),
        ("read", f"{verdict.lines} line{'' if verdict.lines == 1 else 's'}"),
    ]
    blocks = [clean_line(verdict.headline)[: 2 * LONGEST], *aligned([row for row in facts if row[1]], "  ")]
    if verdict.evidence:
        rows = [_cells(line) for line in verdict.evidence]
        blocks += ["", f"Lines that prove it, {verdict.count} in all", *aligned(rows, "  ")]
    if verdict.others:
        others = [
            (
                f"{other.fault} ({other.reason})",
                "consequence" if other.consequence else f"owner {other.owner}",
                f"{other.count}x",
                f"ranks {listed(other.ranks)}" if other.ranks else "",
                *_cells(other.line),
            )
            for other in verdict.others
        ]
        blocks += ["", "Other candidates", *aligned(others, "  ")]
    return "\n".join(blocks)


def verdict_json(verdict: LogVerdict) -> str:
    """The verdict as a JSON object; its keys do not change between releases."""
    return json.dumps(
        {
            "class": verdict.fault.value,
            "owner": verdict.owner.value,
            "reason": verdict.reason,
            "consequence": verdict.consequence,
            "decided_by": verdict.decided_by,
            "ranks": list(verdict.ranks),
            "place": verdict.place,
            "evidence": [_line(line) for line in verdict.evidence],
            "count": verdict.count,
            "others": [
                {
                    "class": other.fault.value,
                    "owner": other.owner.value,
                    "reason": other.reason,
                    "consequence": other.consequence,
                    "count": other.count,
                    "ranks": list(other.ranks),
                    "line": _line(other.line),
                }
                for other in verdict.others
            ],
            "exit": {"code": verdict.exit.code, "text": verdict.exit.text} if verdict.exit else None,
            "lines": verdict.lines,
        },
        indent=2,
    )


def _cells(line: EvidenceLine) -> tuple[str, str]:
    return f"{line.source}:{line.line}", line.text[:LONGEST]


def _line(line: EvidenceLine) -> dict[str, Any]:
    return {"source": line.source, "line": line.line, "text": line.text}
