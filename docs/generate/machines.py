"""The pages about machines: inspections, Xids, diagnostic tests."""

from __future__ import annotations

from agent.diagnoser.all import TESTS
from agent.diagnoser.diagnostic import COMMON, DiagnosticLimits
from agent.monitor.all import INSPECTIONS
from agent.monitor.inspection import Limits
from agent.monitor.monitor import HANGS, UNABLE
from agent.monitor.settings import CheckLimits
from agent.needs import NEEDS, StartedBy
from docs.generate.markdown import code, paragraph, reasons, sentence, settings, table
from everstep.decisions.blame.diagnose.choose_tests import ROWS, ChoiceRow
from everstep.decisions.blame.diagnose.reasons import JUDGED
from everstep.model import xid

LINES = (StartedBy.UNIT, StartedBy.DOCKER, StartedBy.KUBERNETES)
"""The columns with lines."""


def needs() -> str:
    """What an agent needs, and the line that provides it."""
    intro = paragraph(
        "`everstep doctor` asks every agent whether it has these things, and shows the line that is missing.",
        "The unit `deploy/systemd/everstep-agent.service` has all lines for systemd.",
        "The lines for docker are options of `docker run`, and those for Kubernetes are fields of the container.",
        "In a container, only root has the capabilities, so the lines include the user.",
    )
    rows = [(code(need.name), need.means, need.without) for need in NEEDS]
    lines = [
        (code(need.name), *(code(need.lines[by]) if by in need.lines else "" for by in LINES), code(need.machine))
        for need in NEEDS
    ]
    where = paragraph("Where a cell is empty, do on the machine what the last column says.")
    tables = table(("need", "what it is", "without it"), rows), table(("need", *LINES, "on the machine"), lines)
    return f"{intro}\n\n{tables[0]}\n\n## Lines\n\n{where}\n\n{tables[1]}"


def inspections() -> str:
    """All inspections with their reason codes."""
    parts = [
        paragraph(
            "[Inspections](../concepts/inspections.md) explains verdict, owner, remedy and *sure*.",
            "Their settings are on [another page](inspection-settings.md). Every inspection can report these reasons:",
        ),
        reasons((UNABLE, HANGS)),
    ]
    for kind in INSPECTIONS:
        found = [reason for reason in kind.reasons if reason not in xid.REASONS]
        every = f"{kind.limits_type.model_fields['interval_s'].get_default():g}"
        more = " [Xids](xids.md) are on another page." if len(found) < len(kind.reasons) else ""
        parts.append(f"## `{kind.name}`\n\n{sentence(kind.inspects)} It runs every {every} s.{more}")
        parts += [reasons(found)] if found else []
    return "\n\n".join(parts)


def inspection_settings() -> str:
    """Settings of all inspections."""
    parts = [
        paragraph(
            "The file of `everstep agent --monitor` has a table for each inspection, `[gpu]` for example.",
            "Every inspection has these settings; the sections below list its own settings.",
        ),
        settings(Limits),
        f"## Your own program: `[[check]]`\n\n{settings(CheckLimits, without=('off',))}",
    ]
    for kind in INSPECTIONS:
        if own := settings(kind.limits_type, without=Limits.model_fields):
            parts.append(f"## `[{kind.name}]`\n\n{own}")
    return "\n\n".join(parts)


def xids() -> str:
    """All Xids with their owners."""
    intro = paragraph(
        "The inspection `kernel-log` reads these lines of the kernel log, and the classifier reads them in logs.",
        "The reason code is `xid-` and the number, with the ending that the table shows.",
        "The class of a log line is that of the kind.",
        "A fault that is sure evicts its machine, any other fault has to be confirmed by a test.",
        "For Xids that a program on the GPU causes, the verdict is unknown and the owner is the code.",
    )
    rows = [
        (
            ", ".join(f"{number}{row.suffix}" for number in row.codes),
            row.means,
            code(row.kind.code),
            _verdict(row.kind),
            row.kind.owner,
            row.remedy,
            row.source,
        )
        for row in xid.TABLE
    ]
    beside = [reason for reason in xid.REASONS if not any(character.isdigit() for character in reason.code)]
    head = ("number", "meaning", "kind", "verdict", "owner", "remedy", "source")
    return f"{intro}\n\n{table(head, rows)}\n\n## Others\n\n{reasons(beside)}"


def _verdict(kind: xid.XidKind) -> str:
    return f"{kind.verdict}{', sure' if kind.sure else ''}"


def diagnostic_tests() -> str:
    """The tests that follow each symptom, and all tests with their reason codes."""
    parts = [
        paragraph(
            "[Diagnostic tests](../concepts/diagnostic-tests.md) explains how they are run and compared.",
            "Their settings are on [another page](diagnostic-settings.md). Every test can report these reasons:",
        ),
        reasons(COMMON),
        f"Only a comparison of machines can report these reasons:\n\n{reasons(JUDGED)}",
        f"## Which tests follow which symptom\n\nThe first row that fits counts.\n\n{_choices()}",
        *(f"## `{kind.name}`\n\n{sentence(kind.does)}\n\n{reasons(kind.reasons)}" for kind in TESTS),
    ]
    return "\n\n".join(parts)


def diagnostic_settings() -> str:
    """Settings of all tests."""
    parts = [
        paragraph(
            "`everstep diagnose --set TEST.NAME=VALUE` changes a setting. A job file sets it for the job's incidents",
            "([policy](policy.md)). Every test has these settings:",
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
    return (
        "; ".join(
            f"{what}{', '.join(sorted(str(value) or 'not named' for value in values))}"
            for what, values in parts
            if values
        )
        or "else"
    )
