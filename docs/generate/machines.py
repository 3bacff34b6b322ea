"""What is known of machines: inspections, Xids, diagnostic tests."""

from __future__ import annotations

from agent.diagnoser.all import TESTS
from agent.diagnoser.diagnostic import COMMON, DiagnosticLimits
from agent.monitor.all import INSPECTIONS
from agent.monitor.inspection import Limits
from agent.monitor.monitor import HANGS, UNABLE
from agent.monitor.settings import CheckLimits
from docs.generate.markdown import code, paragraph, reasons, sentence, settings, table
from everstep.decisions.blame.diagnose.choose_tests import ROWS, ChoiceRow
from everstep.decisions.blame.diagnose.reasons import JUDGED
from everstep.model import xid


def inspections() -> str:
    """Every inspection with its reasons."""
    parts = [
        paragraph(
            "[Inspections](../concepts/inspections.md) explains verdict, owner, remedy and *sure*.",
            "The settings have [a page of their own](inspection-settings.md). Every inspection can report",
        ),
        reasons((UNABLE, HANGS)),
    ]
    for kind in INSPECTIONS:
        found = [reason for reason in kind.reasons if reason not in xid.REASONS]
        every = f"{kind.limits_type.model_fields['interval_s'].get_default():g}"
        beside = "; [Xids](xids.md) have a page of their own" if len(found) < len(kind.reasons) else ""
        parts.append(f"## `{kind.name}`\n\n{sentence(kind.inspects)} Every {every} s{beside}.")
        parts += [reasons(found)] if found else []
    return "\n\n".join(parts)


def inspection_settings() -> str:
    """Settings of all inspections."""
    parts = [
        paragraph(
            "The file of `everstep agent --monitor` has a table for each inspection, `[gpu]` for example.",
            "Every inspection has these settings, and its own below.",
        ),
        settings(Limits),
        f"## A program of your own: `[[check]]`\n\n{settings(CheckLimits, without=('off',))}",
    ]
    for kind in INSPECTIONS:
        if own := settings(kind.limits_type, without=Limits.model_fields):
            parts.append(f"## `[{kind.name}]`\n\n{own}")
    return "\n\n".join(parts)


def xids() -> str:
    """Every Xid with its owner."""
    intro = paragraph(
        "The inspection `kernel-log` reads these lines of the kernel log, and the classifier reads them in logs.",
        "The reason code is `xid-` and the number; the class of a log line is that of the kind.",
        "What a program on the GPU causes is unknown, and its owner is the code.",
    )
    rows = [
        (", ".join(map(str, row.codes)), row.means, code(row.kind.code), _verdict(row.kind), row.kind.owner, row.remedy)
        for row in xid.TABLE
    ]
    beside = [reason for reason in xid.REASONS if not any(character.isdigit() for character in reason.code)]
    head = ("number", "meaning", "kind", "verdict", "owner", "remedy")
    return f"{intro}\n\n{table(head, rows)}\n\n## Others\n\n{reasons(beside)}"


def _verdict(kind: xid.XidKind) -> str:
    return f"{kind.verdict}{', sure' if kind.sure else ''}"


def diagnostic_tests() -> str:
    """Which tests follow which symptom, and every test with its reasons."""
    parts = [
        paragraph(
            "[Diagnostic tests](../concepts/diagnostic-tests.md) explains how they are run and compared.",
            "The settings have [a page of their own](diagnostic-settings.md). Every test can report",
        ),
        reasons(COMMON),
        f"Only a comparison of machines can report\n\n{reasons(JUDGED)}",
        f"## Which tests follow which symptom\n\nThe first row that fits counts.\n\n{_choices()}",
        *(f"## `{kind.name}`\n\n{sentence(kind.does)}\n\n{reasons(kind.reasons)}" for kind in TESTS),
    ]
    return "\n\n".join(parts)


def diagnostic_settings() -> str:
    """Settings of all tests."""
    parts = [
        paragraph(
            "`everstep diagnose --set TEST.NAME=VALUE` changes a setting. A job file does the same for its incidents",
            "([policy](policy.md)). Every test has",
        ),
        settings(DiagnosticLimits),
    ]
    for kind in TESTS:
        if own := settings(kind.limits_type, without=DiagnosticLimits.model_fields):
            parts.append(f"## `{kind.name}`\n\n{own}")
    return "\n\n".join(parts)


def _choices() -> str:
    rows = [
        (_when(row), ", ".join(map(code, row.choice.tests)) or "none", row.choice.why, row.choice.source)
        for row in ROWS
    ]
    return table(("when", "tests", "why", "source"), rows)


def _when(row: ChoiceRow) -> str:
    parts = (("", row.faults), ("", row.symptoms), ("owner ", row.owners))
    return "; ".join(f"{what}{', '.join(sorted(map(str, values)))}" for what, values in parts if values) or "else"
