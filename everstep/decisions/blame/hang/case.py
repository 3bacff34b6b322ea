"""What each way of judging a hang looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.decisions.blame.hang.evidence import HangEvidence
from everstep.decisions.blame.hang.outliers import Outliers
from everstep.decisions.blame.hang.shared_group import MOST_OF_JOB
from everstep.decisions.blame.hang.verdict import HangMethod
from everstep.decisions.blame.hang.wait_for import WaitGraph
from everstep.model.topology import Topology

MOST_NAMED = 0.25
"""Largest share of a job's machines that may be named one by one; one may always."""
TWO_FAULTS, TWO_FAULTS_OF = 2, 4
"""So may two of at least so many: two faults at once, as the breaker of evictions lets two go."""
METHODS = (HangMethod.STATE, HangMethod.WAIT_FOR, HangMethod.STACKS)


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How far an analysis may go."""

    methods: tuple[HangMethod, ...] = METHODS
    """Asked in this order; the first that finds somebody decides."""
    most_named: float = MOST_NAMED
    """Largest share of a job's machines that may be named one by one; one may always, and two of four."""
    most_over_evicted: float = MOST_OF_JOB
    """Largest share of a job's machines that may be over-evicted."""


@dataclass(frozen=True, slots=True)
class HangCase:
    """A job that does not step."""

    evidence: HangEvidence
    topology: Topology
    limits: HangLimits
    names: Sequence[str]
    """Of the machines, in their order; may be empty."""
    graph: WaitGraph
    differing: Outliers

    @property
    def known(self) -> int:
        """Number of ranks of which something is known."""
        return sum(1 for one in self.evidence.ranks.values() if one.is_known)

    def few(self, ranks: Sequence[int]) -> bool:
        """Whether so few machines hold some ranks that these may be named one by one."""
        machines = {self.topology.machine(rank) for rank in ranks}
        always = TWO_FAULTS if self.topology.machines >= TWO_FAULTS_OF else 1
        return len(machines) <= max(always, int(self.limits.most_named * self.topology.machines))
