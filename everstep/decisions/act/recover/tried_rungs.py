"""Records the rungs of the ladder that an incident has tried so far."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict, Field

from everstep.decisions.act.versions.book import VersionBook
from everstep.model.finding import MachineFinding
from everstep.model.incident import Failure
from everstep.model.ladder import Rung, TriedRung


class TriedRungs(BaseModel):
    """The rungs that were tried, and the results of the machines' tests. Mutable; it has no clock."""

    model_config = ConfigDict(extra="allow")

    tried: list[TriedRung] = Field(default_factory=list)
    """Rungs tried since an operator last resumed the job, the newest last."""
    all_tried: list[TriedRung] = Field(default_factory=list)
    """All rungs tried in the incident."""
    remembered: list[TriedRung] = Field(default_factory=list)
    """Rungs tried by earlier incidents of the job."""
    tested: list[MachineFinding] = Field(default_factory=list)
    """The findings of the last tests or of the last replay of the machines."""
    of_script: bool = False
    """The current failure is a hang that the script itself causes, as samples of its ranks show."""
    approved: set[Rung] = Field(default_factory=set)
    """Rungs that an operator approved."""

    def add(
        self, rung: Rung, failure: Failure, why: str, *, path: str = "", found: str = "", seconds: float = 0.0
    ) -> None:
        """Record that a rung is tried for a failure; ``path`` is the name of its path of the ladder."""
        attempt = TriedRung(
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
        self.tried.append(attempt)
        self.all_tried.append(attempt)

    def record_result(self, found: str, seconds: float) -> None:
        """Record the result of the newest rung, and its duration."""
        last = self.tried[-1].model_copy(update={"found": found, "seconds": round(seconds, 3)})
        self.tried[-1] = self.all_tried[-1] = last

    def clear_code(self, failure: Failure, book: VersionBook, unsolved: Collection[int]) -> None:
        """Clear the version that was rolled back if the job fails in the same way after the rollback.

        The rollback was made in this incident, or in an earlier incident after which the job made no steady progress.

        Args:
            failure: The current failure.
            book: The versions of the job.
            unsolved: Generations whose failures are not solved.
        """
        before = [*(attempt for attempt in self.remembered if attempt.generation in unsolved), *self.tried]
        alike = [attempt for attempt in before if (attempt.symptom, attempt.cause) == (failure.symptom, failure.cause)]
        if not alike or alike[-1].rung is not Rung.ROLLBACK:
            return
        for version in book.all():
            if version.number != book.running and version.ended.startswith(f"rolled back to v{book.running}:"):
                book.clear(version.number, f"it was rolled back, and v{book.running} failed in the same way")

    def begin_again(self) -> None:
        """Forget all attempts, also those of earlier incidents: the ladder begins with its first rung."""
        self.tried.clear()
        self.remembered.clear()
        self.tested.clear()
        self.approved.clear()
