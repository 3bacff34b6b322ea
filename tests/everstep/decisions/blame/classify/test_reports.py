"""Logs of public reports: the class and the owner that the rules find, and the reason code."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.rules import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.model.finding import Owner

FOLDER = Path(__file__).parent / "reports"
LABELS: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "labels.toml").read_text())
MATCHER = LineMatcher()


def verdict_of(name: str) -> LogVerdict:
    scanner = LogScanner(name, matcher=MATCHER)
    scanner.feed((FOLDER / f"{name}.log").read_bytes())
    return first_cause([scanner.close()], LABELS[name].get("exit"))


@pytest.mark.parametrize("name", LABELS)
def test_a_report_is_classified_right(name: str) -> None:
    label, verdict = LABELS[name], verdict_of(name)

    assert (str(verdict.fault) in label["classes"], str(verdict.owner) in label["owners"]) == (True, True)
    assert verdict.reason == label["reason"]


def test_every_log_has_a_label_with_known_owners() -> None:
    assert {path.stem for path in FOLDER.glob("*.log")} == set(LABELS)
    assert {owner for label in LABELS.values() for owner in label["owners"]} <= {str(owner) for owner in Owner}
    assert {label["set"] for label in LABELS.values()} == {"first sight", "after the rules", "tuned"}
