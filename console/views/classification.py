"""A verdict over logs, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from console.views.incident_report import aligned
from controlplane.shown import clean_line
from everstep.base.text import listed
from everstep.decisions.blame.classify.candidates import EvidenceLine
from everstep.decisions.blame.classify.first_cause import LogVerdict

LONGEST = 200
"""Longest line of a log that is shown, characters."""


def text_of(verdict: LogVerdict) -> str:
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
        blocks += ["", f"Evidence, {verdict.count} in all", *aligned([_row(line) for line in verdict.evidence], "  ")]
    if verdict.others:
        rows = [
            (
                f"{one.fault} ({one.reason})",
                "consequence" if one.consequence else f"owner {one.owner}",
                f"{one.count}x",
                f"ranks {listed(one.ranks)}" if one.ranks else "",
                *_row(one.line),
            )
            for one in verdict.others
        ]
        blocks += ["", "Found beside it", *aligned(rows, "  ")]
    return "\n".join(blocks)


def as_object(verdict: LogVerdict) -> str:
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
                    "class": one.fault.value,
                    "owner": one.owner.value,
                    "reason": one.reason,
                    "consequence": one.consequence,
                    "count": one.count,
                    "ranks": list(one.ranks),
                    "line": _line(one.line),
                }
                for one in verdict.others
            ],
            "exit": {"code": verdict.exit.code, "text": verdict.exit.text} if verdict.exit else None,
            "lines": verdict.lines,
        },
        indent=2,
    )


def _row(line: EvidenceLine) -> tuple[str, str]:
    return f"{line.source}:{line.line}", line.text[:LONGEST]


def _line(line: EvidenceLine) -> dict[str, Any]:
    return {"source": line.source, "line": line.line, "text": line.text}
