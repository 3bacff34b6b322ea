"""The case of a job that hangs, and the verdicts that an analysis can give, in words."""

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
"""Largest share of a job's machines that may be evicted by name. A single machine may always be evicted."""
TWO_FAULTS, TWO_FAULTS_OF = 2, 4
"""Two machines may be evicted by name in a job of at least four, since two may fail at once."""
METHODS = (HangMethod.STATE, HangMethod.WAIT_FOR, HangMethod.STACKS)


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The limits of an analysis."""

    methods: tuple[HangMethod, ...] = METHODS
    """The methods in the order in which they are tried; the first with a verdict decides."""
    most_named: float = MOST_NAMED
    """Largest share of a job's machines that may be evicted by name. One machine may always be evicted, and two of four
    may."""
    most_over_evicted: float = MOST_OF_JOB
    """Largest share of a job's machines that may be over-evicted."""


@dataclass(frozen=True, slots=True)
class HangCase:
    """A job that does not step, and what its samples show."""

    samples: JobSamples
    topology: Topology
    limits: HangLimits
    names: Sequence[str]
    """The names of the machines, in their order; may be empty."""
    graph: WaitGraph
    differing: Outliers

    @property
    def known(self) -> int:
        """The number of ranks of which something is known."""
        return sum(sample.is_known for sample in self.samples.ranks.values())

    def on_few_machines(self, ranks: Sequence[int]) -> bool:
        """Return whether ranks are on so few machines that these may be evicted by name."""
        machines = {self.topology.machine(rank) for rank in ranks}
        always = TWO_FAULTS if self.topology.machines >= TWO_FAULTS_OF else 1
        return len(machines) <= max(always, int(self.limits.most_named * self.topology.machines))


COLLECTIVES_LISTED = 4
"""Number of open collectives that a verdict lists."""


def named(case: HangCase, ranks: Sequence[int], method: HangMethod, reason: str) -> HangVerdict:
    """Return the verdict that names a few ranks, because they hold up the job."""
    machines = tuple(sorted({case.topology.machine(rank) for rank in ranks}))
    head = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} on {listed(names_of(machines, case.names))}: {reason}"
    evidence = describe_collectives(case.graph)
    return HangVerdict(HangConclusion.NAMES, method, head, tuple(ranks), machines, evidence=evidence)


def over_evicted(
    case: HangCase,
    ranks: Sequence[int],
    shared: SharedGroup,
    method: HangMethod,
    what: str,
    *,
    evidence: tuple[str, ...] = (),
) -> HangVerdict:
    """Return the verdict that evicts all machines of the group that some ranks share.

    The machines without such a rank count as innocent. If the group is on one machine, the verdict names this machine.
    """
    group = shared.group
    suspects = {case.topology.machine(rank) for rank in ranks} & set(group.machines)
    one_machine = len(group.machines) == 1
    reason = (
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)} ({listed(ranks)}): {what}; "
        f"{'all on' if not shared.unexplained else 'most on'} {_machines(group.machines, case.names)}"
        + ("" if one_machine else f", the {group.kind} group they share")
    )
    count = len(group.machines)
    innocent = 0 if one_machine else count - len(suspects)
    more = [f"{innocent} of {count} machines have no outlier, and leave on purpose"] if innocent else []
    if not one_machine:
        more.append(f"over-eviction: the fault is on one or two of the {count} machines (ByteRobust, section 5.1)")
    if shared.alternatives:
        more.append(f"other groups that are as small and as likely: {'; '.join(map(str, shared.alternatives))}")
    if shared.unexplained:
        more.append(f"outliers outside of the group stay: rank {listed(shared.unexplained)}")
    return HangVerdict(
        HangConclusion.NAMES if one_machine else HangConclusion.OVER_EVICTS,
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
    """Return the verdict that blames the script: ranks wait for each other in all parts of the job."""
    ranks = tuple(sorted(rank for sink in circles for rank in sink.ranks))
    return HangVerdict(
        HangConclusion.NOT_A_MACHINE,
        HangMethod.WAIT_FOR,
        f"{what}: the script calls collectives in an order that cannot work on any machine",
        ranks,
        evidence=describe_collectives(case.graph),
    )


def unknown(reason: str, evidence: tuple[str, ...] = ()) -> HangVerdict:
    """Return the verdict that names no rank."""
    return HangVerdict(HangConclusion.UNKNOWN, HangMethod.NONE, reason, evidence=evidence)


def held_up(rank: int, samples: JobSamples) -> str:
    """Describe what a rank does that other ranks wait for, as far as it is known."""
    sample = samples.of(rank)
    loaders = [helper for helper in sample.helpers if helper.role is ProcessRole.DATA_LOADER]
    busy = [loader for loader in loaders if loader.leaf.kind is not LeafKind.IDLE]
    if sample.is_stopped:
        return "its process is stopped"
    if sample.is_unresponsive:
        return "its process does not answer NCCL's RAS"
    if sample.trainer is not None:
        loader = f"; its data loader's process is in {busy[0].leaf.operation}" if busy else ""
        return f"it waits for no rank: {sample.trainer}{loader}"
    if sample.record is not None:
        return "it has not entered the collective of the other ranks, and is inside no collective"
    return "nothing is known about it: it may be gone or stopped"


def describe_collectives(graph: WaitGraph) -> tuple[str, ...]:
    """Describe the open collectives with most ranks inside."""
    lines = []
    for collective in graph.collectives[:COLLECTIVES_LISTED]:
        missing = f"missing: rank {listed(collective.missing)}" if collective.missing else "no rank is missing"
        passed = f", rank {listed(collective.passed)} finished it" if collective.passed else ""
        lines.append(
            f"{collective.operation} {collective.number} of group {collective.group}: {len(collective.entered)} inside "
            f"(rank {listed(collective.entered)}), {missing}{passed}"
        )
    return tuple(lines)


def _machines(machines: Sequence[int], names: Sequence[str]) -> str:
    shown = listed(names_of(machines, names))
    return shown if names else shown.replace(", machine ", ", ").replace("machine ", "machines ", len(machines) > 1)
