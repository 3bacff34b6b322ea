"""The analysis of a hang: the machines that should leave the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from everstep.base.text import cut, listed
from everstep.decisions.blame.hang.by_waiting import by_waiting, judge_mismatch
from everstep.decisions.blame.hang.conclusions import (
    HangCase,
    HangLimits,
    named,
    open_collectives_told,
    over_evicted,
    unknown,
)
from everstep.decisions.blame.hang.outliers import find_outliers
from everstep.decisions.blame.hang.picture import picture
from everstep.decisions.blame.hang.rank_samples import JobSamples
from everstep.decisions.blame.hang.shared_group import shared_group
from everstep.decisions.blame.hang.verdict import HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import wait_graph
from everstep.model.finding import Finding, FindingSource, MachineFinding
from everstep.model.hang import HangConclusion, HangMethod, HangResult
from everstep.model.topology import Topology

ONE_SAMPLE = (
    "there was one sample only: that the job does not move is taken for granted; two, seconds apart, would show it"
)


def judge_hang(
    evidence: JobSamples, topology: Topology, limits: HangLimits | None = None, names: Sequence[str] = ()
) -> HangVerdict:
    """Judge a job that does not step, or say that nothing is known.

    Args:
        evidence: The evidence of all ranks that have any.
        topology: The topology of the job; the evidence's ranks are its ranks.
        limits: The limits of the analysis.
        names: The names of the machines, in their order; for people.
    """
    doing = {rank: known.doing for rank, known in evidence.ranks.items() if known.trainer}
    differing = find_outliers(doing, topology)
    case = HangCase(evidence, topology, limits or HangLimits(), names, wait_graph(evidence, topology), differing)
    verdict = _with_one_look(case, _conclude(case))
    drawn = picture(
        topology,
        differing.groups,
        named=verdict.ranks if verdict.conclusion is HangConclusion.NAMES else (),
        evicted=verdict.machines,
    )
    silent = tuple(rank for rank in range(topology.world_size) if not evidence.of(rank).is_known)
    return replace(verdict, unknown=silent, stacks=differing.groups, picture=drawn)


def _with_one_look(case: HangCase, verdict: HangVerdict) -> HangVerdict:
    """Return the verdict that one sample allows: in a healthy job some ranks wait for a computing rank too, and stacks
    differ."""
    evidence = case.evidence
    if evidence.moved is not None or evidence.is_hung or verdict.conclusion is HangConclusion.UNKNOWN:
        return verdict
    at_any_time = bool(evidence.ras_ranks) or any(known.trainer for known in evidence.ranks.values())
    if verdict.evicts and at_any_time and verdict.method is not HangMethod.STATE:
        what = "stacks" if not evidence.ras_ranks else "what ranks do"
        why = (
            f"one sample of {what} does not tell a job that hangs from one that computes. If it hangs: {verdict.reason}"
        )
        return unknown(why, verdict.evidence)
    return replace(verdict, evidence=(*verdict.evidence, ONE_SAMPLE))


def _conclude(case: HangCase) -> HangVerdict:
    if not case.known:
        return unknown("nothing is known of any rank")
    if sum(known.is_stopped for known in case.evidence.ranks.values()) == case.topology.world_size:
        return unknown("all ranks are stopped (state T): so somebody pauses a job on purpose")
    if progressed := _progressed(case):
        some = len(progressed) > 1
        return HangVerdict(
            HangConclusion.NOT_HUNG,
            HangMethod.NONE,
            f"{len(progressed)} rank{'s' * some} that wait{'s' * (not some)} for others progressed between two "
            f"samples: rank {listed(progressed)}",
        )
    reasons = []
    for method in case.limits.methods:
        found = _WAYS[method](case)
        if isinstance(found, HangVerdict):
            return found
        reasons.append(found)
    return unknown("; ".join(filter(None, reasons)) or "no method was asked", open_collectives_told(case.graph))


def _progressed(case: HangCase) -> list[int]:
    """Ranks that waited and are elsewhere now. One that waits for nobody may spin at one place for ever."""
    entered = {rank for collective in case.graph.collectives for rank in collective.entered}
    waits = entered | case.graph.blind | case.graph.edges.keys()
    return sorted((case.evidence.moved or frozenset()) & waits)


def _by_state(case: HangCase) -> HangVerdict | str:
    stopped = tuple(sorted(rank for rank, known in case.evidence.ranks.items() if known.is_stopped))
    if not stopped:
        return ""
    if not case.few(stopped):
        return f"{len(stopped)} ranks are stopped, on too many machines to be named"
    what = "their processes are" if len(stopped) > 1 else "its process is"
    return named(case, stopped, HangMethod.STATE, f"{what} stopped (state T)")


def _by_waiting(case: HangCase) -> HangVerdict | str:
    return judge_mismatch(case.graph, case.topology, case.names) or by_waiting(case)


def _by_stacks(case: HangCase) -> HangVerdict | str:
    outliers, undecided = case.differing.ranks, case.differing.undecided
    if not outliers:
        if not case.differing.groups:
            return "there are no stacks"
        if undecided:
            return f"no stack has a majority in the stages of {len(undecided)} ranks"
        return "no rank's stack differs from most of its peers'"
    shared = shared_group(outliers, case.topology, most_of_job=case.limits.most_over_evicted)
    if shared is None:
        return f"{len(outliers)} outliers share no group that is small enough: rank {listed(outliers)}"
    what = "what they do is not what most of their peers do"
    return over_evicted(case, outliers, shared, HangMethod.STACKS, what)


_WAYS: Mapping[HangMethod, Callable[[HangCase], HangVerdict | str]] = {
    HangMethod.STATE: _by_state,
    HangMethod.WAIT_FOR: _by_waiting,
    HangMethod.STACKS: _by_stacks,
}


RANKS_KEPT = 64
MACHINES_KEPT = 1024
LINES_KEPT = 12
PICTURE_CHARACTERS = 6000
REASON_CHARACTERS = 600
"""How much of one verdict an incident keeps."""


def found_of(
    verdict: HangVerdict, topology: Topology, names: Sequence[str], *, generation: int, looks: int, seconds: float
) -> HangResult:
    """Return the verdict as an incident keeps it: with names of machines, and bounded.

    Args:
        verdict: The verdict of the analysis.
        topology: The topology of the job.
        names: The names of its machines, in order.
        generation: The generation of the samples.
        looks: The number of samples.
        seconds: The time that the samples needed.
    """
    suspects = sorted({topology.machine(rank) for rank in verdict.ranks} & set(verdict.machines))
    return HangResult(
        generation=generation,
        conclusion=verdict.conclusion,
        method=verdict.method,
        reason=cut(verdict.reason, REASON_CHARACTERS),
        ranks=list(verdict.ranks[:RANKS_KEPT]),
        machines=list(names_of(verdict.machines[:MACHINES_KEPT], names)),
        suspects=list(names_of(suspects, names)),
        innocent=verdict.innocent,
        evidence=[cut(line, REASON_CHARACTERS) for line in verdict.evidence[:LINES_KEPT]],
        picture=cut(verdict.picture, PICTURE_CHARACTERS),
        unknown=len(verdict.unknown),
        looks=looks,
        seconds=round(seconds, 3),
    )


def findings_of_hang(found: HangResult) -> list[MachineFinding]:
    """Return a finding about each machine that should leave the job; it is not sure if innocent machines leave on
    purpose."""
    return [
        MachineFinding(
            machine=machine,
            finding=Finding(
                inspection=FindingSource.HANG,
                source=FindingSource.HANG,
                reason="hang-group" if found.over_evicts else "hang",
                text=_why_it_leaves(found, machine),
                sure=not found.over_evicts,
            ),
        )
        for machine in found.machines
    ]


def _why_it_leaves(found: HangResult, machine: str) -> str:
    if not found.over_evicts:
        return f"the job hangs: {found.reason}"
    count = f"{found.innocent} of {len(found.machines)} machines leave though nothing points at them"
    own = "one of its ranks is an outlier" if machine in found.suspects else "it leaves on purpose"
    return f"over-eviction, {count}; {own}. The job hangs: {found.reason}"
