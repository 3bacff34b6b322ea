"""docs/concepts/inspections.md lists every inspection, setting and reason code; ``python
tests/agent/monitor/test_docs.py`` prints the part that is made of the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agent.monitor.all import INSPECTIONS
from agent.monitor.inspection import Inspection
from agent.monitor.inspector import HANGS, UNABLE
from agent.monitor.settings import CheckLimits
from everstep.model import xid
from everstep.model.reason import Reason

DOC = Path(__file__).parents[3] / "docs" / "concepts" / "inspections.md"
HEAD = ("| reason | verdict | owner | remedy | means |", "|---|---|---|---|---|")
BESIDE = {"off", "interval_s", "deadline_s"}


def row(reason: Reason) -> str:
    verdict = f"{reason.verdict}, sure" if reason.sure else str(reason.verdict)
    return f"| `{reason.code}` | {verdict} | {reason.owner} | {reason.remedy} | {reason.means} |"


def settings(kind: Inspection | type[Inspection]) -> str:
    fields = {
        name: field.get_default(call_default_factory=True) for name, field in kind.limits_type.model_fields.items()
    }
    own = [f"`{name}` = {_shown(value)}" for name, value in fields.items() if name not in BESIDE]
    return f"Every {fields['interval_s']:g} s. Settings: {', '.join(own) if own else 'none of its own'}."


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def lines() -> Iterator[str]:
    for kind in INSPECTIONS:
        yield f"### `{kind.name}`: {kind.looks_at}"
        yield ""
        yield settings(kind)
        yield ""
        found = [reason for reason in kind.reasons if reason not in xid.REASONS]
        if found:
            yield from HEAD
            yield from map(row, found)
            yield ""


def xid_lines() -> Iterator[str]:
    yield from HEAD
    yield from map(row, xid.REASONS)


def test_it_has_every_inspection_with_its_settings_and_reasons() -> None:
    text = DOC.read_text()
    missing = [line for line in (*lines(), *xid_lines()) if line not in text]
    assert missing == [], "python tests/agent/monitor/test_docs.py prints them"


def test_it_has_what_every_inspection_can_find_and_the_settings_of_a_check() -> None:
    text = DOC.read_text()
    assert all(row(reason) in text for reason in (UNABLE, HANGS))
    assert all(f"`{name}`" in text for name in CheckLimits.model_fields)


def test_it_tells_of_no_reason_that_there_is_not() -> None:
    known = {reason.code for kind in INSPECTIONS for reason in (*kind.reasons, UNABLE, HANGS)}
    told = {
        line.split("`")[1] for line in DOC.read_text().splitlines() if line.startswith("| `") and line.count("|") == 6
    }
    assert told <= known | {reason.code for reason in (UNABLE, HANGS)}


if __name__ == "__main__":
    print("\n".join(lines()))
    print("## Xid and SXid\n")
    print("\n".join(xid_lines()))
