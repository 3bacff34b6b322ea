"""The labelled logs: how many of them the rules classify right."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass
from tests.everstep.decisions.blame.classify.labelled_logs import FOLDER, labelled

WRONG = {"runs/worker-killed.log": "connection lost"}
"""That the worker of a DataLoader was killed is not in its log: it shows as a broken connection."""


def test_every_log_but_one_is_classified_right() -> None:
    verdicts = [(one, str(one.verdict().fault)) for one in labelled()]
    assert len(verdicts) == 113
    assert {one.path: fault for one, fault in verdicts if fault != one.fault} == WRONG


def test_every_log_has_a_label_and_every_label_a_class() -> None:
    entries = labelled()
    inside = {path for path in FOLDER.rglob("*.log") if path.is_file()}
    tops = [FOLDER / one.path for one in entries]
    meant = {path for top in tops for path in ([top] if top.is_file() else top.rglob("*.log"))}

    assert inside == meant
    assert {one.fault for one in entries} <= {str(fault) for fault in FaultClass}
    assert len({one.path for one in entries}) == len(entries)
    assert {one.part for one in entries} == {"tuned", "held-out", "second held-out"}


def test_an_exception_is_told_with_its_place_in_the_users_code() -> None:
    verdicts = {one.path: one.verdict() for one in labelled() if one.path.startswith("runs/")}

    assert verdicts["runs/shape.log"].place.startswith("/job/train.py:4 in forward")
    assert verdicts["runs/worker-raises.log"].place.startswith("/job/train.py:6 in __getitem__")
    assert verdicts["runs/ranks-value-error"].ranks == (1,)
    assert verdicts["runs/ranks-wrapped"].evidence[0].text == "KeyError: 'weights'"
    assert verdicts["runs/ranks-killed"].consequence
