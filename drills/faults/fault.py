"""A fault that can be injected: the injector's work, and the checks for this kind of fault."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from pydantic import Field

from drills.inject.context import DrillContext
from drills.inject.found import machine_events
from drills.judge.facts import DrillFacts
from drills.spec.fault import Entry, FaultOptions
from drills.spec.request import DrillRequest
from everstep.errors import CannotInject
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec


class Fault(FaultOptions):
    """One fault of the vocabulary. A subclass overrides what differs."""

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Prepare what the fault will break; it stays from before the job's start until its end."""
        return nullcontext()

    async def strike(self, context: DrillContext) -> None:
        """Inject the fault once the job has reached the step.

        Raises:
            ClusterError: the job or the cluster is not as it would have to be.
            CannotInject: the injector cannot inject it.
        """
        raise CannotInject(f"{self.name}: nothing here injects it")

    async def gather(self, context: DrillContext, facts: DrillFacts) -> None:
        """Add facts for this kind of fault; by default the ledger's events of a machine whose device broke."""
        if self.finding:
            facts.machine_events = await machine_events(context)

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """Problems that only this kind of fault can have.

        Args:
            drill: The drill.
            spec: Its job.
            facts: The facts after the drill.
            reports: The reports of its incidents.
        """
        return []


def fault_of(drill: DrillRequest) -> Fault:
    """The fault of a drill, in its form that can be injected."""
    assert isinstance(drill.fault, Fault)
    return drill.fault


def opening_of(drill: DrillRequest) -> Fault:
    """The fault that opens the incident of a drill."""
    assert isinstance(drill.opening, Fault)
    return drill.opening


async def inject(context: DrillContext) -> None:
    """Inject a drill's fault once the job has reached the step, then the second fault; then let the job continue.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
        CannotInject: the injector cannot inject it.
    """
    try:
        await fault_of(context.request).strike(context)
        if context.request.opening.struck_again:
            await context.settled(await context.held_up())
            await context.second_fault(exact=True)
    finally:
        context.planned.let_go()


class RankFault(Fault):
    """A fault that ranks perform themselves, at a step (``everstep/rank/drill_faults.py``)."""

    by_ranks = True
    action: ClassVar[str] = ""
    """The action of the rank."""
    point: ClassVar[str] = "step"
    """The point of the step: its begin, its middle, or a save."""

    times: int = Field(
        1, ge=1, le=20, description="Strike so often, after each recovery again.", json_schema_extra={"metavar": "N"}
    )

    @property
    def repeats(self) -> int:
        """The value of ``--times``."""
        return self.times

    def details(self, spec: JobSpec) -> Entry:
        """Further fields of each rank's entry."""
        return {}

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Any) -> list[Entry]:
        """One entry for each rank and each time; entries of one time act together."""
        ranks, made = self.struck_ranks(spec), list[Entry]()
        entry: Entry = {"fault": self.action, "at_step": at_step, "point": self.point, **self.details(spec)}
        for again in range(self.repeats):
            names = [f"f{again}-{rank}" for rank in ranks]
            together = {"together": names} if len(ranks) > 1 else {}
            made += [{"id": name, "rank": rank, **entry, **together} for rank, name in zip(ranks, names, strict=True)]
        return made
