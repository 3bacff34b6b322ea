"""Record job: write the state of a job into the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from activities.activity import Activity, Bounds
from activities.heartbeat import Say
from activities.ledger.bounds import ON_LEDGER
from activities.ledger.records import NumbersUsed
from activities.ledger.write_generation import write_generation
from everstep.decisions.training_time.ettr import WINDOW_S
from everstep.model.job import JobSpec
from everstep.model.job_state import ShareTrained
from everstep.model.launch import Confirmation, Launched
from everstep.model.version import JobVersion

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from activities.tools import Tools


class RecordJob(Activity[NumbersUsed]):
    """Write the state of a job; the result is the numbers that earlier runs of its name have used."""

    name = "Record job"

    spec: JobSpec
    time_ns: int
    started_ns: int = 0
    """The start of the run, nanoseconds; it is set in the first entry, which opens the run."""
    launched: Launched | None = None
    confirmation: Confirmation | None = None
    outcome: str = ""
    """How the job ended; it is set in the last entry, which closes the run."""
    versions: list[JobVersion] = Field(default_factory=list)
    """The versions of the job's code that changed."""
    label: str = ""
    """A text about the entry, for the timeline; empty: none is needed."""

    def line(self) -> str:
        return self.label or self.outcome or (f"generation {self.launched.generation}" if self.launched else "started")

    def bounds(self) -> Bounds:
        return ON_LEDGER

    async def perform(self, tools: Tools, say: Say) -> NumbersUsed:
        return await tools.ledger.call(_write_job, self)


def _write_job(ledger: Ledger, entry: RecordJob) -> NumbersUsed:
    used = NumbersUsed()
    if entry.started_ns:
        used = ledger.job_started(entry.spec, started_ns=entry.started_ns)
    write_generation(ledger, entry.spec.name, entry.launched, entry.confirmation)
    if entry.versions:  # the ledger keeps no values of variables that look like secrets
        versions = [version.without_secrets(entry.spec.redact) for version in entry.versions]
        ledger.versions_seen(entry.spec.name, versions, seen_ns=entry.time_ns)
    if entry.outcome:
        ledger.job_ended(entry.spec.name, ended_ns=entry.time_ns, outcome=entry.outcome)
        shares = [ledger.ettr(entry.spec.name, now_ns=entry.time_ns, window_s=window) for window in (None, WINDOW_S)]
        shown = ShareTrained.shown(*(share.ratio if share else None for share in shares))
        used = used.model_copy(update={"ettr": shown.ettr, "ettr_last_hour": shown.last_hour})
    return used
