"""Labelled logs: how many of them the rules classify correctly."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.rule import FaultClass
from everstep.decisions.blame.classify.rules import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.system.log_files import log_files, pieces

FOLDER = Path(__file__).parent / "labelled"
MATCHER = LineMatcher()
WRONG = {"runs/worker-killed.log": "connection lost"}
"""This log shows only a broken connection, and not that a DataLoader's worker was killed."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A log, or a folder with a log for each rank, and its label."""

    path: str
    fault: str
    part: str
    exit_code: int | None

    def verdict(self) -> LogVerdict:
        logs = []
        for name in log_files([str(FOLDER / self.path)]):
            scanner = LogScanner(name, matcher=MATCHER)
            for piece in pieces(name):
                scanner.feed(piece)
            logs.append(scanner.close())
        return first_cause(logs, self.exit_code)


def labelled() -> list[Labelled]:
    labels = tomllib.loads((FOLDER / "labels.toml").read_text())
    return [Labelled(path, of["class"], of["part"], of.get("exit_code")) for path, of in labels.items()]


def test_every_log_but_one_is_classified_right() -> None:
    verdicts = [(log, str(log.verdict().fault)) for log in labelled()]
    assert len(verdicts) == 113
    assert {log.path: fault for log, fault in verdicts if fault != log.fault} == WRONG


def test_every_log_has_a_label_and_every_label_is_a_class() -> None:
    entries = labelled()
    inside = {path for path in FOLDER.rglob("*.log") if path.is_file()}
    tops = [FOLDER / entry.path for entry in entries]

    assert inside == {path for top in tops for path in ([top] if top.is_file() else top.rglob("*.log"))}
    assert {entry.fault for entry in entries} <= {str(fault) for fault in FaultClass}
    assert {entry.part for entry in entries} == {"tuned", "held-out", "second held-out"}


def test_a_verdict_has_the_position_in_the_users_code() -> None:
    verdicts = {log.path: log.verdict() for log in labelled() if log.path.startswith("runs/")}

    assert verdicts["runs/shape.log"].place.startswith("/job/train.py:4 in forward")
    assert verdicts["runs/worker-raises.log"].place.startswith("/job/train.py:6 in __getitem__")
    assert verdicts["runs/ranks-value-error"].ranks == (1,)
    assert verdicts["runs/ranks-wrapped"].evidence[0].text == "KeyError: 'weights'"
    assert verdicts["runs/ranks-killed"].consequence
