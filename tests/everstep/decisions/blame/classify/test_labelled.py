"""The labelled logs: what docs/concepts/classification.md says of precision and recall is so."""

from __future__ import annotations

from pathlib import Path

from everstep.decisions.blame.classify.rule import FaultClass
from tests.everstep.decisions.blame.classify.labelled_logs import FOLDER, labelled, table

DOCS = Path(__file__).parents[5] / "docs" / "concepts" / "classification.md"


def test_the_table_in_the_docs_is_what_the_rules_do() -> None:
    assert table() in DOCS.read_text(), (
        "run python -P -m tests.everstep.decisions.blame.classify.labelled_logs, and put its table there"
    )


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
