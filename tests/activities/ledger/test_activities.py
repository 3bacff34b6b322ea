"""The activity that writes an incident into the ledger, run once and twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from activities.write_to_ledger import WriteConclusion
from everstep.decisions.training_time.ettr import Interval
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.launch import Confirmation
from tests.activities.performing import perform

S = 10**9
ID = "incident/gpt/0001"


def conclusion(lost_steps: int | None, *, confirmed: bool = True) -> WriteConclusion:
    """The last entry of an incident that was seen at 100 s and was over at 110 s."""
    confirmation = Confirmation(
        generation=2, ok=True, reason="all stepped", stepped_ns=110 * S, completed_steps=21, parts={"next step": 1.5}
    )
    report = IncidentReport(
        headline="Recovered",
        resolution="reattempt",
        cause="SIGKILL",
        step=20,
        lost_steps=lost_steps,
        evicted=[],
        stages=[],
        generation=2,
        recovered=True,
        seconds=10.0,
        failures=[],
        confirmation=confirmation if confirmed else None,
    )
    seen = Anomaly(id="m0-1", generation=1, symptom=Symptom.CRASH, headline="SIGKILL", seen_ns=100 * S)
    return WriteConclusion(
        incident=ID,
        job="gpt",
        anomaly=seen,
        opened_ns=100 * S,
        position=3,
        time_ns=111 * S,
        stage="close",
        text="recovered",
        report=report,
    )


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (conclusion(4), [Interval(110 * S, 116 * S, "lost steps", ID)]),
        (conclusion(0), []),
        (conclusion(None), []),
        (conclusion(4, confirmed=False), []),
    ],
    ids=["four", "none", "unknown", "not-confirmed"],
)
async def test_the_time_in_which_lost_steps_are_done_again_is_known(
    tmp_path: Path, given: WriteConclusion, again: list[Interval]
) -> None:
    with Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/srv/train.py"), started_ns=1)
        for _ in range(2):  # the answer of the first attempt was lost, so the activity runs again
            await perform(given, ledger=ledger)

        assert [one for one in ledger.intervals("gpt") if one.kind == "lost steps"] == again
