"""The rungs of the ladder that an incident has tried so far."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict, Field

from everstep.decisions.act.versions.book import VersionBook
from everstep.model.finding import MachineFinding
from everstep.model.incident import Failure
from everstep.model.ladder import Rung, TriedRung


class Climbed(BaseModel):
    """The rungs that were tried, and what the tests of the machines showed. Mutable; no clock."""

    model_config = ConfigDict(extra="allow")

    tried: list[TriedRung] = Field(default_factory=list)
    """Rungs tried since an operator last resumed the job, the newest last."""
    all_tried: list[TriedRung] = Field(default_factory=list)
    """All rungs tried in the incident."""
    remembered: list[TriedRung] = Field(default_factory=list)
    """Rungs tried by earlier incidents of the job."""
    tested: list[MachineFinding] = Field(default_factory=list)
    """Results of stop-time tests of the machines; the newest tests count."""
    of_script: bool = False
    """The failure at hand is a hang that the script itself brings about, as looks at its ranks show."""
    approved: set[Rung] = Field(default_factory=set)
    """Rungs that an operator let go on."""

    def take(
        self, rung: Rung, failure: Failure, why: str, *, path: str = "", found: str = "", seconds: float = 0.0
    ) -> None:
        """A rung is tried for a failure; ``path``: of the ladder's table."""
        one = TriedRung(
            rung=rung,
            symptom=failure.symptom,
            cause=failure.cause,
            step=failure.step,
            machine=failure.machine,
            time_ns=failure.time_ns,
            why=why,
            found=found,
            seconds=seconds,
            generation=failure.generation,
            path=path,
        )
        self.tried.append(one)
        self.all_tried.append(one)

    def came(self, found: str, seconds: float) -> None:
        """Record the result of the newest rung, and its cost."""
        last = self.tried[-1].model_copy(update={"found": found, "seconds": round(seconds, 3)})
        self.tried[-1] = self.all_tried[-1] = last

    def acquit(self, failure: Failure, book: VersionBook, unsolved: Collection[int]) -> None:
        """Clear the code if the job still fails after a rollback, in this incident or in an earlier one after which the
        job made no steady progress.

        Args:
            failure: The current failure.
            book: The versions of the job.
            unsolved: Generations whose failures are not solved.
        """
        before = [*(attempt for attempt in self.remembered if attempt.generation in unsolved), *self.tried]
        alike = [one for one in before if (one.symptom, one.cause) == (failure.symptom, failure.cause)]
        if not alike or alike[-1].rung is not Rung.ROLLBACK:
            return
        for one in book.all():
            if one.number != book.running and one.ended.startswith(f"rolled back to v{book.running}:"):
                book.acquit(one.number, f"it was taken back, and v{book.running} failed in the same way")

    def begin_again(self) -> None:
        """An operator resumed: the ladder is climbed from below, and what earlier incidents tried is forgotten too."""
        self.tried.clear()
        self.remembered.clear()
        self.tested.clear()
        self.approved.clear()
