"""The base classes of faults: how a fault is injected, and how its effects are checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from drills.inject.context import DrillContext
from drills.inject.detection import machine_events
from drills.judge.facts import DrillFacts
from drills.spec.fault import Entry, FaultOptions
from drills.spec.request import DrillRequest
from everstep.errors import CannotInject
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec


class Fault(FaultOptions):
    """A fault that a drill can inject."""

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Prepare what the fault will break, from before the job's start until after its end."""
        return nullcontext()

    async def strike(self, context: DrillContext) -> None:
        """Inject the fault from outside, once the job has reached the step.

        Raises:
            ClusterError: the job or the cluster is in a state in which the fault cannot be injected as planned.
            CannotInject: this computer cannot inject it.
        """
        raise CannotInject(f"{self.name}: it is not injected from outside")

    async def gather(self, context: DrillContext, facts: DrillFacts) -> None:
        """Add the facts that only this kind of fault needs; by default the ledger's events about a broken device."""
        if self.finding:
            facts.machine_events = await machine_events(context)

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """Problems that only this kind of fault can have.

        Args:
            drill: The request of the drill.
            spec: The job.
            facts: The facts after the drill.
            reports: The reports of the job's incidents.
        """
        return []


def fault_of(drill: DrillRequest) -> Fault:
    """Return the fault of a drill."""
    assert isinstance(drill.fault, Fault)
    return drill.fault


def opening_of(drill: DrillRequest) -> Fault:
    """Return the fault that opens the incident of a drill."""
    assert isinstance(drill.opening, Fault)
    return drill.opening


async def inject(context: DrillContext) -> None:
    """Inject a drill's fault, and a strike that follows the end of that fault; then let waiting ranks continue.

    Raises as :meth:`Fault.strike` does.
    """
    try:
        await fault_of(context.request).strike(context)
        if context.request.opening.struck_again:
            await context.await_saves(await context.await_holds())
            await context.second_fault(exact=True)
    finally:
        context.planned.let_go()


class RankFault(Fault):
    """A fault that ranks perform themselves at a step (``everstep/rank/drill_faults.py``)."""

    by_ranks = True
    action: ClassVar[str] = ""
    """Name of the action in ``drill_faults.py``."""
    point: ClassVar[str] = "step"
    """The point of the step at which the rank acts: ``begin``, ``step`` (its middle) or ``save``."""

    times: int = Field(
        1, ge=1, le=20, description="Number of strikes, one after each recovery.", json_schema_extra={"metavar": "N"}
    )

    @property
    def repeats(self) -> int:
        """The value of ``--times``."""
        return self.times

    def details(self, spec: JobSpec) -> Entry:
        """Return the fields of a rank's entry that this fault adds."""
        return {}

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Path) -> list[Entry]:
        """Return one entry for each rank and each strike; the ranks of one strike act together."""
        ranks, entries = self.struck_ranks(spec), list[Entry]()
        entry: Entry = {"fault": self.action, "at_step": at_step, "point": self.point, **self.details(spec)}
        for strike in range(self.repeats):
            names = [f"f{strike}-{rank}" for rank in ranks]
            together = {"together": names} if len(ranks) > 1 else {}
            entries += [{"id": id, "rank": rank, **entry, **together} for rank, id in zip(ranks, names, strict=True)]
        return entries
