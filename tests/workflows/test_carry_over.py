"""What an incident takes along when it continues as new."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from everstep.decisions.act.recover.climbed import Climbed
from everstep.decisions.act.recover.state import RecoveryState
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.ladder import Rung, Tried
from everstep.model.machine import Machine
from workflows.incident.carry_over import carried
from workflows.messages import IncidentInput


def test_what_an_operator_had_forgotten_does_not_come_back_with_the_next_run() -> None:
    """A fresh ladder stays one, however long the history grows."""
    spec, machines = JobSpec(name="gpt", script="/job.py", machines=1), [Machine(name="m0", address="127.0.0.1:1")]
    anomaly = Anomaly(id="m0-1", generation=1, symptom=Symptom.CRASH, headline="seen")
    before = [Tried(rung=Rung.DIAGNOSE, symptom=Symptom.CRASH, generation=1)]
    known: dict[str, Any] = {"generation": 1, "resume_step": 0, "lineage": [(1, 0)]}
    given = IncidentInput(
        job="gpt",
        number=2,
        anomaly=anomaly,
        spec=spec,
        machines=machines,
        history=[],
        opened_ns=1,
        tried=before,
        **known,
    )
    state = RecoveryState(
        spec=spec, machines=machines, anomaly=anomaly, ladder=Climbed(remembered=list(given.tried)), **known
    )
    timeline: Any = SimpleNamespace(headline="", stages=[], rejected=[], parked=[], noted=0)
    assert carried(given, state, timeline).tried == before
    state.failed_restores = 2
    going_on = carried(given, state, timeline).carried
    assert going_on is not None and going_on.failed_restores == 2
    state.begin_again()
    assert carried(given, state, timeline).tried == []
