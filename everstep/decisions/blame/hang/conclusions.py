"""The verdicts that an analysis of a hang can come to, in words."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.text import listed
from everstep.decisions.blame.hang.case import HangCase
from everstep.decisions.blame.hang.evidence import HangEvidence
from everstep.decisions.blame.hang.shared_group import SharedGroup
from everstep.decisions.blame.hang.stacks import LeafKind, ProcessRole
from everstep.decisions.blame.hang.verdict import HangConclusion, HangMethod, HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import Sink, WaitGraph

TOLD = 4
"""Open collectives that a verdict tells."""


def named(case: HangCase, ranks: Sequence[int], method: HangMethod, reason: str) -> HangVerdict:
    """A few ranks that the others wait for."""
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
    """Ranks wait for each other wherever one looks."""
    ranks = tuple(sorted(rank for sink in circles for rank in sink.ranks))
    return HangVerdict(
        HangConclusion.NOT_A_MACHINE,
        HangMethod.WAIT_FOR,
        f"{what}: the script has its ranks call collectives in an order that cannot work on any machine",
        ranks,
        evidence=open_collectives_told(case.graph),
    )


def unknown(reason: str, evidence: tuple[str, ...] = ()) -> HangVerdict:
    """Nobody is named."""
    return HangVerdict(HangConclusion.UNKNOWN, HangMethod.NONE, reason, evidence=evidence)


def held_up(rank: int, evidence: HangEvidence) -> str:
    """What holds a rank up that others wait for, as far as is known."""
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
    for one in graph.collectives[:TOLD]:
        lacking = f"missing: rank {listed(one.missing)}" if one.missing else "nobody is missing"
        lacking += f", rank {listed(one.passed)} done with it" if one.passed else ""
        told.append(
            f"{one.operation} {one.number} of group {one.group}: {len(one.entered)} inside "
            f"(rank {listed(one.entered)}), {lacking}"
        )
    return tuple(told)


def _machines(machines: Sequence[int], names: Sequence[str]) -> str:
    shown = listed(names_of(machines, names))
    return shown if names else shown.replace(", machine ", ", ").replace("machine ", "machines ", len(machines) > 1)
