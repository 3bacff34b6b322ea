"""A verdict as a person reads it, of logs and of an incident."""

from __future__ import annotations

from activities.ledger.records import IncidentRecord
from console.views.classification import text_of
from console.views.incident_report import report_blocks
from everstep.decisions.blame.classify.first_cause import classify_end
from everstep.model.evidence import Classification

CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.12]:4213"


def test_a_consequence_is_called_one() -> None:
    first = text_of(classify_end(CLOSED, "", 1)).splitlines()[0]

    assert first.startswith(
        "connection lost, owner unknown, a consequence; the cause is not in these logs: RuntimeError"
    )


def test_a_log_gives_a_terminal_no_commands() -> None:
    shown = text_of(classify_end("ValueError: \x1b[2J\x1b]0;title\x07bad", "", 1))

    assert "\x1b" not in shown
    assert shown.startswith("user exception, owner code: ValueError: bad")


def test_an_incident_shows_class_owner_place_and_evidence() -> None:
    found = Classification(
        fault="disk full",
        owner="storage",
        reason="disk-full",
        place="/job/train.py:15 in save",
        evidence=["OSError: [Errno 28] No space left on device"],
    )
    record = IncidentRecord(id="incident/gpt/0001", job="gpt", run=1, number=1)
    shown = record.model_copy(update={"anomaly": {"classification": found.model_dump(mode="json")}})

    facts = {row[0]: row[1] for row in report_blocks(shown)[0].rows}
    assert facts["class"] == "disk full (disk-full)"
    assert (facts["owner"], facts["in"]) == ("storage", "/job/train.py:15 in save")
    assert facts["evidence"] == "OSError: [Errno 28] No space left on device"
    assert "class" not in {row[0] for row in report_blocks(record)[0].rows}
