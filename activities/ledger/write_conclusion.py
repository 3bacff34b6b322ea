"""Write conclusion: write an entry of an incident into the ledger.

It may run twice: the ledger's rows have natural keys and keep their first values. A ledger that is away delays only
its own rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field
from temporalio import activity

from activities.activity import Activity, Bounds
from activities.heartbeat import Say
from activities.ledger.bounds import ON_LEDGER
from activities.ledger.write_generation import write_generation
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport
from everstep.model.launch import Launched

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from activities.tools import Tools


class WriteConclusion(Activity[None]):
    """Write an entry of an incident; the first entry opens it, and the last entry closes it with its report."""

    name = "Decide"

    incident: str
    job: str
    anomaly: Anomaly
    opened_ns: int
    position: int
    """The entry's position within the incident, from 1; it makes a repeated write harmless."""
    time_ns: int
    stage: str
    text: str
    evidence: Evidence | None = None
    launched: Launched | None = None
    report: IncidentReport | None = None
    """The report; it is set in the last entry, which closes the incident."""
    parked: list[tuple[int, int]] = Field(default_factory=list)
    """The times when the job was parked: start and end, nanoseconds."""

    def line(self) -> str:
        return self.text

    def bounds(self) -> Bounds:
        return ON_LEDGER

    async def perform(self, tools: Tools, say: Say) -> None:
        await tools.ledger.call(_write_conclusion, self)
        activity.logger.info(
            self.text, extra={"incident": self.incident, "stage": self.stage, "correlation": self.anomaly.id}
        )


def _write_conclusion(ledger: Ledger, conclusion: WriteConclusion) -> None:
    ledger.incident_opened(conclusion.incident, conclusion.anomaly, opened_ns=conclusion.opened_ns)
    if conclusion.evidence is not None:
        ledger.incident_evidence(conclusion.incident, conclusion.evidence)
    ledger.incident_event(
        conclusion.incident,
        conclusion.position,
        time_ns=conclusion.time_ns,
        stage=conclusion.stage,
        text=conclusion.text,
    )
    write_generation(
        ledger, conclusion.job, conclusion.launched, conclusion.report.confirmation if conclusion.report else None
    )
    for begin_ns, end_ns in conclusion.parked:
        ledger.interval(conclusion.job, start_ns=begin_ns, end_ns=end_ns, kind="parked", cause=conclusion.incident)
    if conclusion.report is not None:
        confirmation = conclusion.report.confirmation
        closed_ns = confirmation.stepped_ns if confirmation else conclusion.time_ns
        # The ledger keeps no values of variables that look like secrets.
        shown = [version.without_secrets() for version in conclusion.report.versions]
        report = conclusion.report.model_copy(update={"versions": shown})
        ledger.incident_closed(conclusion.incident, report, closed_ns=closed_ns)
        _write_lost_steps(ledger, conclusion.job, conclusion.incident, conclusion.report)


def _write_lost_steps(ledger: Ledger, job: str, incident: str, report: IncidentReport) -> None:
    """Write the time in which lost steps were repeated: at most their number times the time of the first step."""
    confirmation = report.confirmation
    if confirmation is None or not report.lost_steps:
        return
    again_s = report.lost_steps * confirmation.parts.get("next step", 0.0)
    end_ns = confirmation.stepped_ns + int(again_s * 1e9)
    ledger.interval(job, start_ns=confirmation.stepped_ns, end_ns=end_ns, kind="lost steps", cause=incident)
