"""The possible verdicts of the analysis of a hang, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.decisions.blame.hang.outliers import Outliers
from everstep.decisions.blame.hang.rank_samples import JobSamples
from everstep.decisions.blame.hang.shared_group import MOST_OF_JOB, SharedGroup
from everstep.decisions.blame.hang.stacks import LeafKind, ProcessRole
from everstep.decisions.blame.hang.verdict import HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import Sink, WaitGraph
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.topology import Topology

MOST_NAMED = 0.25
"""Largest share of a job's machines that may be named one by one; one may always."""
TWO_FAULTS, TWO_FAULTS_OF = 2, 4
"""So may two of at least so many: two faults at once, as the breaker of evictions lets two go."""
METHODS = (HangMethod.STATE, HangMethod.WAIT_FOR, HangMethod.STACKS)


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The limits of an analysis."""

    methods: tuple[HangMethod, ...] = METHODS
    """Asked in this order; the first that finds somebody decides."""
    most_named: float = MOST_NAMED
    """Largest share of a job's machines that may be named one by one; one may always, and two of four."""
    most_over_evicted: float = MOST_OF_JOB
    """Largest share of a job's machines that may be over-evicted."""


@dataclass(frozen=True, slots=True)
class HangCase:
    """A job that does not step."""

    evidence: JobSamples
    topology: Topology
    limits: HangLimits
    names: Sequence[str]
    """The names of the machines, in their order; may be empty."""
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


TOLD = 4
"""The number of open collectives that a verdict lists."""


def named(case: HangCase, ranks: Sequence[int], method: HangMethod, reason: str) -> HangVerdict:
    """Name a few ranks that the other ranks wait for."""
    machines = tuple(sorted({case.topology.machine(rank) for rank in ranks}))
    head = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} on {listed(names_of(machines, case.names))}: {reason}"
    told = open_collectives_told(case.graph)
    return HangVerdict(HangConclusion.NAMES, method, head, tuple(ranks), machines, evidence=told)


def over_evicted(
    case: HangCase,
    ranks: Sequence[int],
    shared: SharedGroup,
    method: HangMethod,
    what: str,
    *,
    evidence: tuple[str, ...] = (),
) -> HangVerdict:
    """A group that some ranks share; the machines of it without such a rank are innocent, and one at least is not."""
    group = shared.group
    suspects = {case.topology.machine(rank) for rank in ranks} & set(group.machines)
    one = len(group.machines) == 1
    reason = (
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)} ({listed(ranks)}): {what}; "
        f"{'all on' if not shared.unexplained else 'most on'} {_machines(group.machines, case.names)}"
        + ("" if one else f", the {group.kind} group they share")
    )
    innocent = 0 if one else len(group.machines) - len(suspects)
    more = [f"{innocent} of {len(group.machines)} machines have no outlier, and go on purpose"] if innocent else []
    if not one:
        more.append(f"over-eviction: the fault is on one or two of the {len(group.machines)} machines (section 5.1)")
    if shared.alternatives:
        more.append(f"as small, and as possible: {'; '.join(map(str, shared.alternatives))}")
    if shared.unexplained:
        more.append(f"outliers in no common group with them stay: rank {listed(shared.unexplained)}")
    return HangVerdict(
        HangConclusion.OVER_EVICTS if not one else HangConclusion.NAMES,
        method,
        reason,
        tuple(ranks),
        group.machines,
        innocent,
        group,
        shared.alternatives,
        shared.unexplained,
        evidence=(*more, *evidence),
    )


def by_the_script(case: HangCase, circles: Sequence[Sink], what: str) -> HangVerdict:
    """Blame the script: ranks wait for each other in all parts of the job."""
    ranks = tuple(sorted(rank for sink in circles for rank in sink.ranks))
    return HangVerdict(
        HangConclusion.NOT_A_MACHINE,
        HangMethod.WAIT_FOR,
        f"{what}: the script has its ranks call collectives in an order that cannot work on any machine",
        ranks,
        evidence=open_collectives_told(case.graph),
    )


def unknown(reason: str, evidence: tuple[str, ...] = ()) -> HangVerdict:
    """Name no rank."""
    return HangVerdict(HangConclusion.UNKNOWN, HangMethod.NONE, reason, evidence=evidence)


def held_up(rank: int, evidence: JobSamples) -> str:
    """Describe why a rank that other ranks wait for is blocked, as far as it is known."""
    known = evidence.of(rank)
    busy = [one for one in known.helpers if one.role is ProcessRole.DATA_LOADER and one.leaf.kind is not LeafKind.IDLE]
    if known.is_stopped:
        return "its process is stopped"
    if known.is_unresponsive:
        return "its process does not answer NCCL's RAS"
    if known.trainer is not None:
        helper = f"; its data loader's process is in {busy[0].leaf.operation}" if busy else ""
        return f"it waits for nobody: {known.trainer}{helper}"
    if known.record is not None:
        return "it has not entered the collective that the others are in, and is inside of none"
    return "nothing is known of it: it may be gone, or stopped"


def open_collectives_told(graph: WaitGraph) -> tuple[str, ...]:
    """The open collectives with most ranks inside."""
    told = []
    for collective in graph.collectives[:TOLD]:
        lacking = f"missing: rank {listed(collective.missing)}" if collective.missing else "nobody is missing"
        lacking += f", rank {listed(collective.passed)} done with it" if collective.passed else ""
        told.append(
            f"{collective.operation} {collective.number} of group {collective.group}: {len(collective.entered)} inside "
            f"(rank {listed(collective.entered)}), {lacking}"
        )
    return tuple(told)


def _machines(machines: Sequence[int], names: Sequence[str]) -> str:
    shown = listed(names_of(machines, names))
    return shown if names else shown.replace(", machine ", ", ").replace("machine ", "machines ", len(machines) > 1)
