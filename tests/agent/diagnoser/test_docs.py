"""docs/concepts/diagnostic-tests.md lists every test, setting and reason code, and which tests follow which symptom;
``python tests/agent/diagnoser/test_docs.py`` prints the parts that are made of the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agent.diagnoser.all import TESTS
from agent.diagnoser.diagnostic import COMMON, DiagnosticTest
from everstep.decisions.blame.diagnose.choose_tests import ROWS, ChoiceRow
from everstep.decisions.blame.diagnose.reasons import JUDGED
from everstep.model.reason import Reason

DOC = Path(__file__).parents[3] / "docs" / "concepts" / "diagnostic-tests.md"
HEAD = ("| reason | verdict | owner | remedy | means |", "|---|---|---|---|---|")
CHOICE_HEAD = ("| when | tests | why | source |", "|---|---|---|---|")


def row(reason: Reason) -> str:
    verdict = f"{reason.verdict}, sure" if reason.sure else str(reason.verdict)
    return f"| `{reason.code}` | {verdict} | {reason.owner} | {reason.remedy} | {reason.means} |"


def settings(kind: type[DiagnosticTest]) -> str:
    fields = {name: field.get_default() for name, field in kind.limits_type.model_fields.items()}
    own = [f"`{name}` = {_shown(value)}" for name, value in fields.items()]
    return f"Settings: {', '.join(own)}."


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:g}" if isinstance(value, float) else str(value)


def lines() -> Iterator[str]:
    for kind in TESTS:
        yield f"### `{kind.name}`: {kind.does}"
        yield ""
        yield settings(kind)
        yield ""
        yield from HEAD
        yield from map(row, kind.reasons)
        yield ""


def choice(one: ChoiceRow) -> str:
    parts = [("", one.faults), ("", one.symptoms), ("owner ", one.owners)]
    when = "; ".join(f"{what}{', '.join(sorted(map(str, values)))}" for what, values in parts if values) or "else"
    tests = ", ".join(f"`{test}`" for test in one.choice.tests) or "none"
    return f"| {when} | {tests} | {one.choice.why} | {one.choice.source} |"


def test_it_has_every_test_with_its_settings_and_reasons() -> None:
    text = DOC.read_text()
    missing = [line for line in lines() if line not in text]
    assert missing == [], "python tests/agent/diagnoser/test_docs.py prints them"


def test_it_has_what_every_test_can_find_and_what_only_a_comparison_can() -> None:
    text = DOC.read_text()
    assert [row(reason) for reason in (*COMMON, *JUDGED) if row(reason) not in text] == []


def test_it_has_which_tests_follow_which_symptom() -> None:
    text = DOC.read_text()
    assert [choice(one) for one in ROWS if choice(one) not in text] == []


def test_it_tells_of_no_reason_that_there_is_not() -> None:
    known = {reason.code for kind in TESTS for reason in (*kind.reasons, *COMMON, *JUDGED)}
    told = {
        line.split("`")[1] for line in DOC.read_text().splitlines() if line.startswith("| `") and line.count("|") == 6
    }
    assert told == known


if __name__ == "__main__":
    print("\n".join([*HEAD, *map(row, COMMON), "", *HEAD, *map(row, JUDGED), "", *CHOICE_HEAD, *map(choice, ROWS), ""]))
    print("\n".join(lines()))
