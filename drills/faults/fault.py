"""A fault that can be injected: what is done for it from outside, and what only its kind is judged by."""

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
    """One fault of the vocabulary. A subclass overrides what is different for it."""

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """What has to be there from before the job starts until it is over, for something to break."""
        return nullcontext()

    async def strike(self, context: DrillContext) -> None:
        """Do what the fault is, once the job has reached the step.

        Raises:
            ClusterError: the job or the cluster is not as it would have to be.
            CannotInject: nothing does it from outside.
        """
        raise CannotInject(f"{self.name}: nothing here injects it")

    async def gather(self, context: DrillContext, facts: DrillFacts) -> None:
        """Add to the facts what only such a fault is judged by: what the ledger has of a machine whose device broke."""
        if self.finding:
            facts.machine_events = await machine_events(context)

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """What is wrong beside what is judged after every fault.

        Args:
            drill: The drill.
            spec: Its job.
            facts: What is known after it.
            reports: The reports of its incidents.
        """
        return []


def fault_of(drill: DrillRequest) -> Fault:
    """The fault of a drill, which can be injected."""
    assert isinstance(drill.fault, Fault)
    return drill.fault


def opening_of(drill: DrillRequest) -> Fault:
    """The fault that opens the incident of a drill."""
    assert isinstance(drill.opening, Fault)
    return drill.opening


async def inject(context: DrillContext) -> None:
    """Do what a drill's fault is, once the job has reached the step, and what follows it; then let the job go.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
        CannotInject: it is a fault of another kind.
    """
    try:
        await fault_of(context.request).strike(context)
        if context.request.opening.struck_again:
            await context.settled(await context.held_up())
            await context.second_fault(exact=True)
    finally:
        context.planned.let_go()


class RankFault(Fault):
    """A fault that ranks act out by themselves, at a step (``everstep/rank/drill_faults.py``)."""

    by_ranks = True
    action: ClassVar[str] = ""
    """What a rank does to itself."""
    point: ClassVar[str] = "step"
    """Where in the step it does so: at its begin, in it, or in a save."""

    times: int = Field(
        1, ge=1, le=20, description="Strike so often, after each recovery again.", json_schema_extra={"metavar": "N"}
    )

    @property
    def repeats(self) -> int:
        """As often as ``--times`` says."""
        return self.times

    def details(self, spec: JobSpec) -> Entry:
        """What the entry of each rank says beside its place."""
        return {}

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Any) -> list[Entry]:
        """An entry for each rank and each time; those of one time act together."""
        ranks, made = self.struck_ranks(spec), list[Entry]()
        entry: Entry = {"fault": self.action, "at_step": at_step, "point": self.point, **self.details(spec)}
        for again in range(self.repeats):
            names = [f"f{again}-{rank}" for rank in ranks]
            together = {"together": names} if len(ranks) > 1 else {}
            made += [{"id": name, "rank": rank, **entry, **together} for rank, name in zip(ranks, names, strict=True)]
        return made
